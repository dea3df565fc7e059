"""Tests memory that is prepared before a state arrives."""

from __future__ import annotations

import resource
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.encoding import memory
from torchft_svc.client.checkpointing.encoding.memory import (
    MIN_BYTES,
    AtHand,
    Filling,
    Staging,
)

LONG = timedelta(seconds=20)
LONG_S = LONG.total_seconds()
MIB = 1 << 20
NUM_BYTES = 64 * MIB
HUGE_PAGES = NUM_BYTES >> 21

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system makes nothing ready")


def faults_of_writing(view: memoryview) -> int:
    """How many pages this thread must ask the system for in order to fill ``view``."""
    target = np.frombuffer(view, dtype=np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    target[:] = 7
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def filling_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "torchft-checkpoint-memory"]


def test_what_was_expected_is_ready() -> None:
    kept = Staging()
    kept.expect(NUM_BYTES)
    assert kept.wait(LONG_S)
    taken = kept.pop_filling(NUM_BYTES)
    assert taken._place == NUM_BYTES
    assert faults_of_writing(taken.view(NUM_BYTES)) < HUGE_PAGES // 2


def test_a_larger_state_than_expected_has_its_first_part_ready() -> None:
    kept = Staging()
    kept.expect(NUM_BYTES)
    assert kept.wait(LONG_S)
    taken = kept.pop_filling(2 * NUM_BYTES)
    assert len(taken.view(2 * NUM_BYTES)) == 2 * NUM_BYTES
    assert taken._place >= NUM_BYTES
    assert taken.wait(LONG_S)  # and the rest is made ready meanwhile
    assert faults_of_writing(taken.view(2 * NUM_BYTES)) < HUGE_PAGES


def test_a_smaller_state_than_expected_has_only_what_it_needs() -> None:
    kept = Staging()
    kept.expect(NUM_BYTES)
    assert kept.wait(LONG_S)
    taken = kept.pop_filling(3 * MIB)
    assert taken._place == 4 * MIB
    assert len(taken.view(3 * MIB)) == 3 * MIB


def test_making_ready_changes_no_byte() -> None:
    filling = Filling(NUM_BYTES)
    np.frombuffer(filling.view(NUM_BYTES), dtype=np.uint8)[:] = 7  # while it is made ready
    assert filling.wait(LONG_S)
    filling.resize(2 * NUM_BYTES)
    assert filling.wait(LONG_S)
    content = np.frombuffer(filling.view(2 * NUM_BYTES), dtype=np.uint8)
    assert (content[:NUM_BYTES] == 7).all()
    assert not content[NUM_BYTES:].any()


def test_what_is_expected_no_more_is_freed() -> None:
    kept = Staging()
    kept.expect(NUM_BYTES)
    held = weakref.ref(kept._kept)
    kept.expect(0)
    assert held() is None
    assert filling_threads() == []


def test_what_is_taken_is_kept_no_more() -> None:
    kept = Staging()
    kept.expect(NUM_BYTES)
    first, second = kept.pop_filling(NUM_BYTES), kept.pop_filling(NUM_BYTES)
    first.view(1)[0] = 7
    assert second.view(1)[0] == 0
    for filling in (first, second):
        filling.stop()
    assert filling_threads() == []


def test_a_state_that_is_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that overcommits would grant it."""
    monkeypatch.setattr(memory, "total_bytes", lambda: NUM_BYTES - 1)
    with pytest.raises(MemoryError, match=f"{NUM_BYTES} bytes does not fit into {NUM_BYTES - 1}"):
        Staging().pop_filling(NUM_BYTES)
    assert filling_threads() == []


def test_nothing_is_made_ready_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * NUM_BYTES - 1)
    kept = Staging()
    kept.expect(NUM_BYTES)
    assert kept._kept is None
    assert filling_threads() == []


def test_a_system_that_makes_nothing_ready_gives_memory_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    kept = Staging()
    kept.expect(NUM_BYTES)
    assert kept.wait(LONG_S)
    taken = kept.pop_filling(NUM_BYTES)
    assert taken._place == 0
    assert faults_of_writing(taken.view(NUM_BYTES)) >= HUGE_PAGES


@pytest.fixture
def source() -> Iterator[HTTPTransport[Any]]:
    with HTTPTransport(LONG, hostname="127.0.0.1") as transport:
        yield transport


@pytest.mark.parametrize("expected_floats", [1, MIB, 4 * MIB, 8 * MIB])
def test_a_state_of_any_size_arrives_in_what_was_expected(
    source: HTTPTransport[Any], expected_floats: int
) -> None:
    state = {"w": torch.arange(4.0 * MIB), "again": None}
    state["again"] = state["w"].view(2, -1)  # the same bytes, which are not counted twice
    source.send_checkpoint([1], 1, state, LONG)
    with HTTPTransport[Any](LONG, hostname="127.0.0.1") as receiver:
        receiver.expect_checkpoint({"w": torch.empty(expected_floats)})
        received = receiver.recv_checkpoint(0, source.metadata(), 1, LONG)
    assert torch.equal(received["w"], state["w"])
    assert torch.equal(received["again"], state["again"])


def test_tied_weights_are_expected_once(source: HTTPTransport[Any]) -> None:
    weights = torch.zeros(MIN_BYTES // 2)
    source.expect_checkpoint({"w": weights, "tied": weights.view(2, -1), "n": 1})
    assert source.wait_until_prepared(LONG)
    kept = source._staging._kept
    assert kept is not None
    assert kept._place == weights.nbytes


def test_what_is_at_hand_goes_with_its_memory() -> None:
    staging = Staging()
    staging.keep(Filling(100), AtHand(100, 10, {0: b"a digest"}))
    staging.pop_filling(100).stop()
    staging.pop_filling(100).stop()  # the first user was interrupted before it read the digests
    assert staging.pop_at_hand(100, 10) == {}


def test_shutdown_frees_what_was_expected() -> None:
    transport: HTTPTransport[Any] = HTTPTransport(LONG, hostname="127.0.0.1")
    transport.expect_checkpoint({"w": torch.zeros(MIB * 16)})
    transport.shutdown()
    transport.expect_checkpoint({"w": torch.zeros(MIB * 16)})
    assert transport._staging._kept is None
    assert filling_threads() == []
