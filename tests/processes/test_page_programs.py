"""Tests the Python blocks of the pages: each runs, as a part of a whole program."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from support.page_programs import PROGRAMS, PageProgram
from support.programs import Program
from support.running import lighthouse_process

pytestmark = pytest.mark.processes

END_S = 120.0


@pytest.mark.timeout(2 * END_S)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_program_of_a_page_runs(program: PageProgram, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(program.text())
    command = [sys.executable, str(file)]
    if program.is_launched:
        flags = ["--restart-policy", "soft-replace", "--standalone", "--nproc-per-node", "1"]
        command = [sys.executable, "-m", "torchft_svc.elastic.run", *flags, str(file)]
    with lighthouse_process() as lighthouse:
        environment = {"TORCHFT_LIGHTHOUSE": lighthouse.address}
        shell = ["bash", "-c", f"cd {tmp_path} && exec {shlex.join(command)}"]
        with Program(shell, environment) as run:
            assert run.wait(END_S) == 0, run.lines
    assert any(line.endswith("done") for line in run.lines)
