"""Runs programs that import `torchft` with `torchft_svc.compat`, in real processes, and kills some.

Ray's own example runs as it is installed; `examples/train_titan.py` has torchtitan's pattern.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launched import TORCHS, agent, worker_variables
from support.programs import Program
from support.running import ROOT, environment, eventually, lighthouse_process
from torch.distributed import TCPStore

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

LINE = re.compile(
    r"step=(\d+) loss=(\S+) worst=(\S+) tokens=(\d+) groups=(\d+) group=(\d+) rank=(\d+) "
    r"pid=(\d+) digest=(\w+)"
)

RAY = {
    "RAY_TRAIN_V2_ENABLED": "1",
    # Otherwise a worker that starts first may report to Ray alone, and Ray waits for all.
    "TORCHFT_MIN_REPLICAS": "2",
    # On a busy machine its workers need longer than 60 s to import torch, and Ray starts others.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "150",
}


class Group:
    """A replica group of two workers, and what these have printed.

    All its ``programs``, and the workers of an agent, have imported torch before they are started.
    """

    def __init__(self, *programs: Program) -> None:
        self.programs = programs
        self.steps: list[tuple[int, int, int, int, str]] = []  # step, groups, rank, pid, digest
        self.num_whole = 0  # lines with the tokens of all groups
        self._num_read = [0 for _ in programs]

    def read(self) -> None:
        for index, program in enumerate(self.programs):
            lines = program.read_so_far()
            for found in LINE.finditer("\n".join(lines[self._num_read[index] :])):
                step, _, _, tokens, groups, _, rank, pid, digest = found.groups()
                self.num_whole += int(tokens) == 8 * int(groups)
                self.steps.append((int(step), int(groups), int(rank), int(pid), digest))
            self._num_read[index] = len(lines)

    def has_met(self, num_groups: int, after: int = 0) -> bool:
        self.read()
        for program in self.programs:
            assert program.poll() in (None, 0), "\n".join(program.lines[-50:])
        return any(step > after and groups == num_groups for step, groups, *_ in self.steps)


@contextlib.contextmanager
def two_groups(lighthouse: str) -> Iterator[list[Group]]:
    """One under torchrun, and the workers of another one."""
    # Otherwise the attempts of a launcher share a store, where a new one finds dead addresses.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    variables = {"TORCHFT_LIGHTHOUSE": f"http://{lighthouse}", **own_store}
    titan = str(ROOT / "examples" / "train_titan.py")

    def command(number: int) -> list[str]:
        flags = ["--group", str(number), "--steps", "1000000", "--step-s", "0.05"]
        return ["-m", "torchft_svc.compat", titan, *flags]

    with contextlib.ExitStack() as stack:
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        launched = agent(
            *options, *command(0), of=TORCHS, environment=variables, forks_programs=True
        )
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workers = [
            Program(
                [sys.executable, *command(1)],
                variables | worker_variables(rank, store.port),
                warm=True,
                forks_programs=True,
            )
            for rank in range(2)
        ]
        for program in (launched, *workers):
            stack.enter_context(program)
        yield [Group(launched), Group(*workers)]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with lighthouse_process("--min-replicas=1", "--join-timeout-ms=1000") as running:
        yield running.address


def test_torchtitan_s_pattern_survives_the_kill_of_a_worker(lighthouse: str) -> None:
    with two_groups(lighthouse) as groups:
        eventually(lambda: all(each.has_met(2) for each in groups), within_s=90)
        at = groups[1].steps[-1][0]
        first_pids = {pid for *_, pid, _ in groups[0].steps}
        os.kill(next(iter(first_pids)), signal.SIGKILL)
        eventually(lambda: groups[1].has_met(1, after=at), within_s=60)
        alone_at = groups[1].steps[-1][0]
        eventually(lambda: all(each.has_met(2, after=alone_at) for each in groups), within_s=90)
        healed_at = groups[0].steps[-1][0]
        eventually(lambda: all(each.has_met(2, after=healed_at + 20) for each in groups))
    assert {pid for *_, pid, _ in groups[0].steps} - first_pids, "the killed group was restarted"
    # What is summed after a step is left out only where a group comes or goes.
    assert all(each.num_whole > 0.8 * len(each.steps) for each in groups)
    # Each step that both have committed is equal in both, for each rank.
    mine, others = [
        {(step, rank): digest for step, _, rank, _, digest in each.steps} for each in groups
    ]
    common = mine.keys() & others.keys()
    assert len([step for step, _ in common if step > alone_at]) >= 20
    assert all(mine[key] == others[key] for key in common)


@pytest.mark.ray
@pytest.mark.timeout(600)  # ten of Ray's processes import torch
def test_ray_s_own_example_trains_two_groups(tmp_path: Path) -> None:
    """The example itself is unchanged; it lies in the installed package of Ray."""
    reason = "Ray Train's own dependencies are missing: pip install 'ray[train]'"
    pytest.importorskip("ray.train.v2.torch.torchft_config", reason=reason, exc_type=ImportError)
    python, flags = (sys.executable, "-W", "ignore"), ("--num-workers", "2", "--num-steps", "30")
    module = "ray.train.v2.examples.pytorch.torchft_linear_example"
    # There Ray notes its address, so it joins no cluster of another test. Sockets need short paths.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        result = subprocess.run(
            [*python, "-m", "torchft_svc.compat", "-m", module, *flags],
            capture_output=True,
            text=True,
            timeout=550,
            env=environment(**RAY, HOME=str(tmp_path), RAY_TMPDIR=folder),
            check=False,
        )
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert "'step': 30" in result.stdout, last
