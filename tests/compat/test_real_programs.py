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
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import END_S, ROOT, environment, eventually, lighthouse_process

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

LINE = re.compile(
    r"step=(\d+) loss=(\S+) worst=(\S+) tokens=(\d+) groups=(\d+) group=(\d+) rank=(\d+) "
    r"pid=(\d+) digest=(\w+)"
)


class Group:
    """A replica group of two workers under torchrun, and what its workers have printed."""

    def __init__(self, number: int, lighthouse: str) -> None:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "3", "-m", "torchft_svc.compat"]
        command += [str(ROOT / "examples" / "train_titan.py"), "--group", str(number)]
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command, "--steps", "1000000", "--step-s", "0.05"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(TORCHFT_LIGHTHOUSE=f"http://{lighthouse}", OMP_NUM_THREADS="1"),
        )
        self.output: list[str] = []
        self.steps: list[tuple[int, int, int, int, str]] = []  # step, groups, rank, pid, digest
        self.num_whole = 0  # lines with the tokens of all groups
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.output.append(line)
            for found in LINE.finditer(line):
                step, _, _, tokens, groups, _, rank, pid, digest = found.groups()
                self.num_whole += int(tokens) == 8 * int(groups)
                self.steps.append((int(step), int(groups), int(rank), int(pid), digest))

    def has_met(self, num_groups: int, after: int = 0) -> bool:
        assert self.popen.poll() in (None, 0), "".join(self.output[-50:])
        return any(step > after and groups == num_groups for step, groups, *_ in self.steps)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(END_S)
        self.popen.kill()
        self.popen.wait(END_S)
        self._reader.join(END_S)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with lighthouse_process("--min-replicas=1", "--join-timeout-ms=1000") as running:
        yield running.address


def test_torchtitan_s_pattern_survives_the_kill_of_a_worker(lighthouse: str) -> None:
    groups = [Group(number, lighthouse) for number in range(2)]
    try:
        eventually(lambda: all(each.has_met(2) for each in groups), within_s=90)
        at = groups[1].steps[-1][0]
        first_pids = {pid for *_, pid, _ in groups[0].steps}
        os.kill(next(iter(first_pids)), signal.SIGKILL)
        eventually(lambda: groups[1].has_met(1, after=at), within_s=60)
        alone_at = groups[1].steps[-1][0]
        eventually(lambda: all(each.has_met(2, after=alone_at) for each in groups), within_s=90)
        healed_at = groups[0].steps[-1][0]
        eventually(lambda: all(each.has_met(2, after=healed_at + 20) for each in groups))
    finally:
        for each in groups:
            each.close()
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
def test_ray_s_own_example_trains_two_groups(tmp_path: Path) -> None:
    reason = "Ray Train's own dependencies are missing: pip install 'ray[train]'"
    pytest.importorskip("ray.train.v2.torch.torchft_config", reason=reason, exc_type=ImportError)
    python, flags = (sys.executable, "-W", "ignore"), ("--num-workers", "2", "--num-steps", "30")
    module = "ray.train.v2.examples.pytorch.torchft_linear_example"
    result = subprocess.run(
        [*python, "-m", "torchft_svc.compat", "-m", module, *flags],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment(RAY_TRAIN_V2_ENABLED="1", HOME=str(tmp_path)),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert "'step': 30" in result.stdout, last
