"""Tests that operator commands end trainers, whatever they do."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest
from support.bounds import Late
from support.endings import DEADLINE_S, running
from support.running import eventually
from support.training import lighthouse

from torchft_svc.client.process.draining import REPEAT_S
from torchft_svc.coordination import LighthouseClient
from torchft_svc.errors import RequestRefused

pytestmark = pytest.mark.processes
CONNECT = timedelta(seconds=20)


def is_informed(operator: LighthouseClient, name: str) -> bool:
    """Whether the group is killed; its manager may be about to join, or to join once more."""
    try:
        operator.kill(name, "it hangs")
    except RequestRefused:
        return False
    return True


def test_a_kill_of_a_trainer_that_moves_shows_no_stacks() -> None:
    with lighthouse() as address, running("trains", address) as trainer:
        trainer.read_until("training")
        with LighthouseClient(address, CONNECT) as operator:
            name = f"trains-{trainer.process.pid}"
            eventually(lambda: is_informed(operator, name), what=f"{name} does not join")
        assert trainer.process.wait(DEADLINE_S) == 1
        log = trainer.errors()
        assert "this process is killed: it hangs" in log
        assert "most recent call" not in log


@pytest.mark.parametrize(
    ("program", "status"), [("sleeps", 1), ("holds_the_lock", -signal.SIGKILL)]
)
def test_a_kill_ends_a_trainer_that_hangs(program: str, status: int) -> None:
    with lighthouse() as address, running(program, address) as trainer:
        trainer.read_until("training")
        with LighthouseClient(address, CONNECT) as operator:
            name = f"{program}-{trainer.process.pid}"
            eventually(lambda: is_informed(operator, name), what=f"{name} does not join")
        ended = trainer.process.wait(DEADLINE_S)
        if program == "sleeps" and ended == -signal.SIGKILL:
            raise Late("its manager killed it before it had ended by itself")
        assert ended == status
        trainer.check_children()
        if program == "sleeps":
            log = trainer.errors()
            assert "this process is killed: it hangs" in log
            assert "in sleeps" in log, "where its main thread stands"


def test_a_second_sigterm_ends_a_trainer_at_once() -> None:
    """A step never ends; what is repeated within a second counts as the same request."""
    with lighthouse() as address, running("sleeps", address) as trainer:
        trainer.read_until("training")
        began_at = time.monotonic()

        def has_ended() -> bool:
            trainer.process.send_signal(signal.SIGTERM)
            return trainer.process.poll() is not None

        eventually(has_ended)
        assert time.monotonic() - began_at > REPEAT_S
        assert trainer.process.returncode == -signal.SIGTERM
        trainer.check_children()
