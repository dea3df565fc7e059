"""Runs a trainer's workers as processes of this machine: nothing else is needed."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import cloudpickle

from torchft_svc import env
from torchft_svc.errors import ConfigError, PeerError
from torchft_svc.host.clean_start import ended_how
from torchft_svc.host.fork_server import ForkServer
from torchft_svc.host.process_end import POLL_S
from torchft_svc.host.worker_process import KILL_S, ForkedProcess
from torchft_svc.trainer.backend import Lost, Received, WorkerProgram
from torchft_svc.trainer.local_process import (
    Frames,
    LocalStart,
    frame,
    read_state,
    write_state,
)
from torchft_svc.trainer.local_scratch import LocalScratch, remove_stale
from torchft_svc.trainer.messages import Answer, Command, Failed, Position, Progress, StateHandle

# On one machine; where no resources are asked for, nothing else is a limit.
MAX_LOCAL_WORKERS = 256
# A worker that has closed its socket is about to end.
_END_S = 5.0
_READ_BYTES = 1 << 18
# A job may hold the user's data; it is handed to the system in pieces.
_WRITE_BYTES = 1 << 18
# A share of a device is a fraction; sums of such are not exact.
_ROUNDING = 1e-6
_GPU = "GPU"
_CPU = "CPU"

Resources = Mapping[str, float] | Callable[[], Mapping[str, float]]


class LocalBackend:
    """Workers are forked from a process that has imported torch; see `Backend`.

    Args:
        resources: what there is, such as ``{"CPU": 8, "GPU": 2}``, or a function that returns what
            there is now (default: this machine's; its CPUs count only if workers ask for them).
            If it is given, a worker that asks for nothing needs a CPU.
        program: what a worker runs (default: `run_worker`, which trains).
    """

    def __init__(
        self, resources: Resources | None = None, *, program: WorkerProgram | None = None
    ) -> None:
        self._program = b"" if program is None else cloudpickle.dumps(program)
        self._shares = _Shares(resources)
        remove_stale()
        self._scratch = LocalScratch()
        self._server = ForkServer(
            "torchft_svc.trainer.local_process", "workers of a trainer", *self._scratch.folders
        )
        self._server.start()  # it imports while the caller goes on
        self._changed = threading.Condition()
        self._workers: dict[int, _LocalWorker] = {}
        self._events: list[Received | Lost] = []
        self._num_states = 0
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)  # what is not read yet wakes the thread, too
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="torchft-local-backend", daemon=True)
        self._thread.start()
        self._at_exit = _close_at_exit(weakref.ref(self))

    # -- the Backend protocol --------------------------------------------------------------------

    def num_startable(self, resources_per_worker: Mapping[str, float]) -> int:
        with self._changed:
            num_free = MAX_LOCAL_WORKERS - len(self._workers)
            return max(0, min(num_free, self._shares.num_free(resources_per_worker)))

    def request(self, num_workers: int, resources_per_worker: Mapping[str, float]) -> None:
        """Do nothing: no resources can be added to this machine."""

    def start(self, worker: int, job: bytes, resources: Mapping[str, float]) -> None:
        with self._changed:
            devices = self._shares.reserve(worker, resources)
        try:
            started = self._fork(worker, job, resources, devices)
        except BaseException as error:
            reason = f"it could not be started: {str(error) or type(error).__name__}"
            with self._changed:
                self._shares.release_share(worker)
                self._events.append(Lost(worker=worker, reason=reason))
                self._changed.notify_all()
            if not isinstance(error, PeerError):  # for instance Ctrl-C
                raise
            return
        with self._changed:
            self._workers[worker] = started
            self._wake_thread()

    def _fork(
        self, worker: int, job: bytes, resources: Mapping[str, float], devices: str | None
    ) -> _LocalWorker:
        """Return the process of ``worker``; after an error, it ends if it was forked."""
        variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        start = LocalStart(
            worker=worker,
            job=job,
            program=self._program,
            environment=env.for_child(variables),
            folder=os.getcwd(),
            path=list(sys.path),
            scratch=self._scratch.folders,
            num_threads=_num_threads(resources),
        )
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._server.fork(b"worker", theirs.fileno())
            ours.setblocking(False)
            self._scratch.make_folders()
            started = _LocalWorker(worker, ForkedProcess(pid, self._server), ours)
            started.outgoing += frame(start)
        except BaseException:
            ours.close()
            raise
        return started

    def send(self, worker: int, command: Command) -> None:
        with self._changed:
            found = self._workers.get(worker)
            if found is not None and not found.is_closed:
                found.outgoing += frame(command)
                self._wake_thread()

    def wait(self, timeout_s: float) -> list[Received | Lost]:
        with self._changed:
            self._changed.wait_for(lambda: self._events, timeout_s)
            events, self._events = self._events, []
            return events

    def kill(self, worker: int) -> None:
        with self._changed:
            found = self._workers.get(worker)
            if found is not None:
                found.process.send_signal(signal.SIGKILL)

    def read_state(self, state: StateHandle) -> bytes:
        return read_state(state)

    def write_state(self, position: Position, state: bytes) -> StateHandle:
        self._num_states += 1
        self._scratch.make_folders()
        return write_state(self._scratch.folders, f"trainer-{self._num_states}", position, state)

    def drop_state(self, state: StateHandle) -> None:
        with contextlib.suppress(OSError):
            Path(state.where).unlink()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            for each in self._workers.values():
                each.process.send_signal(signal.SIGKILL)
            self._changed.wait_for(lambda: not self._workers, KILL_S)
            self._is_closed = True
            self._wake_thread()
        atexit.unregister(self._at_exit)
        self._thread.join(KILL_S)
        self._server.close()
        self._scratch.close()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers that have not been found ended, by number."""
        with self._changed:
            return {number: each.process.pid for number, each in self._workers.items()}

    # -- the thread that reads and writes --------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    break
                for each in self._workers.values():
                    each.watch(self._selector)
                pause_s = min((each.pause_s() for each in self._workers.values()), default=None)
            ready = self._selector.select(pause_s)
            for key, events in ready:
                if key.fileobj is self._woken:
                    self._woken.recv(_READ_BYTES)
                elif events & selectors.EVENT_WRITE:
                    with self._changed:
                        key.data.flush()
            for each in list(self._workers.values()):
                self._update(each)
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _update(self, worker: _LocalWorker) -> None:
        """Receive what ``worker`` has sent, and check whether it has ended."""
        has_ended = worker.has_ended()  # first: what it sent before is then received
        answers = worker.receive()
        if has_ended:
            worker.close(self._selector)
            for part in self._scratch.parts(worker.number):
                part.unlink(missing_ok=True)
        with self._changed:
            for answer in answers:
                self._add_answer(Received(worker=worker.number, answer=answer))
            if has_ended:
                del self._workers[worker.number]
                self._shares.release_share(worker.number)
                self._events.append(Lost(worker=worker.number, reason=worker.reason()))
            if answers or has_ended:
                self._changed.notify_all()

    def _add_answer(self, received: Received) -> None:
        """Add an event; signs of life that nobody has read yet replace each other."""
        last = self._events[-1] if self._events else None
        is_beat = isinstance(received.answer, Progress)
        if is_beat and isinstance(last, Received) and last.worker == received.worker:
            if isinstance(last.answer, Progress):
                self._events[-1] = received
                return
        elif is_beat and len(self._events) > _MANY:
            self._events = [each for each in self._events if not _is_beat_of(each, received.worker)]
        self._events.append(received)

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"!")


def _unreadable(error: Exception) -> Failed:
    """The answer in place of a result or a report that cannot be unpickled in this process."""
    kind = type(error)
    return Failed(
        kind=f"{kind.__module__}.{kind.__qualname__}",
        message=f"a worker's result or report cannot be read by the trainer: {error}",
        traceback="".join(traceback.format_exception(error)),
        pickled=b"",
        position=Position(),
    )


# How many events may be unread before signs of life are dropped: between two calls of `train`.
_MANY = 64


def _is_beat_of(event: Received | Lost, worker: int) -> bool:
    return (
        isinstance(event, Received)
        and event.worker == worker
        and isinstance(event.answer, Progress)
    )


@dataclass(eq=False)
class _LocalWorker:
    """A worker's process, as the thread of the backend sees it."""

    number: int
    process: ForkedProcess
    connection: socket.socket
    outgoing: bytearray = field(default_factory=bytearray)
    is_closed: bool = False
    _frames: Frames = field(default_factory=Frames)
    _closed_at: float = 0.0
    _watched: dict[int, int] = field(default_factory=dict)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register what wakes ``selector`` when there is something to do for this worker."""
        wanted = dict.fromkeys(self.process.descriptors, selectors.EVENT_READ)
        if not self.is_closed:
            writes = selectors.EVENT_WRITE if self.outgoing else 0
            wanted[self.connection.fileno()] = selectors.EVENT_READ | writes
        for descriptor in self._watched.keys() - wanted.keys():
            selector.unregister(descriptor)
        for descriptor, events in wanted.items():
            if descriptor not in self._watched:
                selector.register(descriptor, events, self)
            elif self._watched[descriptor] != events:
                selector.modify(descriptor, events, self)
        self._watched = wanted

    def pause_s(self) -> float:
        """The longest wait until the process is looked at again."""
        return POLL_S if not self.process.descriptors or self.is_closed else _END_S

    def flush(self) -> None:
        try:
            with memoryview(self.outgoing)[:_WRITE_BYTES] as piece:
                num_sent = self.connection.send(piece)
        except BlockingIOError:
            return
        except OSError:  # it has ended, or is about to
            self.outgoing.clear()
            return
        del self.outgoing[:num_sent]

    def receive(self) -> list[Answer]:
        """Return all answers that have arrived."""
        while not self.is_closed:
            try:
                more = self.connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                more = b""
            if not more:
                self.is_closed = True
                self._closed_at = time.monotonic()
            self._frames.feed(more)
        answers: list[Answer] = []
        while True:
            try:
                message = self._frames.next()
            except Exception as error:  # noqa: BLE001 - what it may be is up to the user's classes
                message = _unreadable(error)
            if message is None:
                return answers
            answers.append(cast(Answer, message))

    def has_ended(self) -> bool:
        """Whether the process has ended; one that has closed its socket long ago is killed."""
        has_ended = self.process.poll() is not None
        if not has_ended and self.is_closed and time.monotonic() > self._closed_at + _END_S:
            self.process.send_signal(signal.SIGKILL)
        return has_ended

    def close(self, selector: selectors.BaseSelector) -> None:
        for descriptor in self._watched:
            selector.unregister(descriptor)
        self._watched = {}
        self.is_closed = True
        self.connection.close()
        self.process.close(kill_rest=True)

    def reason(self) -> str:
        """Describe how the process has ended."""
        status = self.process.poll()
        assert status is not None
        return f"its process {ended_how(status)}"


class _Shares:
    """The parts of this machine's resources that workers have."""

    def __init__(self, resources: Resources | None) -> None:
        self._resources = resources
        self._reserved: dict[int, dict[str, float]] = {}
        self._devices: dict[int, dict[str, float]] = {}  # part of each GPU, by worker

    def num_free(self, needs: Mapping[str, float]) -> int:
        """The number of workers with these needs that find a place."""
        needs = self._needs(needs)
        counts = [MAX_LOCAL_WORKERS]
        totals = self._totals(needs)
        for name, amount in needs.items():
            if amount <= 0:
                continue
            if name == _GPU:
                counts.append(self._num_free_on_devices(totals, amount))
                continue
            reserved = sum(each.get(name, 0.0) for each in self._reserved.values())
            counts.append(int((totals.get(name, 0.0) - reserved) / amount + _ROUNDING))
        return max(0, min(counts))

    def reserve(self, worker: int, needs: Mapping[str, float]) -> str | None:
        """Reserve what ``worker`` needs; return its devices, or None if it needs none."""
        needs = self._needs(needs)
        self._reserved[worker] = dict(needs)
        amount = needs.get(_GPU, 0.0)
        if amount <= 0:
            return None
        free = self._free_devices(self._totals(needs))
        part = min(amount, 1.0)
        fitting = [name for name, left in free.items() if left >= part - _ROUNDING]
        # Fill a device before the next one is begun.
        fitting.sort(key=lambda name: free[name])
        chosen = fitting[: max(1, round(amount))]
        self._devices[worker] = dict.fromkeys(chosen, part)
        return ",".join(sorted(chosen, key=list(free).index))

    def release_share(self, worker: int) -> None:
        self._reserved.pop(worker, None)
        self._devices.pop(worker, None)

    def _needs(self, needs: Mapping[str, float]) -> Mapping[str, float]:
        return needs if needs or self._resources is None else {_CPU: 1.0}

    def _totals(self, needs: Mapping[str, float]) -> Mapping[str, float]:
        if callable(self._resources):
            return self._resources()
        if self._resources is not None:
            return self._resources
        found = {_CPU: float(os.cpu_count() or 1)}
        if _GPU in needs:
            import torch

            found[_GPU] = float(torch.cuda.device_count())
        return found

    def _num_free_on_devices(self, totals: Mapping[str, float], amount: float) -> int:
        free = self._free_devices(totals)
        if amount < 1:
            return sum(int(left / amount + _ROUNDING) for left in free.values())
        num_whole = sum(left >= 1 - _ROUNDING for left in free.values())
        return int(num_whole / amount + _ROUNDING)

    def _free_devices(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The free part of each device, by its name in ``CUDA_VISIBLE_DEVICES``."""
        num = int(totals.get(_GPU, 0.0))
        visible = env.value_of("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",")[:num] if visible else [str(index) for index in range(num)]
        free = dict.fromkeys(names, 1.0)
        for parts in self._devices.values():
            for name, part in parts.items():
                if name in free:
                    free[name] -= part
        return free


def check_resources(resources_per_worker: Mapping[str, float], min_workers: int) -> None:
    """Raise `ConfigError` for needs that no device can meet, or not this machine."""
    for name, amount in resources_per_worker.items():
        if not amount >= 0:
            raise ConfigError("resources_per_worker", dict(resources_per_worker), "use 0 or more")
        if name == _GPU and amount > 1 and amount != int(amount):
            reason = "use a fraction of one GPU, or whole ones"
            raise ConfigError("resources_per_worker", dict(resources_per_worker), reason)
    num = _Shares(None).num_free(resources_per_worker)
    if num < min_workers:
        reason = f"this machine has room for {num} such workers, min_workers is {min_workers}"
        raise ConfigError("resources_per_worker", dict(resources_per_worker), reason)


def _num_threads(resources: Mapping[str, float]) -> int:
    """The number of torch's threads: one, as with torchrun, unless the user has set it."""
    number = env.value_of("OMP_NUM_THREADS", "")
    if number.isdigit() and int(number) > 0:
        return int(number)
    return max(1, int(resources.get(_CPU, 1)))


def _close_at_exit(backend: weakref.ref[LocalBackend]) -> Callable[[], None]:
    """A program that forgets `close` leaves nothing behind."""

    def close() -> None:
        found = backend()
        if found is not None:
            found.close()

    atexit.register(close)
    return close
