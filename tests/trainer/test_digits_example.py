"""Tests that the example learns its digits while its workers are killed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.fork_server import LOCAL_PROCESS
from support.programs import Program

pytestmark = pytest.mark.processes
RUN_S = 200.0


def run_example(*options: str, warm: bool = False, **variables: str) -> tuple[int, str]:
    """Run the example, and return its status and output; ``warm``: with torch imported before."""
    pytest.importorskip("sklearn")
    command = [sys.executable, "examples/train_digits.py", *options]
    with Program(command, variables, warm=warm, serves=LOCAL_PROCESS) as example:
        status = example.wait(RUN_S)
    return status, "\n".join(example.lines)


@pytest.mark.timeout(240)
@pytest.mark.ray
def test_the_example_runs_on_ray() -> None:
    """The run is short, so few digits are read; nothing is killed."""
    pytest.importorskip("ray")
    options = ("--backend=ray", "--passes=1", "--kill-every=0", "--step-s=0")
    status, said = run_example(*options, warm=True, RAY_ADDRESS="local")
    match = re.search(r"(\d+\.\d+)% of the digits are read, after 0 kills", said)
    assert match, said[-4000:]
    assert float(match[1]) > 20, said[-4000:]
    assert status in (0, 1)


@pytest.mark.timeout(240)  # passes over the data, with a restart every few seconds
@pytest.mark.parametrize("mode", ["restart", "per-step"])
def test_digits_are_read_although_workers_are_killed(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    status, said = run_example(
        "--passes=13",
        "--kill-every=4",
        "--step-s=0.01",
        f"--fault-tolerance={mode}",
        f"--report={picture}",
        warm=True,
    )
    assert status == 0, said[-4000:]
    match = re.search(r"(\d+\.\d+)% of the digits are read, after (\d+) kills", said)
    assert match, said[-4000:]
    assert float(match[1]) >= 97
    assert int(match[2]) >= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
