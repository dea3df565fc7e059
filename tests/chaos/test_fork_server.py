"""Tests what is told of workers that are forked: who lives, and how the others ended."""

from __future__ import annotations

from pathlib import Path

from support.running import ROOT, TESTS, eventually, start_with_process_id

from chaos.fork_server import ForkServer
from chaos.options import WorkerOptions


def test_a_worker_that_gets_an_ended_ones_process_id_lives(tmp_path: Path) -> None:
    with ForkServer("support.scripts.sleeper", PYTHONPATH=f"{ROOT}:{TESTS}") as fork_server:
        fast, slow = (
            WorkerOptions(folder=tmp_path, group=0, incarnation=life, lighthouse="", step_s=step_s)
            for life, step_s in enumerate((0.0, 60.0))
        )
        first = fork_server.start(fast)
        assert eventually(lambda: fork_server.ended(first))[0] == 0
        start_with_process_id(first, lambda: fork_server.start(slow))
        assert fork_server.ended(first) is None
