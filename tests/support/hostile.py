"""What hostile peers are made of, and a training that must not notice them."""

from __future__ import annotations

import contextlib
import resource
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
from google.protobuf.message import Message

from support.bounds import check
from support.running import Process, attach, eventually, lighthouse_process, manager_process
from torchft_svc.coordination import ManagerClient

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Of a training step without a model; the machine may be busy with the other peers of the test.
STEP_S = 0.01
MAX_STALL_S = 5.0
CALL = timedelta(seconds=40)


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return (
        struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body
    )


def call_head(path: str, port: int, **metadata: str) -> bytes:
    """The frames that begin the gRPC call ``path``, on a fresh connection's stream 1."""
    return PREFACE + frame(4, 0, 0) + frame(1, 4, 1, call_fields(path, port, **metadata))


def call_fields(path: str, port: int, **metadata: str) -> bytes:
    """The header fields of the gRPC call ``path``, encoded; in ``metadata`` ``_`` stands for -."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": f"127.0.0.1:{port}",
        "content-type": "application/grpc",
        "te": "trailers",
        **{name.replace("_", "-"): value for name, value in metadata.items()},
    }
    return b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


@contextlib.contextmanager
def many_descriptors(wanted: int) -> Iterator[int]:
    """Allow ``wanted`` of them if the system does; gives how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    given = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, given), hard))
    yield max(soft, given)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def packed(request: Message) -> bytes:
    """A gRPC message, as it stands in the data of a call."""
    body = request.SerializeToString()
    return b"\x00" + len(body).to_bytes(4, "big") + body


class Usage:
    """What a process holds, now and when this was made."""

    def __init__(self, process: Process) -> None:
        self._stats = psutil.Process(process.pid)
        self.before = self.now()

    def now(self) -> tuple[int, int, int]:
        """Resident bytes, descriptors, threads."""
        stats = self._stats
        return stats.memory_info().rss, stats.num_fds(), stats.num_threads()

    def grown_mb(self) -> float:
        return (self.now()[0] - self.before[0]) / 1e6

    def descriptors_are_back(self, spare: int = 5) -> bool:
        """Whether not more than ``spare`` are open above those at the beginning."""
        return self.now()[1] <= self.before[1] + spare


class Training:
    """Two groups of one worker each, real managers and clients, that commit step after step."""

    def __init__(self, lighthouse: Process, managers: list[Process]) -> None:
        self.lighthouse = lighthouse
        self.managers = managers
        self.steps = [0 for _ in managers]
        self.num_discarded = 0
        self.worst_s = 0.0
        self.failures: list[Exception] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._train, args=(number,), name=f"trainer-{number}")
            for number in range(len(managers))
        ]
        for thread in self._threads:
            thread.start()

    def _train(self, number: int) -> None:
        with ManagerClient(self.managers[number].address, CALL) as client:
            attach(client, 0)
            try:
                while not self._stop.wait(STEP_S):
                    self._step(client, number)
            except Exception as error:
                if not self._stop.is_set():  # the other one has stopped first
                    self.failures.append(error)

    def _step(self, client: ManagerClient, number: int) -> None:
        began_at = time.monotonic()
        client._quorum(0, self.steps[number], "", shrink_only=False, timeout=CALL)
        if client.should_commit(0, self.steps[number], should_commit=True, timeout=CALL):
            self.steps[number] += 1
        else:
            self.num_discarded += 1
        if self.steps[number] > 1:  # the first one waits for the other group to come
            self.worst_s = max(self.worst_s, time.monotonic() - began_at)

    def goes_on(self) -> None:
        """Returns when both groups have committed more, without a failure or a discard."""
        goal = max(self.steps) + 5
        eventually(
            lambda: self.failures or min(self.steps) >= goal, 60, "the training stands still"
        )
        assert not self.failures
        assert self.num_discarded == 0

    def goes_on_in_time(self) -> None:
        """The same, and no step since this was asked before has taken long."""
        self.goes_on()
        worst_s, self.worst_s = self.worst_s, 0.0
        check("a step beside hostile peers", worst_s, MAX_STALL_S)

    def end(self) -> None:
        self._stop.set()
        self.lighthouse.kill()  # releases the one that waits for the other
        for manager in self.managers:
            manager.kill()
        for thread in self._threads:
            thread.join(CALL.total_seconds())


@contextlib.contextmanager
def training() -> Iterator[Training]:
    """A training that goes on at the beginning and at the end of the block.

    No process of it has logged a traceback.
    """
    with contextlib.ExitStack() as stack:
        lighthouse = stack.enter_context(lighthouse_process("--log-level=info", "--min-replicas=2"))
        managers = [
            stack.enter_context(manager_process(lighthouse.address, name=name)) for name in "ab"
        ]
        steady = Training(lighthouse, managers)
        stack.callback(steady.end)
        steady.goes_on()
        yield steady
        steady.goes_on()
        for process in (lighthouse, *managers):
            assert "Traceback" not in process.errors(), process.errors()
