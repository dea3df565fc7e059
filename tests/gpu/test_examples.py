"""Runs the examples on a GPU that all of their workers share, kills some, and sees them heal."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest
from support.fake_agents import FakeAgents
from support.gpu.ranks import HERE, needs_gpu, variables
from support.programs import Program
from support.running import lighthouse_process
from support.soft_restarts import EXAMPLE as SOFT_RESTART
from support.soft_restarts import live_through_every_change
from support.surviving_workers import REPLACED_S, survive_each_loss

pytestmark = [pytest.mark.gpu, pytest.mark.processes, needs_gpu]

OWN_HOST = HERE / "own_host.py"
# The watchdog of torch's own process group would end the process of a survivor.
NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def start(address: str, name: str, *command: str) -> Program:
    settings = {
        "TORCHFT_LIGHTHOUSE": address,
        "REPLICA_GROUP_ID": name,
        "TORCHFT_CHECK_EVERY": "1",  # in every step all bits are compared
        "TORCHFT_ON_DIFFERENCE": "stop",
    }
    script, *options = command
    line = [sys.executable, f"examples/{script}.py", "--device=cuda:0", *options]
    return Program(line, variables(name) | settings)


def step_with(program: Program, num_groups: int, after: int = 0) -> int:
    """A step after ``after`` with so many groups that the program prints."""

    def step_in(line: str) -> int:
        words = line.split()
        is_step = words[:1] in (["step"], ["synchronization"]) and "groups" in words
        if not is_step or words[words.index("groups") + 1] != str(num_groups):
            return 0
        return int(words[1])

    what = f"a step with {num_groups} groups after {after}"
    return step_in(program.wait_until(lambda line: step_in(line) > after, what))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "command",
    [
        ["train_ddp", "--steps=1000000"],
        ["train_local_sgd", "--syncs=1000000"],
        ["train_diloco", "--syncs=1000000"],
        ["train_diloco", "--syncs=1000000", "--quantize=int8"],
        ["train_streaming_diloco", "--syncs=1000000"],
    ],
    ids=" ".join,
)
def test_i3_an_example_is_killed_and_heals(command: list[str]) -> None:
    with lighthouse_process("--min-replicas=1") as lighthouse, contextlib.ExitStack() as stack:
        stays, killed = (
            stack.enter_context(start(lighthouse.address, name, *command)) for name in "ab"
        )
        together = step_with(stays, 2)
        step_with(killed, 2)
        killed.signal(signal.SIGKILL)
        alone = step_with(stays, 1, together)
        again = stack.enter_context(start(lighthouse.address, "b", *command))
        together = step_with(again, 2, alone)
        step_with(stays, 2, together)
        step_with(again, 2, together)


@pytest.mark.timeout(4 * REPLACED_S)
def test_survivors_of_a_sharded_group_keep_their_process_and_heal() -> None:
    survive_each_loss([str(OWN_HOST)], NO_WATCHDOG)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", ["nccl", "isolated-nccl"])
def test_workers_keep_their_process_in_all_worlds(tmp_path: Path, group: str) -> None:
    with FakeAgents(tmp_path) as agents:
        live_through_every_change(agents, OWN_HOST, str(SOFT_RESTART), "--group", group)
