"""Idle, greedy and deaf peers of either service: memory stays flat, training goes on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import grpc
import pytest
from support.hostile import (
    PREFACE,
    Training,
    Usage,
    call_fields,
    call_head,
    frame,
    many_descriptors,
    packed,
    training,
)
from support.running import Process, eventually, failure, line_to

from torchft_svc.core.quorum.types import MAX_WORLD_SIZE
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.outbox import MAX_UNREAD_NEWS

pytestmark = pytest.mark.processes

# Connecting takes most of the time of these tests: as many as there may be only of the costliest.
MOST_IDLE, MANY_IDLE = 10_000, 3_000
# Measured: 11 KB for one that says nothing, 33 KB for one of many that have shaken hands.
MAX_KB_PER_CONNECTION = 40
# What a service may keep of a message that it refuses, or of news that nobody reads.
MAX_GROWTH_MB = 24.0
GIGABYTE = 1 << 30
NUM_RESET = 50_000
SETTINGS = frame(4, 0, 0)


@pytest.fixture(scope="module")
def steady() -> Iterator[Training]:
    with training() as steady:
        yield steady


@pytest.fixture(params=["lighthouse", "manager"])
def service(request: pytest.FixtureRequest, steady: Training) -> Iterator[Process]:
    """Either service, in the midst of a training."""
    yield steady.lighthouse if request.param == "lighthouse" else steady.managers[0]
    steady.goes_on()


def service_name(process: Process) -> str:
    return "LighthouseService" if "lighthouse" in process.module else "ManagerService"


@contextlib.contextmanager
def connections(process: Process, count: int, said: bytes) -> Iterator[list[socket.socket]]:
    """``count`` connections that say ``said`` and no more."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", process.port), 10))
            raw.sendall(said)
            opened.append(raw)
        yield opened


@pytest.mark.parametrize(
    ("said", "num_idle"),
    [(b"", MANY_IDLE), (PREFACE[:12], MANY_IDLE), (PREFACE + SETTINGS, MOST_IDLE)],
    ids=["say nothing", "said half a preface", "have shaken hands"],
)
def test_thousands_of_idle_connections(
    steady: Training, service: Process, said: bytes, num_idle: int
) -> None:
    with many_descriptors(num_idle + 500) as allowed:
        count = min(num_idle, allowed - 500)
        usage = Usage(service)
        with connections(service, count, said):
            steady.goes_on_in_time()
            with line_to(service.address) as newcomer:
                path = f"/torchft.{service_name(service)}/Nonsense"
                code, _ = failure(newcomer.channel.unary_unary(path).future(b"", timeout=10))
                assert code is grpc.StatusCode.UNIMPLEMENTED
            limit_mb = count * MAX_KB_PER_CONNECTION / 1000
            sentence = f"{usage.grown_mb():.0f} MB for {count} connections (allowed: {allowed})"
            assert usage.grown_mb() < limit_mb, sentence
        eventually(usage.descriptors_are_back, 20, f"{usage.now()} after {usage.before}")


@pytest.mark.parametrize("pushes", [False, True], ids=["announced", "pushed"])
def test_a_message_of_a_gigabyte(steady: Training, service: Process, pushes: bool) -> None:
    """A long message is refused when its length is announced, and never held, even if pushed."""
    usage = Usage(service)
    head = call_head(f"/torchft.{service_name(service)}/Quorum", service.port)
    sentence = b"\x00" + GIGABYTE.to_bytes(4, "big")
    piece = frame(0, 0, 1, bytes(16_000))
    with socket.create_connection(("127.0.0.1", service.port), 10) as raw:
        raw.sendall(head + frame(0, 0, 1, sentence))
        if pushes:
            with contextlib.suppress(OSError):  # it hangs up on us
                for _ in range(GIGABYTE // 16_000):
                    raw.sendall(piece)
        else:
            assert b"larger than max" in _received(raw, b"larger than max")
        assert usage.grown_mb() < MAX_GROWTH_MB
    eventually(usage.descriptors_are_back)
    steady.goes_on_in_time()


def _received(raw: socket.socket, until: bytes) -> bytes:
    said = b""
    while until not in said and (more := raw.recv(4096)):
        said += more
    return said


def test_a_group_that_reads_nothing_loses_its_session(steady: Training) -> None:
    """Answers fill the window that it never opens again, then the outbox, and then it is enough."""
    usage = Usage(steady.lighthouse)
    why = f"{MAX_UNREAD_NEWS} pieces of news were not read"
    head = call_head("/torchft.LighthouseService/Session", steady.lighthouse.port)
    said = b"".join(map(packed, _questions()))
    assert len(said) < 65_535, "more than may be said without reading"
    with socket.create_connection(("127.0.0.1", steady.lighthouse.port), 10) as raw:
        raw.sendall(head)
        for start in range(0, len(said), 16_000):
            raw.sendall(frame(0, 0, 1, said[start : start + 16_000]))
        eventually(lambda: why in steady.lighthouse.errors(), 60, "it may go on for ever")
        assert usage.grown_mb() < MAX_GROWTH_MB
    eventually(usage.descriptors_are_back)
    steady.goes_on_in_time()


def _questions() -> Iterator[pb.SessionRequest]:
    """Each gets a refusal at once, which is longer than the question."""
    yield pb.SessionRequest(hello={"replica_id": "d:1"})
    for number in range(1, 2_600):
        requester = {"replica_id": "d:1", "world_size": MAX_WORLD_SIZE + 1}
        yield pb.SessionRequest(question={"requester": requester, "number": number})


def test_calls_that_are_reset_at_once(steady: Training, service: Process) -> None:
    """Thousands of them, which nobody waits for: gRPC drops no call of others in their stead."""
    usage = Usage(service)
    path = f"/torchft.{service_name(service)}/Quorum"
    with socket.create_connection(("127.0.0.1", service.port), 10) as raw:
        reading = threading.Thread(target=_read_all, args=(raw,))
        reading.start()
        with contextlib.suppress(OSError):  # it may hang up on us
            raw.sendall(PREFACE + SETTINGS)
            for first in range(1, 2 * NUM_RESET, 200):
                calls = (_reset_call(path, service, first + 2 * n) for n in range(100))
                raw.sendall(b"".join(calls))
        steady.goes_on_in_time()
        assert usage.grown_mb() < MAX_GROWTH_MB, f"{usage.grown_mb():.0f} MB"
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)
        reading.join()
    eventually(usage.descriptors_are_back)


def _read_all(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while raw.recv(65536):
            pass


def _reset_call(path: str, service: Process, stream: int) -> bytes:
    """A question of a worker that the service does not know, and nobody waits for the answer."""
    question = packed(pb.ManagerQuorumRequest(rank=5))
    cancel = (8).to_bytes(4, "big")
    asked = frame(1, 4, stream, call_fields(path, service.port)) + frame(0, 1, stream, question)
    return asked + frame(3, 0, stream, cancel)


def test_votes_that_are_replayed_are_refused(steady: Training) -> None:
    manager = steady.managers[0]
    step = steady.steps[0] - 3
    with line_to(manager.address) as line:
        for round_ in (0, 1):
            for _ in range(500):
                code, _ = failure(line.vote(rank=0, step=step, should_commit=False, round=round_))
                assert code is grpc.StatusCode.INVALID_ARGUMENT
    steady.goes_on_in_time()
