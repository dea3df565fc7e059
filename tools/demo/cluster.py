"""Starts, kills, restarts and stops the demo's real processes, and finds those left over.

Each trainer leads a session of its own, which its manager sidecar belongs to, so that the two can
be killed alone or together, and a Ctrl-C in the terminal reaches the demo only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tools.demo.events import Event, EventTail, Exited, Killed, Started
from tools.demo.orphans import MARK, die_with_parent, end_leftovers

_LIGHTHOUSE_START_S = 20.0
# What has to end by itself gets so long: a machine that is busy may stand still for a moment.
_LEFTOVER_GRACE_S = 5.0
_LIGHTHOUSE_END_S = 5.0

# Arguments of the trainer for (group, incarnation, event file).
TrainerCommand = Callable[[int, int, Path], Sequence[str]]


class ClusterError(Exception):
    """A process of the demo could not be started."""


@dataclass(slots=True)
class _Life:
    """One incarnation of a group: its process and its event file."""

    group: int
    incarnation: int
    process: subprocess.Popen[bytes]
    tail: EventTail
    asked_to_end: bool = False


@dataclass(slots=True)
class Cluster:
    """The lighthouse and the trainers, each in a process of its own; a context manager."""

    workdir: Path
    trainer_command: TrainerCommand
    lighthouse_arguments: Sequence[str] = ()
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _lighthouse: subprocess.Popen[bytes] | None = None
    _lighthouse_address: str = ""
    _lives: dict[int, _Life] = field(default_factory=dict)
    _num_lives: dict[int, int] = field(default_factory=dict)
    _unread: list[Event] = field(default_factory=list)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(grace_s=0.0)

    def start_lighthouse(self) -> str:
        """Start it on a free port and return its ``host:port``.

        Raises:
            ClusterError: it did not say where it listens.
        """
        command = [sys.executable, "-m", "torchft_svc.lighthouse_server"]
        command += ["--bind", "127.0.0.1:0", *self.lighthouse_arguments]
        with (self.workdir / "lighthouse.log").open("ab") as log:
            self._lighthouse = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._lighthouse_address = self._read_address(self._lighthouse)
        return self._lighthouse_address

    def _read_address(self, process: subprocess.Popen[bytes]) -> str:
        pipe = _output_of(process)
        text = b""
        deadline = time.monotonic() + _LIGHTHOUSE_START_S
        while b"\n" not in text:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(pipe.fileno(), 4096) if ready else b""
            if not chunk:
                words = self._last_words("lighthouse")
                raise ClusterError(f"the lighthouse did not start: {words}")
            text += chunk
        return text.splitlines()[0].decode().rsplit(" ", 1)[-1]

    def start_group(self, group: int) -> None:
        """Start the next incarnation of ``group``; its events come from ``read_events``."""
        incarnation = self._num_lives.get(group, 0)
        name = f"group-{group}.{incarnation}"
        events = self.workdir / f"{name}.jsonl"
        command = [sys.executable, *self.trainer_command(group, incarnation, events)]
        started_at = time.monotonic()
        with (self.workdir / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._num_lives[group] = incarnation + 1
        self._lives[group] = _Life(group, incarnation, process, EventTail(events))
        self._unread.append(
            Started(group=group, incarnation=incarnation, at=started_at, pid=process.pid)
        )

    def _environment(self) -> dict[str, str]:
        # One thread each: three trainers share the cores, and sums keep one order.
        return os.environ | {
            "OMP_NUM_THREADS": "1",
            # torch looks up the name of whoever connects; a lost answer must not cost 5 s.
            "RES_OPTIONS": "timeout:1 attempts:1",
            "PYTHONUNBUFFERED": "1",
            "TORCHFT_LIGHTHOUSE": self._lighthouse_address,
            MARK: self._mark,
        }

    def last_words_of(self, event: Event) -> str:
        """The last line that the process of this event wrote."""
        return self._last_words(f"group-{event.group}.{event.incarnation}")

    def _last_words(self, name: str) -> str:
        path = self.workdir / f"{name}.log"
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"{path} is empty"

    def kill(self, group: int, *, whole_group: bool) -> None:
        """SIGKILL the trainer, or with ``whole_group`` all processes of its session at once."""
        life = self._lives[group]
        life.asked_to_end = True
        at = time.monotonic()
        if whole_group:
            os.killpg(life.process.pid, signal.SIGKILL)
        else:
            life.process.kill()
        self._unread.append(
            Killed(group=group, incarnation=life.incarnation, at=at, whole_group=whole_group)
        )

    def read_events(self) -> list[Event]:
        """What happened since the last call, in order of time."""
        events, self._unread = self._unread, []
        for group, life in list(self._lives.items()):
            status = life.process.poll()  # before the file is read: what was written is then there
            events += life.tail.read_new()
            if status is not None:
                del self._lives[group]
                events.append(
                    Exited(
                        group=group,
                        incarnation=life.incarnation,
                        at=time.monotonic(),
                        status=status,
                        expected=life.asked_to_end or status == 0,
                    )
                )
        return sorted(events, key=lambda event: event.at)

    @property
    def num_running(self) -> int:
        return len(self._lives)

    def ask_to_leave(self, *, at_once: bool = False) -> None:
        """SIGTERM every trainer: it finishes its step and goes; ``at_once``: SIGINT, mid-step."""
        for life in self._lives.values():
            life.asked_to_end = True
            life.process.send_signal(signal.SIGINT if at_once else signal.SIGTERM)

    def stop(self, grace_s: float) -> list[str]:
        """End every process; return those that had to be killed after ``grace_s``, by name."""
        self.ask_to_leave(at_once=True)
        forced = []
        deadline = time.monotonic() + grace_s
        for life in self._lives.values():
            if not _ended(life.process, deadline):
                forced.append(f"group {life.group}")
                _kill_session(life.process)
        if self._lighthouse is not None:
            self._lighthouse.terminate()
            if not _ended(self._lighthouse, max(deadline, time.monotonic() + _LIGHTHOUSE_END_S)):
                forced.append("lighthouse")
                _kill_session(self._lighthouse)
            _output_of(self._lighthouse).close()
            self._lighthouse = None
        return forced

    def end_leftovers(self) -> list[str]:
        """Wait a moment for our processes to go; kill those that stay, and return them."""
        return end_leftovers(self._mark, _LEFTOVER_GRACE_S)


def _output_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdout is None:
        raise AssertionError("the lighthouse is started with a pipe")
    return process.stdout


def _ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
