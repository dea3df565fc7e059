"""Tests what a source shows of its state, and what a receiver makes of it (rules K1 to K6)."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from support.running import eventually

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.encoding.memory import Staging
from torchft_svc.client.checkpointing.http import connections, preview
from torchft_svc.client.checkpointing.http.requests import PREVIEW_SEED
from torchft_svc.client.checkpointing.http.wire import Wire, seal
from torchft_svc.client.step.state import ReadGate
from torchft_svc.errors import CheckpointError, PeerError, RequestRefused
from torchft_svc.testing.proxy import DEADLINE_S, Damage, Hook, Proxy

LONG = timedelta(seconds=DEADLINE_S)
CHUNK_BYTES = 64 << 10
NUM_CHUNKS = 16
CHUNK_FLOATS = CHUNK_BYTES // 4
STEP = 7

Transport = HTTPTransport[Any]


class Worker:
    """A source with a state that it may change, in both parts; behind a proxy that counts."""

    def __init__(self, stack: contextlib.ExitStack, hook: Hook | None = None) -> None:
        self.transport: Transport = stack.enter_context(
            HTTPTransport(LONG, hostname="127.0.0.1", chunk_bytes=CHUNK_BYTES)
        )
        self.proxy = stack.enter_context(Proxy(self.transport.metadata(), hook))
        self.early = torch.arange(float(NUM_CHUNKS * CHUNK_FLOATS))
        self.deferred = torch.arange(float(2 * CHUNK_FLOATS)) + 0.5
        self.gate = ReadGate()
        self.at_step = STEP
        self.on_look: Callable[[], None] = lambda: None
        self.transport.show_preview(self)

    def step(self) -> int:
        self.on_look()
        return self.at_step

    def collect(self, *, is_deferred: bool) -> Any:
        return {"w": self.deferred if is_deferred else self.early}

    def reading(self) -> AbstractContextManager[None]:
        return self.gate.reading(DEADLINE_S)

    def update(self, *chunks: int) -> None:
        """Commit a step that changes these chunks of the early part."""
        self.gate.shut(DEADLINE_S)
        for chunk in chunks:
            self.early[chunk * CHUNK_FLOATS] += 1
        self.at_step += 1
        self.gate.open()


class Heal:
    """A receiver that has to heal from workers."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.transport: Transport = stack.enter_context(
            HTTPTransport(LONG, hostname="127.0.0.1", num_connections=2)
        )

    def catch_up(self, worker: Worker, check: Callable[[], None] = lambda: None) -> None:
        self.transport.recv_preview(worker.proxy.url, LONG, check)

    def heal(self, source: Worker, *others: Worker) -> int:
        """Heal, check every bit, and return the bytes that the sources have sent for that."""
        workers = (source, *others)
        before = sum(each.proxy.num_bytes for each in workers)
        for number, each in enumerate(workers):
            announced = ([1], []) if number == 0 else ([], [1])
            each.transport.send_striped(*announced, STEP, each.collect(is_deferred=False), LONG)
        urls = [each.proxy.url for each in workers]
        lookups: list[Callable[[], str]] = [lambda url=url: url for url in urls[1:]]  # type: ignore[misc]
        early = self.transport.recv_striped(0, urls[0], lookups, STEP, LONG)
        source.transport.send_deferred([1], [], STEP, source.collect(is_deferred=True), LONG)
        deferred = self.transport.recv_deferred(0, urls[0], [], STEP, LONG)
        assert torch.equal(early["w"], source.early)
        assert torch.equal(deferred["w"], source.deferred)
        return sum(each.proxy.num_bytes for each in workers) - before


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_k3_only_what_differs_is_fetched(stack: contextlib.ExitStack) -> None:
    worker, receiver = Worker(stack), Heal(stack)
    receiver.catch_up(worker)
    worker.update(2, 11)
    assert 2 * CHUNK_BYTES < receiver.heal(worker) < 3 * CHUNK_BYTES


def test_k3_any_source_may_have_shown_what_another_one_heals(stack: contextlib.ExitStack) -> None:
    workers, receiver = [Worker(stack) for _ in range(3)], Heal(stack)
    receiver.catch_up(workers[2])
    for worker in workers:
        worker.update(5)
    sent = receiver.heal(*workers)
    assert CHUNK_BYTES < sent < 4 * CHUNK_BYTES  # one chunk, perhaps from two of them


def test_k3_a_preview_of_other_bits_spoils_nothing(stack: contextlib.ExitStack) -> None:
    worker, liar, receiver = Worker(stack), Worker(stack), Heal(stack)
    liar.early += 1.0
    liar.deferred += 1.0
    receiver.catch_up(liar)
    assert receiver.heal(worker) > (NUM_CHUNKS + 2) * CHUNK_BYTES


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.data.mul_(2.0),
        lambda tensor: np.negative(tensor.numpy(), out=tensor.numpy()),
        lambda tensor: ctypes.memset(tensor.data_ptr(), 1, tensor.nbytes),
    ],
    ids=["data", "numpy", "outside of torch"],
)
def test_k3_a_write_that_torch_does_not_count_is_healed(
    write: Callable[[torch.Tensor], Any], stack: contextlib.ExitStack
) -> None:
    worker, receiver = Worker(stack), Heal(stack)
    receiver.catch_up(worker)
    parts = (worker.early, worker.deferred)
    before = [each._version for each in parts]
    for each in parts:
        write(each)
    assert [each._version for each in parts] == before
    assert receiver.heal(worker) > (NUM_CHUNKS + 2) * CHUNK_BYTES


def test_k3_a_state_of_another_form_is_fetched_as_a_whole(stack: contextlib.ExitStack) -> None:
    worker, receiver = Worker(stack), Heal(stack)
    receiver.catch_up(worker)
    worker.early = torch.cat([worker.early, torch.ones(5)])
    assert receiver.heal(worker) > NUM_CHUNKS * CHUNK_BYTES


@pytest.mark.parametrize("num_sources", [1, 2])
def test_k3_what_is_at_hand_is_not_copied(num_sources: int, stack: contextlib.ExitStack) -> None:
    workers, receiver = [Worker(stack) for _ in range(num_sources)], Heal(stack)
    receiver.catch_up(workers[0])
    for worker in workers:
        worker.deferred[0] += 1
    urls = [each.proxy.url for each in workers]
    lookups: list[Callable[[], str]] = [lambda url=url: url for url in urls[1:]]  # type: ignore[misc]
    pool = stack.enter_context(ThreadPoolExecutor(1))
    received = pool.submit(receiver.transport.recv_deferred, 0, urls[0], lookups, STEP, LONG)
    eventually(lambda: all(each.transport._deferred._claims for each in workers))
    for number, each in enumerate(workers):
        announced = ([1], []) if number == 0 else ([], [1])
        each.transport.send_deferred(*announced, STEP, {"w": each.deferred}, LONG)
        assert each.transport.copied_bytes <= CHUNK_BYTES, "one of two chunks"
    expected = workers[0].deferred.clone()
    for each in workers:
        each.deferred += 1.0  # as soon as the call has returned
    assert torch.equal(received.result(DEADLINE_S)["w"], expected)
    eventually(lambda: all(each.transport._deferred.state.is_over for each in workers))  # type: ignore[union-attr]


def test_k3_a_claim_of_other_bits_is_no_claim(stack: contextlib.ExitStack) -> None:
    worker, liar, receiver = Worker(stack), Worker(stack), Heal(stack)
    liar.deferred += 1.0
    receiver.catch_up(liar)
    pool = stack.enter_context(ThreadPoolExecutor(1))
    url = worker.proxy.url
    received = pool.submit(receiver.transport.recv_deferred, 0, url, [], STEP, LONG)
    eventually(lambda: worker.transport._deferred._claims)
    worker.transport.send_deferred([1], [], STEP, {"w": worker.deferred}, LONG)
    assert torch.equal(received.result(DEADLINE_S)["w"], worker.deferred)


@pytest.mark.parametrize("later_steps", [0, 1])
def test_k3_a_claim_counts_for_one_receiver_and_step(
    later_steps: int, stack: contextlib.ExitStack
) -> None:
    """The group that has claimed is gone, and another one, which has nothing at hand, heals."""
    step = STEP + later_steps
    worker, gone, receiver = Worker(stack), Heal(stack), Heal(stack)
    gone.catch_up(worker)
    pool = stack.enter_context(ThreadPoolExecutor(2))
    url = worker.proxy.url
    lost = pool.submit(gone.transport.recv_deferred, 0, url, [], STEP, LONG)
    eventually(lambda: worker.transport._deferred._claims)
    gone.transport.shutdown()
    with pytest.raises(PeerError):
        lost.result(DEADLINE_S)
    claims = worker.transport._deferred._claims
    eventually(lambda: not any(claim.is_there() for claim in list(claims.values())))
    worker.transport.send_deferred([1], [], step, {"w": worker.deferred}, LONG)
    later = receiver.transport.recv_deferred(0, url, [], step, LONG)
    assert torch.equal(later["w"], worker.deferred)


def test_k1_what_each_step_changes_is_not_fetched_twice(stack: contextlib.ExitStack) -> None:
    worker, receiver = Worker(stack), Heal(stack)
    worker.on_look = lambda: worker.update(0, 1, 2, 3)
    receiver.catch_up(worker)
    worker.on_look = lambda: None
    assert worker.proxy.num_bytes < (NUM_CHUNKS + 2) * CHUNK_BYTES + CHUNK_BYTES
    assert 4 * CHUNK_BYTES < receiver.heal(worker) < 5 * CHUNK_BYTES


def test_k2_an_update_waits_for_no_transfer(stack: contextlib.ExitStack) -> None:
    """The link stands still in the middle of a chunk: the gate is open for updates."""
    held, reached = threading.Event(), threading.Event()

    def hook(place: int, data: bytes) -> bytes:
        if place > 4 * CHUNK_BYTES:
            reached.set()
            assert held.wait(DEADLINE_S)
        return data

    worker, receiver = Worker(stack, hook), Heal(stack)
    thread = threading.Thread(target=receiver.catch_up, args=(worker,))
    thread.start()
    assert reached.wait(DEADLINE_S)
    worker.update(NUM_CHUNKS - 1)
    held.set()
    thread.join(DEADLINE_S)
    receiver.heal(worker)


def test_k2_nothing_is_read_during_an_update(stack: contextlib.ExitStack) -> None:
    worker, receiver = Worker(stack), Heal(stack)
    worker.gate.shut(DEADLINE_S)
    thread = threading.Thread(target=receiver.catch_up, args=(worker,))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert worker.proxy.num_bytes < CHUNK_BYTES
    worker.gate.open()
    thread.join(DEADLINE_S)
    assert receiver.heal(worker) < CHUNK_BYTES


def test_k4_what_has_arrived_of_a_lost_source_is_used(stack: contextlib.ExitStack) -> None:
    worker, receiver = Worker(stack), Heal(stack)
    lost = Worker(stack, lambda place, data: data if place < 9 * CHUNK_BYTES else None)
    with pytest.raises(PeerError):
        receiver.catch_up(lost)
    assert receiver.heal(worker) < (NUM_CHUNKS - 3) * CHUNK_BYTES


def test_k4_another_preview_goes_on_where_the_last_one_ended(stack: contextlib.ExitStack) -> None:
    worker, receiver = Worker(stack), Heal(stack)
    lost = Worker(stack, lambda place, data: data if place < 9 * CHUNK_BYTES else None)
    with pytest.raises(PeerError):
        receiver.catch_up(lost)
    receiver.catch_up(worker)
    assert worker.proxy.num_bytes < (NUM_CHUNKS - 3) * CHUNK_BYTES
    assert receiver.heal(worker) < CHUNK_BYTES


def test_k4_damage_on_the_line_costs_a_chunk(stack: contextlib.ExitStack) -> None:
    worker = Worker(stack, Damage([3 * CHUNK_BYTES]))
    receiver = Heal(stack)
    receiver.catch_up(worker)
    assert receiver.heal(worker) < 2 * CHUNK_BYTES


def test_k5_nothing_is_fetched_of_a_state_that_changes_as_a_whole(
    stack: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    worker, receiver = Worker(stack), Heal(stack)

    def update() -> None:
        worker.deferred += 1.0
        worker.update(*range(NUM_CHUNKS))

    worker.on_look = update
    with caplog.at_level("INFO"):
        receiver.catch_up(worker)
    assert "change with each step" in caplog.text
    worker.on_look = lambda: None
    receiver.heal(worker)


def test_k6_previews_leave_heals_their_connections(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections of a preview stay open, and would take the places of a heal."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(connections, "MAX_APART", 2)  # for all but one of the three of a preview
    worker, receiver = Worker(stack), Heal(stack)
    heals = threading.Event()

    def wait_for_heal() -> None:
        assert heals.wait(DEADLINE_S)

    def num_apart() -> int:
        return len(worker.transport._server._connections._apart)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(Heal(stack).catch_up, worker, wait_for_heal)
        try:
            eventually(lambda: num_apart() == 2)
            second = pool.submit(Heal(stack).catch_up, worker)
            receiver.heal(worker)
            assert not second.done()
        finally:
            heals.set()
        first.result(DEADLINE_S)
        second.result(DEADLINE_S)
    eventually(lambda: num_apart() == 0)


def test_k6_a_preview_without_a_second_connection_gives_the_first_one_up(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_APART", 1)
    worker, receiver = Worker(stack), Heal(stack)
    began_at = time.monotonic()
    with pytest.raises(CheckpointError, match="as many groups as possible"):
        receiver.catch_up(worker)
    assert time.monotonic() - began_at < DEADLINE_S / 2
    receiver.heal(worker)


def test_a_worker_without_the_setting_shows_nothing(stack: contextlib.ExitStack) -> None:
    silent: Transport = stack.enter_context(HTTPTransport(LONG, hostname="127.0.0.1"))
    with pytest.raises(CheckpointError, match="shows its state to no group"):
        Heal(stack).transport.recv_preview(silent.metadata(), LONG, lambda: None)


def test_a_state_function_that_fails_ends_the_preview(stack: contextlib.ExitStack) -> None:
    worker = Worker(stack)

    def fail(*, is_deferred: bool) -> Any:
        raise RuntimeError("no state now")

    worker.collect = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="no state now"):
        Heal(stack).catch_up(worker)


def test_too_little_memory_ends_the_preview(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(staging: Staging, num_bytes: int) -> Any:
        raise MemoryError(f"no {num_bytes} bytes are left")

    monkeypatch.setattr(Staging, "pop_filling", fail)
    with pytest.raises(CheckpointError, match="bytes are left"):
        Heal(stack).catch_up(Worker(stack))


def test_a_check_ends_it(stack: contextlib.ExitStack) -> None:
    def check() -> None:
        raise RequestRefused("the group is being drained")

    worker, receiver = Worker(stack), Heal(stack)
    with pytest.raises(RequestRefused):
        receiver.catch_up(worker, check)
    receiver.heal(worker)


def test_a_shutdown_ends_it(stack: contextlib.ExitStack) -> None:
    reached = threading.Event()

    def hook(place: int, data: bytes) -> bytes:
        reached.set()
        return data

    worker, receiver = Worker(stack, hook), Heal(stack)
    worker.gate.shut(DEADLINE_S)  # it never answers
    errors: list[BaseException] = []

    def catch_up() -> None:
        try:
            receiver.catch_up(worker)
        except PeerError as error:
            errors.append(error)

    thread = threading.Thread(target=catch_up)
    thread.start()
    assert reached.wait(DEADLINE_S)
    receiver.transport.shutdown()
    thread.join(DEADLINE_S)
    worker.gate.open()
    assert "shutting down" in str(errors[0])


def test_a_shutdown_frees_what_has_arrived(stack: contextlib.ExitStack) -> None:
    worker, receiver = Worker(stack), Heal(stack)
    worker.on_look = receiver.transport.shutdown
    with pytest.raises(PeerError, match="shutting down"):
        receiver.catch_up(worker)
    staging = receiver.transport._staging
    assert (staging._kept, staging.at_hand) == (None, None)


@contextlib.contextmanager
def answering(body: bytes) -> Iterator[str]:
    """The address of a source that answers each request with ``body``, sealed."""
    listener = socket.create_server(("127.0.0.1", 0))
    sealed = seal(body, PREVIEW_SEED)
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(sealed)}\r\n\r\n".encode() + sealed

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                wire = Wire(listener.accept()[0], DEADLINE_S)
                with contextlib.suppress(OSError):
                    while wire.read_head() is not None:
                        wire.send(answer)
                wire.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/secret"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(DEADLINE_S)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x" * 48,
        b"0" * 48,
        b"9" * 48,
        b"0" * 19 + b"9" + b"0" * 14 + b"065536" + b"0" * 8,
        b"0" * 20 + b"+" + b"0" * 13 + b"065536",  # as digests it is the preview of no bytes
    ],
    ids=["empty", "no numbers", "no chunks", "too large", "too few digests", "no step"],
)
def test_a_malformed_preview_is_refused(body: bytes, stack: contextlib.ExitStack) -> None:
    url = stack.enter_context(answering(body))
    with pytest.raises(PeerError):
        Heal(stack).transport.recv_preview(url, timedelta(seconds=2), lambda: None)


def test_a_copy_of_a_device_is_released_when_nobody_reads_it(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, receiver = Worker(stack), Heal(stack)
    receiver.catch_up(worker)
    monkeypatch.setattr(preview, "IDLE_S", 0.1)
    worker.transport._server._connections.wake()
    released = threading.Event()
    while worker.transport._preview._shown:
        assert not released.wait(0.01)
