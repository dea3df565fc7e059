"""Tests how a source copies and hashes what it serves (rules H5 and K3)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torchft_svc.client.checkpointing.encoding.memory import Memory
from torchft_svc.client.checkpointing.encoding.serialization import Described, describe
from torchft_svc.client.checkpointing.http import served
from torchft_svc.client.checkpointing.http.served import ServedState
from torchft_svc.client.checkpointing.http.wire import digest_of
from torchft_svc.testing.proxy import DEADLINE_S

CHUNK_BYTES = 64 << 10
NUM_CHUNKS = 4
STATE = torch.arange(float(NUM_CHUNKS * CHUNK_BYTES // 4))


class Watched(Memory):
    """The memory of a state, whose readers meet at ``barrier``, and are counted by chunks."""

    def __init__(self, state: torch.Tensor, barrier: threading.Barrier | None = None) -> None:
        view = memoryview(state.numpy()).cast("B")
        super().__init__([(0, view)], len(view))
        self.reads: list[int] = []
        self.is_read = threading.Event()
        self.may_go_on = threading.Event()
        self._barrier = barrier

    def views(self, start: int, stop: int, limit: int | None = None) -> list[memoryview]:
        if start < stop:
            self.reads.append(start // CHUNK_BYTES)
            self.is_read.set()
            if self._barrier is None:
                assert self.may_go_on.wait(DEADLINE_S)
            else:
                self._barrier.wait(DEADLINE_S)
        return super().views(start, stop, limit)


def serve(memory: Memory) -> ServedState:
    description = describe({"w": STATE}).description
    return ServedState(
        Described(description, memory),
        step=1,
        num_receivers=1,
        chunk_bytes=CHUNK_BYTES,
        idle_timeout_s=DEADLINE_S,
    )


def digests_of(tensor: torch.Tensor) -> dict[int, bytes]:
    state = serve(describe({"w": tensor}).memory)
    return {n: digest_of(state.reader(n), CHUNK_BYTES, n) for n in range(NUM_CHUNKS)}


@pytest.mark.parametrize("is_claimed", [False, True], ids=["copied", "hashed"])
def test_h5_chunks_are_detached_side_by_side(
    is_claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads have to be in the memory at once."""
    monkeypatch.setattr(served.os, "cpu_count", lambda: 2)
    memory = Watched(STATE.clone(), threading.Barrier(2))
    state = serve(memory)
    if is_claimed:
        state.claim("receiver", digests_of(STATE))
    state.detach()
    assert set(memory.reads) == set(range(NUM_CHUNKS))
    assert state.copied_bytes == (0 if is_claimed else STATE.nbytes)


def test_h5_chunks_are_detached_without_a_free_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(served.os, "cpu_count", lambda: 2)
    state = serve(describe({"w": STATE}).memory)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        state.detach()
    assert state.copied_bytes == STATE.nbytes


def test_k3_only_chunks_with_other_bits_are_copied_of_those_at_hand() -> None:
    """Two chunks that have exchanged their places are copied, too."""
    mine = STATE.clone()
    state = serve(describe({"w": mine}).memory)
    claimed = digests_of(STATE)
    claimed[1], claimed[2] = claimed[2], claimed[1]
    mine[-1] += 1
    state.claim("receiver", claimed)
    state.detach()
    expected = mine.clone()
    mine.zero_()  # the owner may change it as soon as the call has returned
    assert state.copied_bytes == 3 * CHUNK_BYTES
    for chunk in (1, 2, 3):
        with state.reader(chunk)(0, CHUNK_BYTES) as views:
            (view,) = views
        floats = expected[chunk * CHUNK_BYTES // 4 :][: CHUNK_BYTES // 4]
        assert bytes(view) == floats.numpy().tobytes()
    with pytest.raises(served.Gone), state.reader(0)(0, 1):
        pass


def test_k3_two_threads_that_want_one_digest_read_the_chunk_once() -> None:
    memory = Watched(STATE.clone())
    state = serve(memory)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(state.digest, 0)
        assert memory.is_read.wait(DEADLINE_S)
        second = pool.submit(state.digest, 0)
        assert not second.done()
        memory.may_go_on.set()
        expected = digests_of(STATE)[0]
        assert {first.result(DEADLINE_S), second.result(DEADLINE_S)} == {expected}
    assert memory.reads == [0]
