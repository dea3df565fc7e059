"""Tests what a holder keeps of the copies that it fetches (rules B1, B4, B6)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from torchft_svc.buddy.holder import HolderConfig, WorkerCopies
from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.step.state import MANAGER_KEY
from torchft_svc.core.quorum.lighthouse.copies import HeldCopy, StateKey, choose_buddy
from torchft_svc.errors import ConfigError, PeerError
from torchft_svc.testing.proxy import DEADLINE_S

LONG = timedelta(seconds=DEADLINE_S)
SOON = timedelta(milliseconds=300)


def state_of(step: int) -> dict[str, Any]:
    counters = {"step": step, "quorum_id": 7, "batches_committed": step}
    return {"user": torch.full((1000,), float(step)), MANAGER_KEY: counters}


def config(**changes: Any) -> HolderConfig:
    return HolderConfig(**{"lighthouse": "127.0.0.1:1", "host": "127.0.0.1", **changes})


@pytest.fixture
def pairs() -> Iterator[WorkerCopies]:
    """The copies of a worker of two."""
    copies = WorkerCopies(1, config(group_world_size=2, ranks=(0, 1)))
    yield copies
    copies.keep_only(set())


def steps(copies: WorkerCopies) -> list[int]:
    return [each.step for each in copies.describe_copies()]


def fetch(copy: HeldCopy) -> Any:
    with HTTPTransport[Any](LONG, hostname="127.0.0.1") as receiver:
        return receiver.recv_checkpoint(0, copy.address, copy.step, SOON)


@pytest.mark.parametrize(
    ("beside", "buddy"), [("a", "b:2"), ("b", "c:3"), ("c", "a:1"), ("", "a:1"), ("bb", "c:3")]
)
def test_b1_the_buddy_is_the_next_group(beside: str, buddy: str) -> None:
    members = dict.fromkeys(("c:3", "a:1", "b:2"), "address")
    assert choose_buddy(members, beside) == buddy


def test_b1_a_lone_group_is_its_own_buddy() -> None:
    assert choose_buddy({"a:1": "address"}, "a") == "a:1"


def test_b4_the_copy_of_a_lone_worker_takes_the_place_of_the_one_before() -> None:
    copies = WorkerCopies(0, config())
    first, second = copies.add(state_of(5)), copies.add(state_of(10))
    assert steps(copies) == [10] == [copies.newest_step()]
    assert torch.equal(fetch(second)["user"], state_of(10)["user"])
    with pytest.raises(PeerError):
        fetch(first)
    copies.keep_only(set())
    with pytest.raises(PeerError):
        fetch(second)


def test_b4_a_copy_can_be_fetched_again_and_again() -> None:
    copies = WorkerCopies(0, config())
    copy = copies.add(state_of(5))
    for _ in range(3):
        assert torch.equal(fetch(copy)["user"], state_of(5)["user"])
    copies.keep_only(set())


def test_b4_the_newest_that_is_whole_stays_until_a_newer_one_is(pairs: WorkerCopies) -> None:
    old = pairs.add(state_of(5))
    pairs.free_outdated({old.state_key}, is_next_coming=True)
    assert steps(pairs) == [5]
    new = pairs.add(state_of(10))
    pairs.free_outdated({old.state_key}, is_next_coming=False)
    assert steps(pairs) == [5, 10]
    pairs.free_outdated(
        {old.state_key}, is_next_coming=True
    )  # another one arrives, and the one of 10 is not whole
    assert steps(pairs) == [5]
    with pytest.raises(PeerError):
        fetch(new)
    newest = pairs.add(state_of(15))
    pairs.free_outdated({newest.state_key, StateKey(99, 7, 2)}, is_next_coming=False)
    assert steps(pairs) == [15]


def test_b4_without_a_whole_state_the_newest_copy_stays(pairs: WorkerCopies) -> None:
    pairs.add(state_of(5))
    pairs.add(state_of(10))
    pairs.free_outdated(set(), is_next_coming=True)
    assert steps(pairs) == [10]


@pytest.mark.parametrize(
    "wrong", [{"group_world_size": 0}, {"ranks": ()}, {"ranks": (1,)}, {"ranks": (-1,)}]
)
def test_ranks_that_no_worker_has_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config(**wrong)
