"""What a trainer needs from an engine that runs workers: local processes, or Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torchft_svc.trainer.messages import Answer, Command, Position, StateHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """Worker ``worker`` has sent an answer."""

    worker: int
    answer: Answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """Worker ``worker`` has ended, for any reason; its last event."""

    worker: int
    reason: str


class Backend(Protocol):
    """Starts workers, ends them, and carries messages. Called by one thread."""

    def num_startable(self, resources_per_worker: Mapping[str, float]) -> int:
        """The number of workers that could be started with the resources that are free now."""

    def request(self, num_workers: int, resources_per_worker: Mapping[str, float]) -> None:
        """Ask an autoscaler for resources for ``num_workers`` more workers; 0: for none."""

    def start(self, worker: int, job: bytes, resources: Mapping[str, float]) -> None:
        """Start a worker, named by a number that is used once; it calls `run_worker` with ``job``.

        (Or another `WorkerProgram`, if the backend was made with one.)

        Returns at once; `wait` returns what becomes of the worker.
        """

    def send(self, worker: int, command: Command) -> None:
        """Send a command to a worker; does not wait, and does nothing if it has ended."""

    def wait(self, timeout_s: float) -> list[Received | Lost]:
        """Wait up to ``timeout_s`` for events; return those since the last call."""

    def kill(self, worker: int) -> None:
        """End a worker at once, also one that is frozen; `Lost` follows."""

    def read_state(self, state: StateHandle) -> bytes:
        """The state that a worker offered."""

    def write_state(self, position: Position, state: bytes) -> StateHandle:
        """A handle with which any worker can read ``state``, until `drop_state`."""

    def drop_state(self, state: StateHandle) -> None:
        """Free a state that is not needed any more."""

    def close(self) -> None:
        """End all workers and free all resources; may be called twice."""


class Link(Protocol):
    """A worker's connection to its trainer; may be called by several threads."""

    @property
    def host(self) -> str:
        """The host under which the other workers reach this one."""

    def send(self, answer: Answer) -> None:
        """Send ``answer`` to the trainer; raises `ChannelClosed` if it has ended."""

    def receive(self, timeout_s: float | None) -> Command | None:
        """The next command; None: none came in time. Raises `ChannelClosed`."""

    def offer_state(self, position: Position, state: bytes) -> StateHandle:
        """Store ``state`` where it outlives this worker."""

    def read_state(self, state: StateHandle) -> bytes:
        """A state that a worker offered, or the trainer wrote."""


# What a worker runs: with its link, its number and its job.
WorkerProgram = Callable[[Link, int, bytes], None]
