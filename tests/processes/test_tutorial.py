"""Tests the tutorial: every block of it, in its order, from an empty folder."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from support.documents import Page
from support.programs import Program
from support.running import ROOT

pytestmark = pytest.mark.processes

# Two trainers import torch at the same time, on few cores that may be busy.
OUTPUT_S = 110.0


@pytest.mark.timeout(480)
def test_the_tutorial_runs_as_printed(tmp_path: Path) -> None:
    page = Page(ROOT / "docs" / "tutorial.md", tmp_path, {"29510": str(free_port())})
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with Program(page.command, {"PATH": path, "REPLICA_GROUP_ID": ""}) as shell:
        assert page.follow(shell, OUTPUT_S) > 8
        assert shell.wait(OUTPUT_S) == 0, shell.lines


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
