"""Tests that the example learns its digits while its workers are killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import ROOT, environment

pytestmark = pytest.mark.processes


def run_example(*options: str, **variables: str) -> tuple[int, str]:
    """Its status, and what it said."""
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, "examples/train_digits.py", *options],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1", **variables),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(240)
@pytest.mark.ray
def test_the_example_runs_on_ray() -> None:
    """It is short, so few digits are read; nothing is killed."""
    pytest.importorskip("ray")
    options = ("--backend=ray", "--passes=1", "--kill-every=0", "--step-s=0")
    status, said = run_example(*options, RAY_ADDRESS="local")
    told = re.search(r"(\d+\.\d+)% of the digits are read, after 0 kills", said)
    assert told, said[-4000:]
    assert float(told[1]) > 20, said[-4000:]
    assert status in (0, 1)


@pytest.mark.timeout(240)  # ten passes over the data, with a restart every few seconds
@pytest.mark.parametrize("mode", ["restart", "per-step"])
def test_digits_are_read_although_workers_are_killed(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    status, said = run_example(
        "--passes=10",
        "--kill-every=4",
        "--step-s=0.015",
        f"--fault-tolerance={mode}",
        f"--report={picture}",
    )
    assert status == 0, said[-4000:]
    told = re.search(r"(\d+\.\d+)% of the digits are read, after (\d+) kills", said)
    assert told, said[-4000:]
    assert float(told[1]) >= 97
    assert int(told[2]) >= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
