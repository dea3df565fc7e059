"""Runs the examples on a GPU that all of their workers share, kills some, and sees them heal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from support.fake_agents import FakeAgents
from support.gpu.ranks import HERE, needs_gpu, variables
from support.programs import Program
from support.running import lighthouse_process
from support.soft_restarts import EXAMPLE as SOFT_RESTART
from support.soft_restarts import live_through_every_change
from support.surviving_workers import REPLACED_S, survive_each_loss

pytestmark = [pytest.mark.gpu, pytest.mark.processes, needs_gpu]

# Processes that import torch and initialize CUDA have to meet before it.
STEP_S = 100.0
ON_DEVICE = "--device=cuda:0"
OWN_HOST = HERE / "own_host.py"
# The watchdog of torch's own process group would end the process of a survivor.
NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=9"]


def start(address: str, name: str, *command: str, before: Sequence[str] = ()) -> Program:
    """Start a group of the example; ``before``: what stands before it on the command line."""
    settings = {
        "TORCHFT_LIGHTHOUSE": address,
        "REPLICA_GROUP_ID": name,
        "TORCHFT_CHECK_EVERY": "1",  # in every step all bits are compared
        "TORCHFT_ON_DIFFERENCE": "stop",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    script, *options = command
    line = [sys.executable, *before, f"examples/{script}.py", *options]
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
    return step_in(program.wait_until(lambda line: step_in(line) > after, what, STEP_S))


@pytest.mark.timeout(4 * STEP_S)
@pytest.mark.parametrize(
    "command",
    [
        ["train_ddp", ON_DEVICE, "--steps=1000000"],
        ["train_local_sgd", ON_DEVICE, "--syncs=1000000"],
        ["train_diloco", ON_DEVICE, "--syncs=1000000"],
        ["train_diloco", ON_DEVICE, "--syncs=1000000", "--quantize=int8"],
        ["train_streaming_diloco", ON_DEVICE, "--syncs=1000000"],
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


@pytest.mark.timeout(4 * STEP_S)
@pytest.mark.parametrize(
    ("num_workers", "command"),
    [
        (2, ["train_hsdp", "--steps=1000000", "--print-every=1"]),
        (1, ["train_ddp", ON_DEVICE, "--steps=1000000"]),
        (1, ["train_diloco", ON_DEVICE, "--syncs=1000000"]),
    ],
    ids=str,
)
def test_i3_torchrun_starts_a_killed_worker_again_and_its_group_heals(
    num_workers: int, command: list[str]
) -> None:
    before = [*TORCHRUN, f"--nproc-per-node={num_workers}", str(OWN_HOST)]
    with lighthouse_process("--min-replicas=1") as lighthouse, contextlib.ExitStack() as stack:
        stays, killed = (
            stack.enter_context(start(lighthouse.address, name, *command, before=before))
            for name in "ab"
        )
        together = step_with(stays, 2)
        step_with(killed, 2)
        workers = psutil.Process(killed.pid).children()
        assert len(workers) == num_workers
        workers[-1].kill()
        alone = step_with(stays, 1, together)
        together = step_with(killed, 2, alone)
        step_with(stays, 2, together)


@pytest.mark.timeout(4 * REPLACED_S)
def test_survivors_of_a_sharded_group_keep_their_process_and_heal() -> None:
    survive_each_loss([str(OWN_HOST)], NO_WATCHDOG)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", ["nccl", "isolated-nccl"])
def test_workers_keep_their_process_in_all_worlds(tmp_path: Path, group: str) -> None:
    with FakeAgents(tmp_path) as agents:
        live_through_every_change(agents, OWN_HOST, str(SOFT_RESTART), "--group", group)
