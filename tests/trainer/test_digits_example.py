"""Tests that the example learns its digits while its workers are killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import ROOT, environment

pytestmark = pytest.mark.processes


@pytest.mark.timeout(240)  # ten passes over the data, with a restart every few seconds
@pytest.mark.parametrize("mode", ["restart", "per-step"])
def test_digits_are_read_although_workers_are_killed(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    options = ("--passes=10", "--kill-every=4", "--step-s=0.015", f"--fault-tolerance={mode}")
    picture = tmp_path / "run.png"
    done = subprocess.run(
        [sys.executable, "examples/train_digits.py", *options, f"--report={picture}"],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    told = re.search(r"(\d+\.\d+)% of the digits are read, after (\d+) kills", said)
    assert told, said[-4000:]
    assert float(told[1]) >= 97
    assert int(told[2]) >= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
