"""A job whose groups are all killed goes on from a copy that is held elsewhere (rules B1 to B6)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import IO

import pytest
from support.running import ROOT, SCRIPTS, Process, environment, eventually, lighthouse_process
from support.warm import Warm

from torchft_svc.coordination import LighthouseClient
from torchft_svc.core.quorum.lighthouse.overview import JobStatus

pytestmark = pytest.mark.processes

EVERY = 5
LONG_S = 60.0


class Child:
    """A process of which each line is kept; `kill` is a SIGKILL to all that it has started."""

    def __init__(self, *command: str) -> None:
        self.lines: list[list[str]] = []
        self._process = Warm(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            drops_memory=True,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line.split())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(LONG_S)
        self._reader.join(LONG_S)

    def text(self) -> str:
        return "\n".join(" ".join(line) for line in self.lines)

    def begins(self) -> list[tuple[int, str]]:
        """The steps that it has begun, with the digests of its state."""
        return [(int(line[1]), line[2]) for line in self.lines if line[:1] == ["BEGINS"]]

    def last_step(self) -> int:
        begun = self.begins()
        return begun[-1][0] if begun else 0


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack: contextlib.ExitStack) -> Callable[..., Child]:
    def start(*command: str) -> Child:
        child = Child(*command)
        stack.callback(child.kill)
        return child

    return start


def trainer(
    start: Callable[..., Child],
    lighthouse: Process,
    name: str,
    seed: int,
    every: int = EVERY,
    step_s: float = 0.02,
) -> Child:
    numbers = map(str, (seed, every, step_s))
    return start(str(SCRIPTS / "buddy_trainer.py"), lighthouse.address, name, *numbers)


def holder(start: Callable[..., Child], lighthouse: Process, beside: str) -> Child:
    flags = [f"--lighthouse={lighthouse.address}", f"--beside={beside}"]
    return start("-m", "torchft_svc.buddy", *flags, "--advertise-host=127.0.0.1")


def status_of(lighthouse: Process) -> JobStatus:
    with LighthouseClient(lighthouse.address, timedelta(seconds=5)) as client:
        return next(iter(client.status()), JobStatus(job="none"))


def test_b5_a_killed_job_goes_on_from_the_only_copy_that_is_left(
    start: Callable[..., Child],
) -> None:
    with lighthouse_process() as lighthouse:
        holders = [holder(start, lighthouse, beside) for beside in "ab"]
        groups = [trainer(start, lighthouse, name, seed) for seed, name in enumerate("ab")]
        eventually(lambda: status_of(lighthouse).copy_step >= 4 * EVERY, LONG_S)
        holders[1].kill()  # the one beside group b, and so the one with the state of group a
        for group in groups:
            group.kill()
        last = max(group.last_step() for group in groups)
        # Group b may have joined late; its states are those of group a from then on.
        states = dict(groups[0].begins()) | dict(groups[1].begins())

        again = [trainer(start, lighthouse, name, 7 + seed) for seed, name in enumerate("ab")]
        eventually(lambda: all(each.begins() for each in again), LONG_S)
        step, digest = min(each.begins()[0] for each in again)
        assert digest == states[step], "it is bitwise the state that the groups had"
        assert last - step <= 2 * EVERY, (last, step)
        eventually(lambda: min(each.last_step() for each in again) > last, LONG_S)
        eventually(lambda: status_of(lighthouse).copy_step > last, LONG_S)


def test_b5_a_group_heals_from_a_living_one_and_not_from_a_copy(
    start: Callable[..., Child],
) -> None:
    with lighthouse_process() as lighthouse:
        holder(start, lighthouse, "a")
        groups = [trainer(start, lighthouse, name, seed) for seed, name in enumerate("ab")]
        eventually(lambda: status_of(lighthouse).copy_step >= 2 * EVERY, LONG_S)
        groups[0].kill()
        again = trainer(start, lighthouse, "a", 7)
        eventually(lambda: again.begins(), LONG_S)
        assert "fetching a copy" not in again.text()
        eventually(lambda: again.begins()[0] in groups[1].begins())


def test_b5_a_group_that_waits_to_join_while_the_others_die_begins_from_a_copy(
    start: Callable[..., Child],
) -> None:
    """The group has asked while there was a living state, and is the only one that asks now."""
    with lighthouse_process() as lighthouse:
        holder(start, lighthouse, "a")
        groups = [
            trainer(start, lighthouse, name, seed, every=1, step_s=2.0)
            for seed, name in enumerate("ab")
        ]
        eventually(lambda: status_of(lighthouse).copy_step >= 2, LONG_S)
        groups[0].kill()
        again = trainer(start, lighthouse, "a", 7, every=1, step_s=2.0)
        eventually(
            lambda: any(
                group.asking and not group.in_quorum for group in status_of(lighthouse).groups
            ),
            LONG_S,
        )
        groups[1].kill()
        eventually(lambda: again.begins(), LONG_S)
        step, digest = again.begins()[0]
        assert step >= 2
        assert (step, digest) in groups[1].begins()
        assert "the job begins there" in again.text() or "fetching a copy" in again.text()
