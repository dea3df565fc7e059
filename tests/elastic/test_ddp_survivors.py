"""Tests that workers which train with torch's DDP survive the loss of a node, with real agents."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from support.bounds import again_if_late, check
from support.launched import Launch, launch
from support.running import SCRIPTS, freeze

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]  # a late attempt is repeated
HEARTBEAT_S, STOPPED_S = 2.0, 1.0
# To leave the broken world and to train in the next one. Half a second of it is the time for which
# gloo may end its operations itself; a wait that nobody leaves takes half an hour.
GO_ON_S = 4.0
_LINE = re.compile(r"pid (\d+) round (\d+) of (\d+) step (\d+)$")


class Step(NamedTuple):
    """A step of a worker, in memory that it keeps only as long as its process lives."""

    pid: int
    round: int
    world_size: int
    step: int


def steps(run: Launch, node: str) -> list[Step]:
    matches = map(_LINE.search, run.nodes[node].read_so_far())
    return [Step(*map(int, match.groups())) for match in matches if match]


def await_steps(run: Launch, node: str, *, after: int, world_size: int = 0) -> Step:
    """The third step of ``node`` in worlds after that of round ``after`` (of this size)."""

    def found() -> Step | None:
        sizes = {world_size} if world_size else {1, 2}
        new = [step for step in steps(run, node) if step.round > after and step.world_size in sizes]
        return new[2] if len(new) > 2 else None

    third: Step = run.until(found, f"{node} trains in a world after {after}")
    return third


@pytest.mark.parametrize("hit", ["worker", "agent", "node"])
@pytest.mark.parametrize("how", ["killed", "frozen"])
@again_if_late
def test_a_survivor_leaves_ddp_at_once_and_trains_on(tmp_path: Path, how: str, hit: str) -> None:
    options = f"--stopped-worker-timeout={STOPPED_S:g}", "--max-restarts=10"
    timeout_ms = round(HEARTBEAT_S * 1000)
    with launch(tmp_path, *options, nnodes="1:2", heartbeat_timeout_ms=timeout_ms) as run:
        script = [str(SCRIPTS / "ddp_worker.py")]
        for node in ("a", "b"):
            run.start(node, "--run-path", "--start-method=fork", script=script)
        before, other = (await_steps(run, node, after=0, world_size=2) for node in ("a", "b"))

        agent = run.nodes["b"].pid
        pids = {"worker": [other.pid], "agent": [agent], "node": [agent, other.pid]}[hit]
        began_at = time.monotonic()
        for pid in pids:
            if how == "killed":
                os.kill(pid, signal.SIGKILL)
            else:
                freeze(pid)
        await_steps(run, "a", after=before.round)
        took_s = time.monotonic() - began_at

        survived = steps(run, "a")
        assert {step.pid for step in survived} == {before.pid}
        assert [step.step for step in survived] == list(range(1, len(survived) + 1))
        noticed_after_s = {"killed": 0.0, "frozen": STOPPED_S if hit == "worker" else HEARTBEAT_S}
        check(f"{hit} {how}: trains on", took_s - noticed_after_s[how], GO_ON_S)
