"""Tests that a newcomer heals from all groups that are up to date, over slow links."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.bounds import Late
from support.running import eventually
from support.training import TIMEOUT, Trainer, assert_identical, in_step, lighthouse, together

from torchft_svc.client import HTTPTransport
from torchft_svc.coordination import GroupStatus, LighthouseClient
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.testing.proxy import Gate, Hook, Proxy, Throttle

CHUNK_BYTES = 64 << 10
NUM_FLOATS = 1 << 20
LINK_BYTES_PER_S = 8e6


class FarAway(HTTPTransport[Any]):
    """Reached by others over a slow link only."""

    def __init__(self, hook: Hook) -> None:
        super().__init__(TIMEOUT, hostname="127.0.0.1", chunk_bytes=CHUNK_BYTES)
        self.link = Proxy(super().metadata(), hook)

    def metadata(self) -> str:
        return self.link.url

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)
        self.link.__exit__(None, None, None)


class Veteran(Trainer):
    """A group with some megabytes more than its model."""

    def __init__(self, address: str, name: str, seed: int, hook: Hook | None = None) -> None:
        self.transport = FarAway(hook or Throttle(LINK_BYTES_PER_S))
        self.ballast = torch.full((NUM_FLOATS,), float(seed))
        super().__init__(address, name, seed, checkpoint_transport=self.transport)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ballast": self.ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ballast = state["ballast"].clone()
        super().load_state_dict(state)


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=1) as address:
        yield address


def test_i3_a_newcomer_heals_from_all_groups_at_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchft_svc.client.checkpointing.http.fetch")
    with contextlib.ExitStack() as stack:
        old = [stack.enter_context(Veteran(address, name, n)) for n, name in enumerate("abc")]
        together(*(lambda group=group: group.meets(3) for group in old))
        num_before = [group.transport.link.num_bytes for group in old]
        new = stack.enter_context(Veteran(address, "d", 3))
        together(new.step, *(lambda group=group: group.meets(4) for group in old))
        until = max(group.manager.current_step() for group in old) + 2
        everyone = [*old, new]
        in_step(until, *everyone)
        assert_identical(everyone)
        assert all(torch.equal(group.ballast, old[0].ballast) for group in everyone)
        served = [
            group.transport.link.num_bytes - before
            for group, before in zip(old, num_before, strict=True)
        ]
        if not min(served) > 0.15 * NUM_FLOATS * 4 or not sum(served) < 1.4 * NUM_FLOATS * 4:
            raise Late(f"links as fast as each other have served {served}")
        eventually(lambda: all(group.transport.copied_bytes == 0 for group in everyone))


def test_the_lighthouse_knows_how_far_a_heal_is(address: str) -> None:
    num_bytes, gate = NUM_FLOATS * 4, Gate(NUM_FLOATS * 2)
    with Veteran(address, "a", 0, gate) as old, Veteran(address, "b", 1) as new:
        old.steps(2)
        heal = threading.Thread(target=together, args=(new.step, lambda: old.meets(2)))
        heal.start()
        gate.wait_until_reached()
        found = eventually(lambda: status_of_heal(address, "b"))
        gate.open()
        heal.join()
        assert found.phase is Phase.HEALING
        assert 0.1 * num_bytes < found.received_bytes < 0.6 * num_bytes
        assert num_bytes <= found.state_bytes < 1.1 * num_bytes
        eventually(lambda: status_of_heal(address, "b") is None)


def status_of_heal(address: str, name: str) -> GroupStatus | None:
    """The group, if it shows how far its heal is."""
    with LighthouseClient(address, TIMEOUT) as client:
        groups = client.status(DEFAULT_JOB)[0].groups
    named = (each for each in groups if stable_name(each.replica_id) == name)
    return next((each for each in named if each.state_bytes), None)
