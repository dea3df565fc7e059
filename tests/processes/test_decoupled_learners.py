"""Learners of Decoupled DiLoCo: one is slow, one is killed, one is frozen; the others train on."""

from __future__ import annotations

import contextlib
import re
import signal
import statistics
import sys
from dataclasses import dataclass

import pytest
from support.bounds import Late
from support.programs import Program
from support.running import freeze, lighthouse_process

pytestmark = pytest.mark.processes

HEARTBEAT_TIMEOUT_MS = 2000
PAUSE_S = 0.02
SLOWER = 5
_LINE = re.compile(r"synchronization (\d+) loss ([\d.]+) groups (\d+) tokens/s (\d+)")


@dataclass(frozen=True)
class Shown:
    """A line of the example: after a merge."""

    merges: int
    loss: float
    learners: int
    tokens_per_s: int


def shown(program: Program) -> list[Shown]:
    found = map(_LINE.fullmatch, list(program.read_so_far()))
    return [Shown(int(m[1]), float(m[2]), int(m[3]), int(m[4])) for m in found if m]


def await_line(program: Program, after: int, num_learners: int) -> Shown:
    """The first line from number ``after`` on with ``num_learners``."""

    def holds(_: str) -> bool:
        return any(each.learners == num_learners for each in shown(program)[after:])

    program.wait_until(holds, f"a merge with {num_learners} learners", 90.0)
    return next(each for each in shown(program)[after:] if each.learners == num_learners)


def check_pace(program: Program, since: int, usual: float) -> None:
    """Check that it never waits: its pace since line ``since`` is not far from the usual one."""
    slowest = min(each.tokens_per_s for each in shown(program)[since:])
    if slowest < 0.5 * usual:
        raise Late(f"{slowest} tokens/s instead of {usual:.0f}")


@pytest.mark.timeout(300)
def test_nobody_waits() -> None:
    with (
        lighthouse_process(
            "--min-replicas=1", f"--heartbeat-timeout-ms={HEARTBEAT_TIMEOUT_MS}"
        ) as lighthouse,
        contextlib.ExitStack() as stack,
    ):

        def start(name: str, pause_s: float = PAUSE_S) -> Program:
            command = [
                sys.executable,
                "examples/train_decoupled_diloco.py",
                "--merges=1000000",
                "--sync-every=20",
                f"--pause={pause_s}",
            ]
            variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address, "REPLICA_GROUP_ID": name}
            return stack.enter_context(Program(command, variables, warm=True))

        fast, killed, slow = start("fast"), start("killed"), start("slow", SLOWER * PAUSE_S)
        for program in (fast, killed, slow):
            await_line(program, 0, 3)
        await_line(fast, len(shown(fast)) + 10, 3)
        usual = statistics.median(each.tokens_per_s for each in shown(fast)[-10:])

        since = len(shown(fast))
        killed.signal(signal.SIGKILL)
        await_line(fast, since, 2)
        check_pace(fast, since, usual)

        since = len(shown(fast))
        freeze(slow.pid)
        await_line(fast, since, 1)
        check_pace(fast, since, usual)

        since, before = len(shown(fast)), len(shown(slow))
        slow.signal(signal.SIGCONT)
        again = start("killed")
        await_line(fast, since, 3)
        check_pace(fast, since, usual)
        await_line(slow, before, 3)
        assert await_line(again, 0, 3).merges >= shown(fast)[since - 1].merges

        for program in (fast, slow, again):
            text = "\n".join(program.lines)
            assert "Traceback" not in text, text
        losses = [each.loss for each in shown(fast)]
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.timeout(200)
def test_the_example_ends() -> None:
    with lighthouse_process() as lighthouse, contextlib.ExitStack() as stack:
        programs = []
        for name in ("0", "1"):
            command = [sys.executable, "examples/train_decoupled_diloco.py", "--merges=12"]
            variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address, "REPLICA_GROUP_ID": name}
            programs.append(stack.enter_context(Program(command, variables, warm=True)))
        for program in programs:
            assert program.wait(150.0) == 0, program.lines
            assert program.lines[-1].startswith("merged weights: loss "), program.lines
