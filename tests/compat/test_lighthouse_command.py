"""Trains two groups of a program for the public release with `torchft_lighthouse`, as users do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import END_S, ROOT, SCRIPTS, environment

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

STEPS = 5
FLAGS = (
    *("--min_replicas", "2", "--quorum_tick_ms", "100", "--join_timeout_ms", "60000"),
    *("--heartbeat_timeout_ms=5000", "--bind=[::]:0"),
)


@pytest.fixture
def torchft_lighthouse(tmp_path: Path) -> Path:
    """The console script as pip writes it."""
    project = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^torchft_lighthouse = "(\S+):(\S+)"$', project, re.MULTILINE)
    assert found is not None
    module, function = found.groups()
    path = tmp_path / "torchft_lighthouse"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
    )
    path.chmod(0o755)
    return path


def test_it_serves_two_groups_of_an_unchanged_program(torchft_lighthouse: Path) -> None:
    lighthouse = subprocess.Popen(
        [torchft_lighthouse, *FLAGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    groups: list[subprocess.Popen[str]] = []
    try:
        assert lighthouse.stdout is not None
        line = lighthouse.stdout.readline()
        assert line.startswith("lighthouse listening on [::]:"), line
        address = f"http://localhost:{line.rpartition(':')[2].strip()}"
        program = (SCRIPTS / "interop_trainer.py", "public", address)
        for name in ("a", "b"):
            command = ("-m", "torchft_svc.compat", *program, name, str(STEPS))
            groups.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", *command],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment(OMP_NUM_THREADS="1"),
                )
            )
        outputs = [each.communicate(timeout=120)[0] for each in groups]
    finally:
        for each in groups:
            each.kill()
            each.wait(END_S)
        lighthouse.terminate()
        _, errors = lighthouse.communicate(timeout=END_S)
    assert [each.returncode for each in groups] == [0, 0]
    first, second = ([json.loads(line) for line in text.splitlines()] for text in outputs)
    assert first == second, "the groups trained together"
    assert [report["step"] for report in first] == list(range(1, STEPS + 1))
    assert {report["groups"] for report in first[1:]} == {2}, "the first step may heal one of them"
    assert lighthouse.returncode == 0, errors
    assert "--quorum-tick-ms is ignored" in errors
