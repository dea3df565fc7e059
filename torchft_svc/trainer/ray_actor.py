"""The worker's side of a trainer on Ray: an actor that runs its program and passes on messages."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import queue
import signal
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import ray
from ray.exceptions import RayError

from torchft_svc.errors import ChannelClosed, CheckpointError
from torchft_svc.trainer.messages import Answer, Command, Position, Progress, StateHandle

# An answer to the trainer's question for news is at most this late.
POLL_S = 5.0
# Progress alone is not worth a message of its own: it is passed on together.
_GATHER_S = 0.05
# What a trainer that does not ask may leave unread; then the worker waits for it.
MAX_UNREAD = 10_000
_ROOM_TIMEOUT_S = 600.0
_STATE_TIMEOUT_S = 300.0


class RayLink:
    """A worker's connection to its trainer, which asks for answers. See `Link`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers: deque[Answer] = deque()
        self._has_ended = False
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._states: dict[int, bytes] = {}
        self._state_ids = itertools.count()

    @property
    def host(self) -> str:
        address: str = ray.util.get_node_ip_address()
        return address

    def send(self, answer: Answer) -> None:
        with self._changed:
            unread = self._answers
            if not self._changed.wait_for(lambda: len(unread) < MAX_UNREAD, _ROOM_TIMEOUT_S):
                raise ChannelClosed("to the trainer", "it has not read anything for too long")
            if unread and isinstance(answer, Progress) and isinstance(unread[-1], Progress):
                unread.pop()  # the newer one says all
            unread.append(answer)
            self._changed.notify_all()

    def receive(self, timeout_s: float | None) -> Command | None:
        try:
            return self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def offer_state(self, position: Position, state: bytes) -> StateHandle:
        """Keep ``state`` until the trainer fetches it."""
        number = next(self._state_ids)
        self._states[number] = state
        return StateHandle(position=position, where=number)

    def read_state(self, state: StateHandle) -> bytes:
        return fetch_state(state.where)

    # Called for the trainer.

    def send_command(self, command: Command) -> None:
        self._commands.put(command)

    def end(self) -> None:
        """Record that the worker's program sends nothing more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def answers(self, timeout_s: float) -> tuple[list[Answer], bool]:
        """Wait for messages of the worker; return them, and whether these are the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or bool(self._answers), timeout_s)
            if not self._is_urgent():
                self._changed.wait_for(self._is_urgent, _GATHER_S)
            answers = list(self._answers)
            self._answers.clear()
            self._changed.notify_all()
            return answers, self._has_ended

    def take_state(self, number: int) -> Any:
        return as_array(self._states.pop(number))

    def _is_urgent(self) -> bool:
        return self._has_ended or any(not isinstance(one, Progress) for one in self._answers)


class RayWorkerActor:
    """The actor of a worker: runs its program, and beside it answers the trainer."""

    def __init__(self) -> None:
        self._link = RayLink()

    def run(self, worker: int, job: bytes, program: bytes, path: list[str]) -> None:
        """Carry out ``job``; modules of the trainer's program are looked for in ``path``."""
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
        try:
            run = cloudpickle.loads(program) if program else _run_worker
            run(self._link, worker, job)
        finally:
            self._link.end()

    @ray.method(concurrency_group="commands")
    def send_command(self, command: Command) -> None:
        self._link.send_command(command)

    @ray.method(concurrency_group="answers")
    def process(self) -> RayProcess:
        return RayProcess(pid=os.getpid(), node=ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="answers")
    def answers(self, timeout_s: float) -> tuple[list[Answer], bool]:
        return self._link.answers(timeout_s)

    @ray.method(concurrency_group="states")
    def take_state(self, number: int) -> Any:
        return self._link.take_state(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayProcess:
    """The place of an actor's process."""

    pid: int
    node: str

    def kill(self) -> None:
        """SIGKILL, from a process of the same node."""
        with contextlib.suppress(OSError):
            # The number may be another process' by now; those of Ray have such a name.
            if Path(f"/proc/{self.pid}/cmdline").read_bytes().startswith(b"ray::RayWorkerActor"):
                os.kill(self.pid, signal.SIGKILL)


def _run_worker(link: RayLink, worker: int, job: bytes) -> None:
    # Only here: it imports torch.
    importlib.import_module("torchft_svc.trainer.worker").run_worker(link, worker, job)


def as_array(state: bytes) -> Any:
    """Ray stores arrays without a copy more than it needs."""
    return np.frombuffer(state, dtype=np.uint8)


def fetch_state(ref: Any) -> bytes:
    """Raises `CheckpointError` if it is lost."""
    if ref is None:
        raise CheckpointError("a worker that offered its state", "it was dropped")
    try:
        array: np.ndarray[Any, Any] = ray.get(ref, timeout=_STATE_TIMEOUT_S)
    except RayError as error:
        raise CheckpointError("a worker that offered its state", str(error)) from error
    return array.tobytes()
