"""Tests that a trainer ends on request, whatever it does, and leaves no process behind."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from datetime import timedelta

import pytest
from support.bounds import Late, check
from support.endings import END_S, running
from support.running import eventually, lighthouse_process
from support.training import lighthouse

from torchft_svc.coordination import LighthouseClient

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
        assert "fork()" not in trainer.errors()  # as gRPC warns


def test_an_unreachable_lighthouse_is_an_error_that_names_it(address: str) -> None:
    with running("unreachable", address) as trainer:
        line = trainer.read_until("error")
        if "lighthouse at 127.0.0.1:1" not in line:
            raise Late(line)
        assert trainer.ends() == 0, trainer.errors()


ENDS = {
    "it returns": ("returns", None, "left", "group rank 0 is gone: it has shut down"),
    "it raises": (
        "raises",
        None,
        "lost",
        "group rank 0 is gone: it ends with RuntimeError: on purpose",
    ),
    "Ctrl-C": ("trains", signal.SIGINT, "left", "group rank 0 is gone: it has shut down"),
    "SIGTERM": ("trains", signal.SIGTERM, "left", "SIGTERM"),
    "SIGKILL": ("trains", signal.SIGKILL, "lost", ""),
    "lighthouse kill": ("trains", "kill", "left", "killed: wanted"),
}


@pytest.mark.parametrize(("name", "by", "what", "reason"), ENDS.values(), ids=ENDS)
def test_the_lighthouse_distinguishes_an_orderly_end_from_a_loss(
    name: str, by: signal.Signals | str | None, what: str, reason: str
) -> None:
    """The lighthouse knows whether the job is finished; then another run begins at step 0."""
    with (
        lighthouse_process("--min-replicas=1") as house,
        LighthouseClient(house.address, timedelta(seconds=10)) as client,
    ):
        with running(name, house.address) as trainer:
            trainer.read_until("training")
            if by == "kill":
                (job,) = client.status()
                client.kill(job.groups[0].replica_id, "wanted")
                trainer.process.wait()
            elif isinstance(by, signal.Signals):
                trainer.end(by)
            else:
                trainer.ends()
            trainer.check_children()
        (job,) = eventually(lambda: [each for each in client.status() if each.ended_s is not None])
        assert (job.finished, job.gone[0].orderly) == (what == "left", what == "left"), job
        assert reason in job.gone[0].reason
        lines = [line for line in house.errors().splitlines() if f"group {what} " in line]
        level = logging.getLevelName(logging.INFO if what == "left" else logging.WARNING)
        assert len(lines) == 1, house.errors()
        assert f" {level} " in lines[0]
        assert reason in lines[0]
        with running("returns", house.address) as trainer:
            trainer.read_until("training")
            assert trainer.ends() == 0, trainer.errors()
        if name == "trains":  # else it had committed no more than the first step
            expected = {"left": "job begins anew", "lost": "job went back"}[what]
            assert expected in house.errors()
        assert ("job went back" in house.errors()) == (name == "trains" and what == "lost")
