"""Starts, signals and watches the workers of one job, and reads what they do from their logs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tools.chaos.options import WorkerOptions
from tools.demo.events import Committed, Event, EventTail, Exited, Killed, PhaseBegan, Started
from torchft_svc.host.fork_server import ForkServer

_LOOK_S = 0.01
_STEP_S = 0.04
# Of killed processes, on a machine that is busy with other work.
_END_S = 10.0

E = TypeVar("E", bound=Event)


class NeverHappened(AssertionError):
    """Something that had to happen within a time did not."""


@dataclass(slots=True)
class Worker:
    """One life of one worker, from its start to its end."""

    options: WorkerOptions
    pid: int
    tail: EventTail
    began_at: float
    asked_to_end: bool = False
    status: int | None = None

    @property
    def is_running(self) -> bool:
        return self.status is None

    def signal(self, number: int) -> float:
        """Send it to this process alone; the instant before."""
        at = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return at

    def signal_all(self, number: int) -> float:
        """Send it to this process and its manager in one call; the instant before."""
        at = time.monotonic()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        return at

    def manager_pid(self) -> int | None:
        """The process of the group's manager."""
        return next(iter(self.manager_pids()), None)

    def manager_pids(self) -> list[int]:
        """The manager, which any thread of the group's first worker has started, and the process
        that waits to be the next, if there is one."""
        found = []
        with suppress(OSError):
            for children in Path(f"/proc/{self.pid}/task").glob("*/children"):
                for pid in map(int, children.read_text().split()):
                    if b"manager_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return sorted(found)

    def kill_manager(self) -> float:
        """SIGKILL for the manager alone, if it is there; the instant before."""
        pid, at = self.manager_pid(), time.monotonic()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return at

    def command(self, command: str) -> None:
        """Send a command to the worker, see `tools.chaos.trainer`."""
        with self.options.commands.open("w") as pipe:
            pipe.write(command + "\n")

    def output(self) -> str:
        """The output of the worker and of its manager."""
        return self.options.output.read_text(errors="replace")


@dataclass(slots=True)
class Fleet:
    """The groups of one job and all their events; ``settings`` are options of all workers."""

    fork_server: ForkServer
    folder: Path
    lighthouse: str
    settings: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    lives: list[Worker] = field(default_factory=list)
    _num_lives: dict[int, int] = field(default_factory=dict)
    _num_read: int = 0

    def start(self, group: int, **changes: Any) -> list[Worker]:
        """Start the next life of a group; its workers in order of group rank."""
        incarnation = self._num_lives.get(group, 0)
        self._num_lives[group] = incarnation + 1
        options = {"step_s": _STEP_S, "lighthouse": self.lighthouse, **self.settings, **changes}
        return [
            self._start_worker(
                WorkerOptions(
                    folder=self.folder,
                    group=group,
                    incarnation=incarnation,
                    worker=worker,
                    **options,
                )
            )
            for worker in range(options.get("num_workers", 1))
        ]

    def _start_worker(self, options: WorkerOptions) -> Worker:
        os.mkfifo(options.commands)
        began_at = time.monotonic()
        pid = self.fork_server.fork(options.encode().encode())
        worker = Worker(options, pid, EventTail(options.events), began_at)
        self.lives.append(worker)
        self._record(Started(at=began_at, pid=pid, **_life(options)))
        return worker

    def lives_of(self, group: int) -> list[Worker]:
        """The workers of the group's latest life, in order of group rank."""
        latest = self._num_lives[group] - 1
        mine = (worker for worker in self.lives if worker.options.group == group)
        return [worker for worker in mine if worker.options.incarnation == latest]

    def kill(self, worker: Worker, *, with_manager: bool = False) -> float:
        """SIGKILL; the instant before."""
        worker.asked_to_end = True
        send = worker.signal_all if with_manager else worker.signal
        at = send(signal.SIGKILL)
        self._record(Killed(at=at, whole_group=with_manager, **_life(worker.options)))
        return at

    def _record(self, event: Event) -> None:
        self.events.append(event)

    def read(self) -> list[Event]:
        """What happened since the last call; it is in ``events``, too."""
        for worker in self.lives:
            if not worker.is_running:
                continue
            ended = self.fork_server.end_of(worker.pid)  # first: what it wrote is then in its log
            self.events += worker.tail.read_new()
            if ended is not None:
                worker.status, at = ended
                expected = worker.asked_to_end or worker.status == 0
                self._record(
                    Exited(at=at, status=worker.status, expected=expected, **_life(worker.options))
                )
        new = self.events[self._num_read :]
        self._num_read = len(self.events)
        return new

    def await_event(
        self,
        kind: type[E] | tuple[type[E], ...],
        within_s: float,
        *,
        since: float = 0.0,
        wanted: Callable[[E], bool] = lambda _: True,
    ) -> E:
        """The first event of a kind, at ``since`` or later, that is ``wanted``.

        Raises:
            NeverHappened: it did not come within ``within_s`` from now.
        """
        deadline = time.monotonic() + within_s
        num_seen = 0
        while True:
            self.read()
            for event in self.events[num_seen:]:
                if isinstance(event, kind) and event.at >= since and wanted(event):
                    return event
            num_seen = len(self.events)
            if time.monotonic() > deadline:
                raise NeverHappened(f"no {kind} within {within_s:g} s:\n{self.summary()}")
            time.sleep(_LOOK_S)

    def await_commits(
        self, groups: set[int], within_s: float, *, since: float, num_members: int | None = None
    ) -> float:
        """Time when the last of ``groups`` had committed an update that it began after ``since``.

        ``num_members``: only updates of a quorum with so many groups count.
        """
        at = since
        for group in groups:
            commit = self.await_event(
                Committed,
                within_s,
                since=since,
                wanted=lambda event, group=group: (  # type: ignore[misc]
                    event.group == group
                    and num_members in (None, len(event.members.split()))
                    and self._begun_at(event) >= since
                ),
            )
            at = max(at, commit.at)
        return at

    def _begun_at(self, commit: Committed) -> float:
        """Time when the forward pass of ``commit`` began."""
        return max(
            (
                event.at
                for event in self.events
                if isinstance(event, PhaseBegan)
                and event.phase == "forward"
                and (event.life, event.worker) == (commit.life, commit.worker)
                and event.at <= commit.at
            ),
            default=0.0,
        )

    def all_meet(self, groups: set[int], within_s: float = 60.0) -> None:
        """Wait until all ``groups`` commit together, with nobody behind."""
        since = time.monotonic()
        for group in groups:
            self.await_event(
                Committed,
                within_s,
                since=since,
                wanted=lambda event, group=group: (  # type: ignore[misc]
                    event.group == group and event.num_participants == len(groups)
                ),
            )

    def of(self, group: int, kind: type[E], *, since: float = 0.0) -> list[E]:
        """All events of one kind of one group, so far."""
        return [
            event
            for event in self.events
            if isinstance(event, kind) and event.group == group and event.at >= since
        ]

    def summary(self, num_lines: int = 12) -> str:
        """The last events, and the last words of every worker, for a failure's message."""
        events = [str(event) for event in sorted(self.events, key=lambda event: event.at)]
        words = [f"-- {worker.options.life}: {worker.output()[-1500:]}" for worker in self.lives]
        return "\n".join(events[-num_lines:] + words)

    def end(self) -> None:
        """Kill every worker, and wait until their managers are gone, too."""
        managers = [worker.manager_pid() for worker in self.lives if worker.is_running]
        for worker in self.lives:
            if worker.is_running:
                worker.signal_all(signal.SIGCONT)
                self.kill(worker, with_manager=True)
        deadline = time.monotonic() + _END_S
        while left := [
            *(worker.options.life for worker in self.lives if worker.is_running),
            *(f"manager, process {pid}" for pid in managers if _lives(pid)),
        ]:
            if time.monotonic() > deadline:
                raise NeverHappened(f"{left} outlived their kill")
            self.read()
            time.sleep(_LOOK_S)


def _life(options: WorkerOptions) -> dict[str, int]:
    return {
        "group": options.group,
        "incarnation": options.incarnation,
        "worker": options.worker,
    }


def _lives(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
