"""A group that starts fetches what does not change before it joins; in-process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.training import DEADLINE_S, Trainer, assert_identical, in_step, lighthouse, together
from torch import nn

from torchft_svc.client import DistributedDataParallel, Optimizer
from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.http.feed import MIN_CHUNK_BYTES
from torchft_svc.testing.proxy import Proxy

# 16 chunks; beside them, what changes fits into one or two.
FROZEN = (512, 512)
FROZEN_BYTES = 4 * FROZEN[0] * FROZEN[1]


class Counted(HTTPTransport[Any]):
    """A transport that is reached through a proxy, which counts what it sends."""

    def __init__(self) -> None:
        super().__init__(
            timedelta(seconds=DEADLINE_S), hostname="127.0.0.1", chunk_bytes=MIN_CHUNK_BYTES
        )
        self.proxy = Proxy(super().metadata())
        self.after_preview: Callable[[], None] = lambda: None

    def metadata(self) -> str:
        return self.proxy.url

    def recv_preview(self, *what: Any, **more: Any) -> None:
        super().recv_preview(*what, **more)
        self.after_preview()

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)
        self.proxy.__exit__()


class Partly(Trainer):
    """A group most of whose state is frozen; ``in_optimizer``: its optimizer has all parameters."""

    def __init__(
        self, address: str, name: str, seed: int, *, in_optimizer: bool = True, **options: Any
    ) -> None:
        self.transport = Counted()
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
