"""A group that starts fetches what does not change before it joins; in-process groups."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.running import eventually
from support.training import (
    DEADLINE_S,
    TIMEOUT,
    Trainer,
    assert_identical,
    in_step,
    lighthouse,
    together,
)
from torch import nn

from torchft_svc.client import DistributedDataParallel, Optimizer
from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.http.feed import MIN_CHUNK_BYTES
from torchft_svc.client.step.catch_up import fetch_preview
from torchft_svc.coordination import LighthouseClient, ManagerClient, Security
from torchft_svc.errors import Drained, RequestRefused
from torchft_svc.testing.proxy import Gate, Hook, Proxy

# 16 chunks; beside them, what changes fits into one or two.
FROZEN = (512, 512)
FROZEN_BYTES = 4 * FROZEN[0] * FROZEN[1]


class Counted(HTTPTransport[Any]):
    """A transport that is reached through a proxy, which counts what it sends."""

    def __init__(self, hook: Hook | None) -> None:
        super().__init__(
            timedelta(seconds=DEADLINE_S), hostname="127.0.0.1", chunk_bytes=MIN_CHUNK_BYTES
        )
        self.proxy = Proxy(super().metadata(), hook)
        self.before_preview: Callable[[str], None] = lambda url: None
        self.after_preview: Callable[[], None] = lambda: None

    def metadata(self) -> str:
        return self.proxy.url

    def recv_preview(self, metadata: str, *what: Any, **more: Any) -> None:
        self.before_preview(metadata)
        super().recv_preview(metadata, *what, **more)
        self.after_preview()

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)
        self.proxy.__exit__()


class Partly(Trainer):
    """A group most of whose state is frozen; ``in_optimizer``: its optimizer has all parameters."""

    def __init__(
        self,
        address: str,
        name: str,
        seed: int,
        *,
        in_optimizer: bool = True,
        hook: Hook | None = None,
        **options: Any,
    ) -> None:
        self.transport = Counted(hook)
        settings: dict[str, Any] = {"checkpoint_transport": self.transport, "catch_up": True}
        super().__init__(address, name, seed, **{**settings, **options})
        self.frozen = nn.Parameter(torch.randn(FROZEN), requires_grad=False)
        self.model.register_parameter("frozen", self.frozen)
        params = [p for p in self.model.parameters() if in_optimizer or p.requires_grad]
        self.inner = torch.optim.Adam(params, lr=0.01)
        self.optimizer = Optimizer(self.manager, self.inner)
        self.parallel = DistributedDataParallel(self.manager, self.model, bucket_cap_mb=0.0001)


@pytest.mark.parametrize("in_optimizer", [True, False], ids=["early", "deferred"])
def test_k3_what_is_at_hand_is_not_fetched_again(in_optimizer: bool) -> None:
    options = {"in_optimizer": in_optimizer}
    with lighthouse() as address, Partly(address, "a", 0, **options) as a:
        a.steps(3)
        with Partly(address, "b", 1, **options) as b:
            before: list[int] = []
            b.transport.after_preview = lambda: before.append(a.transport.proxy.num_bytes)
            together(lambda: a.meets(2), lambda: b.meets(2))
            in_step(8, a, b)
            assert_identical([a, b])
            (preview_bytes,) = before
            assert preview_bytes > FROZEN_BYTES
            assert a.transport.proxy.num_bytes - preview_bytes < FROZEN_BYTES / 4


# -- a drain meanwhile -----------------------------------------------------------------------------


def drain(address: str, group: Partly) -> None:
    """Drain a group as an operator does; return when it knows."""
    client = LighthouseClient(address, connect_timeout=TIMEOUT)
    try:
        client.drain(group.name, reason="an operator drains it", timeout=TIMEOUT)
    finally:
        client.close()
    eventually(group.manager.is_draining)


def test_a_group_that_is_drained_while_it_catches_up_never_joins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    gate = Gate(FROZEN_BYTES // 2)
    with lighthouse() as address, Partly(address, "a", 0, hook=gate) as a:
        a.steps(3)
        with Partly(address, "b", 1) as b:

            def drain_meanwhile() -> None:
                gate.wait_until_reached()
                drain(address, b)

            with pytest.raises(Drained, match="an operator drains it"):
                together(drain_meanwhile, lambda: b.meets(2))
            assert "not fetched in advance: the group is being drained" in caplog.text
            assert a.steps(3) == [True, True, True], "nobody has waited for it"
            quorum = a.manager.last_quorum()
            assert quorum is not None
            assert quorum.replica_world_size == 1
            gate.open()


def test_g3_a_spare_whose_place_is_free_asks_the_group_that_was_lost_no_second_time() -> None:
    checks: list[int] = []

    def check() -> None:
        checks.append(len(checks))
        if len(checks) > 1:  # the first one is before the request
            raise RequestRefused("a place is free")

    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    asked = SimpleNamespace(job_members=lambda limit: ([address], 5), security=Security())
    with HTTPTransport[Any](TIMEOUT) as mine, pytest.raises(RequestRefused, match="place is free"):
        fetch_preview(mine, cast("ManagerClient", asked), 0, DEADLINE_S, check)


def test_a_member_that_is_drained_while_it_shows_its_state_is_replaced() -> None:
    """The group that catches up goes on at another member, and joins the others."""
    target = [10**6]

    def train(group: Partly) -> bool:
        """Train to the target; whether the group was drained before."""
        try:
            while group.manager.current_step() < target[0]:
                group.step()
        except Drained:
            group.manager.shutdown()
            group.transport.shutdown()
            return True
        return False

    with (
        lighthouse() as address,
        Partly(address, "a", 0) as a,
        Partly(address, "c", 2) as c,
        ExitStack() as stack,
    ):
        together(lambda: a.meets(2), lambda: c.meets(2))
        by_url = {each.transport.proxy.url: each for each in (a, c)}
        sources: list[Partly] = []

        def drain_first(url: str) -> None:
            sources.append(by_url[url])
            if len(sources) == 1:
                drain(address, sources[0])
                eventually(lambda: sources[0].manager.has_ended())

        def join() -> bool:
            b = stack.enter_context(Partly(address, "b", 1))
            b.transport.before_preview = drain_first
            b.meets(2)
            target[0] = b.manager.current_step() + 3
            joined.append(b)
            return train(b)

        joined: list[Partly] = []
        drained = together(lambda: train(a), lambda: train(c), join)
        first, second = sources
        assert {first, second} == {a, c}
        assert drained == [first is a, first is c, False]
        assert second.transport.proxy.num_bytes > FROZEN_BYTES
        assert_identical([second, *joined])
