"""Tests the Python blocks of the pages: each runs, as a part of a whole program.

Its process has imported torch before it is started.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.fork_server import LOCAL_PROCESS
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
        with Program(command, environment, warm=True, serves=LOCAL_PROCESS, folder=tmp_path) as run:
            assert run.wait(END_S) == 0, run.lines
    assert any(line.endswith("done") for line in run.lines)
