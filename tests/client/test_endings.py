"""Tests that a trainer ends when it is told to, whatever it does, and leaves nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from bounds import Late, check

from .programs import END_S, running
from .training import lighthouse

pytestmark = pytest.mark.processes


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=1) as address:
        yield address


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["sigint", "sigterm"])
def test_a_trainer_ends_within_2_s(address: str, number: signal.Signals) -> None:
    with running("trains", address) as trainer:
        trainer.read_until("training")
        check("a trainer ends", trainer.end(number), END_S)
        if number == signal.SIGTERM:
            assert trainer.process.returncode == 0, trainer.errors()
        else:
            assert trainer.process.returncode != 0
            assert "KeyboardInterrupt" in trainer.errors()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["sigint", "sigterm"])
def test_a_trainer_that_waits_for_a_quorum_ends_within_2_s(number: signal.Signals) -> None:
    with lighthouse(min_replicas=2) as address, running("waits", address) as trainer:
        trainer.read_until("training")
        check("a trainer ends", trainer.end(number), END_S)
        assert (trainer.process.returncode == 0) == (number == signal.SIGTERM), trainer.errors()


def test_a_trainer_that_waits_in_its_backward_pass_ends_within_2_s(address: str) -> None:
    with running("hangs", address) as other, running("waits_in_backward", address) as trainer:
        other.read_until("training")
        trainer.read_until("waiting")
        check("a trainer ends", trainer.end(signal.SIGINT), END_S)
        assert "KeyboardInterrupt" in trainer.errors()
        check("a trainer is killed", other.end(signal.SIGKILL), END_S)


@pytest.mark.parametrize(("name", "status"), [("returns", 0), ("raises", 1)])
def test_a_trainer_that_forgets_its_manager_leaves_nothing(
    address: str, name: str, status: int
) -> None:
    with running(name, address) as trainer:
        trainer.read_until("training")
        assert trainer.ends() == status, trainer.errors()


def test_forked_data_loader_workers(address: str) -> None:
    with running("forks", address) as trainer:
        # 2 epochs of half the 24 samples, and a step after a fork that ended in good order.
        assert trainer.read_until("seen") == "seen 24 True"
        assert trainer.ends() == 0, trainer.errors()
        assert "fork" not in trainer.errors()


def test_an_unreachable_lighthouse_is_an_error_that_names_it(address: str) -> None:
    with running("unreachable", address) as trainer:
        told = trainer.read_until("error")
        if "lighthouse at 127.0.0.1:1" not in told:
            raise Late(told)
        assert trainer.ends() == 0, trainer.errors()
