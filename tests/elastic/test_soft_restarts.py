"""Tests the example with real agents, which are killed, frozen, and joined by others: survivors
keep their process and their step, and the bits of all models are equal after each change."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.launched import agent
from support.programs import Program
from support.running import ROOT, eventually
from support.trained_steps import Step, check_all, check_survivor, trained

from torchft_svc.coordination import LighthouseServer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]  # most of it imports torch
EXAMPLE = str(ROOT / "examples" / "soft_restart.py")
PATIENCE_S = 90.0


@dataclass
class Run:
    """The nodes of a run, by name."""

    options: list[str]
    folder: Path  # for what killed agents leave behind
    stack: contextlib.ExitStack
    nodes: dict[str, Program] = field(default_factory=dict)

    def start(self, name: str, num_workers: int) -> None:
        script = [EXAMPLE, "--steps", "1000000", "--step-s", "0.1"]
        options = [*self.options, f"--nproc-per-node={num_workers}"]
        launched = agent(*options, *script, environment={"TMPDIR": str(self.folder)})
        self.nodes[name] = self.stack.enter_context(launched)

    def steps(self, name: str) -> list[Step]:
        return trained(self.nodes[name].read_so_far())

    def pids(self, name: str, after: int = 0) -> set[int]:
        """Of the workers that have trained after a step."""
        return {each.pid for each in self.steps(name) if each.step > after}

    def newest(self) -> int:
        return max((each.step for name in self.nodes for each in self.steps(name)), default=0)

    def train_with(self, world_size: int, *names: str) -> int:
        """Wait until all of these nodes train in a world of this size; the step."""
        after = self.newest()

        def do_train() -> bool:
            last = [self.steps(name)[-1:] for name in names]
            return all(found and found[0].step > after + 2 for found in last) and all(
                found[0].world_size == world_size for found in last
            )

        try:
            eventually(do_train, PATIENCE_S)
        except AssertionError:
            for name, node in self.nodes.items():
                print(f"--- {name}", *node.lines[-30:], sep="\n")
            raise
        return self.newest()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with LighthouseServer("127.0.0.1:0", 1, heartbeat_timeout_ms=2000) as lighthouse:
        address = lighthouse.address().removeprefix("http://")
        options = [
            "--restart-policy=soft",
            "--nnodes=1:4",
            "--max-restarts=10",
            "--rdzv-backend=lighthouse",
            f"--rdzv-endpoint={address}",
            "--rdzv-id=example",
        ]
        with contextlib.ExitStack() as stack:
            yield Run(options, tmp_path, stack)


def test_survivors_keep_their_process_and_their_step(run: Run) -> None:
    run.start("a", 2)
    run.start("b", 1)
    run.train_with(3, "a", "b")
    survivors = run.pids("a")

    # A worker dies: the others go on without its node, which starts its workers again.
    killed = run.pids("b")
    os.kill(min(killed), signal.SIGKILL)
    run.train_with(2, "a")
    run.start("c", 1)
    step = run.train_with(4, "a", "b", "c")
    assert not run.pids("b", step) & killed

    # An agent dies while another one joins.
    run.nodes["b"].signal(signal.SIGKILL)
    run.start("d", 1)
    run.train_with(4, "a", "c", "d")

    # An agent is frozen, and comes back with the worker that it had.
    kept = run.pids("c", step)
    run.nodes["c"].signal(signal.SIGSTOP)
    run.train_with(3, "a", "d")
    run.nodes["c"].signal(signal.SIGCONT)
    step = run.train_with(4, "a", "c", "d")
    assert run.pids("c", step - 1) <= kept

    # Three changes in quick succession: a node leaves, another one is lost, the first comes back.
    (killed_worker,) = run.pids("d", step - 3)
    os.kill(killed_worker, signal.SIGKILL)
    run.nodes["c"].signal(signal.SIGKILL)
    step = run.train_with(3, "a", "d")
    assert killed_worker not in run.pids("d", step)

    assert run.pids("a") == survivors
    every = [each for name in run.nodes for each in run.steps(name)]
    check_all(every)
    for pid in survivors:
        check_survivor([each for each in every if each.pid == pid])
