"""Tests that an operator ends trainers, as processes, whatever they do."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest

from torchft_svc.coordination import LighthouseClient

from .programs import END_S, running
from .training import lighthouse

pytestmark = pytest.mark.processes
CONNECT = timedelta(seconds=5)


@pytest.mark.parametrize(
    ("program", "status"), [("sleeps", 1), ("holds_the_lock", -signal.SIGKILL)]
)
def test_a_kill_ends_a_trainer_that_hangs(program: str, status: int) -> None:
    with lighthouse() as address, running(program, address) as trainer:
        trainer.read_until("training")
        with LighthouseClient(address, CONNECT) as operator:
            operator.kill(f"{program}-{trainer.process.pid}", "it hangs")
        assert trainer.process.wait(2 * END_S) == status
        trainer.check_children()
        if program == "sleeps":
            told = trainer.errors()
            assert "this process is killed: it hangs" in told
            assert "in sleeps" in told, "where its main thread stands"
