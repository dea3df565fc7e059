"""The example under real agents: survivors keep their processes, and their steps go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.launched import Launch, launch
from support.running import ROOT, is_alive
from support.trained_steps import Step, check_all, check_survivor, trained

pytestmark = pytest.mark.processes
EXAMPLE = ROOT / "examples" / "soft_restart.py"


class Training:
    """The example on several nodes with two workers each, which are forked from their agents."""

    def __init__(self, run: Launch) -> None:
        self.run = run
        self.round = 0  # of the last world that was waited for

    def start(self, *nodes: str) -> None:
        script = [str(EXAMPLE), "--steps=1000000", "--step-s=0.05"]
        for node in nodes:
            self.run.start(node, "--run-path", "--start-method=fork", script=script)

    def steps(self, node: str, num_lines: int = 0) -> list[Step]:
        """The steps in the last lines of a node's output (0: in all)."""
        return trained(self.run.nodes[node].read_so_far()[-num_lines:])

    def pids(self, node: str) -> set[int]:
        """The process ids of the workers that have trained in the newest world of this node."""
        steps = self.steps(node)
        return {step.pid for step in steps if step.round == steps[-1].round} if steps else set()

    def trains(self, *nodes: str) -> dict[str, set[int]]:
        """Wait until exactly these nodes train together in a new world; their workers."""
        size = 2 * len(nodes)

        def together() -> bool:
            time.sleep(0.05)  # reading must not take what training needs
            newest = {node: self.steps(node, 40)[-8:] for node in nodes}
            rounds = {step.round for steps in newest.values() for step in steps}
            sizes = {step.world_size for steps in newest.values() for step in steps}
            alive = all(is_alive(step.pid) for steps in newest.values() for step in steps)
            enough = all(len(steps) == 8 for steps in newest.values())
            is_new = len(rounds) == 1 and min(rounds) > self.round
            return enough and alive and is_new and sizes == {size}

        self.run.until(together, f"{nodes} train together")
        self.round = self.steps(nodes[0])[-1].round
        return {node: self.pids(node) for node in nodes}

    def newest_step(self, node: str) -> int:
        return self.steps(node)[-1].step


def test_survivors_keep_their_processes_and_their_steps(tmp_path: Path) -> None:
    options = "--nproc-per-node=2", "--max-restarts=10"
    with launch(tmp_path, *options, nnodes="1:3") as run:
        training = Training(run)
        training.start("a", "b")
        first = training.trains("a", "b")
        reached = training.newest_step("a")

        os.kill(min(first["b"]), signal.SIGKILL)  # a worker
        second = training.trains("a", "b")
        assert second["a"] == first["a"]
        assert not second["b"] & first["b"]

        training.start("c")  # a node joins
        third = training.trains("a", "b", "c")
        assert (third["a"], third["b"]) == (second["a"], second["b"])

        run.nodes["c"].signal(signal.SIGKILL)  # an agent and a worker at once
        os.kill(min(third["b"]), signal.SIGKILL)
        fourth = training.trains("a", "b")
        assert fourth["a"] == first["a"]

        run.nodes["b"].signal(signal.SIGSTOP)  # a frozen agent, whose workers are not
        assert training.trains("a")["a"] == first["a"]
        run.nodes["b"].signal(signal.SIGCONT)
        fifth = training.trains("a", "b")
        assert fifth == fourth

        training.start("c")  # three changes in quick succession
        os.kill(max(fifth["b"]), signal.SIGKILL)
        training.start("d")
        run.nodes["b"].signal(signal.SIGKILL)
        sixth = training.trains("a", "c", "d")
        assert sixth["a"] == first["a"]
        assert training.newest_step("a") > reached
        # Those of the frozen agent have missed what the others did meanwhile.
        check_all([step for node in ("a", "c", "d") for step in training.steps(node)])
        for pid in first["a"]:
            check_survivor([step for step in training.steps("a") if step.pid == pid])
