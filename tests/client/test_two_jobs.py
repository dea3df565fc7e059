"""Tests that one thread does not train a group in two jobs, which would wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.training import Trainer, lighthouse, together, trainers

from torchft_svc.errors import ConfigError

pytestmark = pytest.mark.processes

SENTENCE = (
    r"job_id='critic' cannot work: this thread trains group a in job 'default', too: .*"
    r"Optimizer\(manager, \[a, b\]\)"
)


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


def test_one_thread_does_not_train_a_group_in_two_jobs(address: str) -> None:
    """The first job goes on."""
    with Trainer(address, "a", 0) as actor, Trainer(address, "a", 0, job_id="critic") as critic:
        actor.steps(1)
        for _ in range(2):
            with pytest.raises(ConfigError, match=SENTENCE):
                critic.optimizer.zero_grad()
            actor.steps(1)
        actor.manager.shutdown()
        critic.steps(2)  # now it has the thread for itself


def test_two_threads_may(address: str) -> None:
    with Trainer(address, "a", 0) as actor, Trainer(address, "a", 0, job_id="critic") as critic:
        together(lambda: actor.steps(3), lambda: critic.steps(3))


def test_groups_of_one_job_may_share_a_thread(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        a.manager.shutdown()
        with Trainer(address, "b", 1) as b:
            b.steps(1)


def test_a_thread_that_trains_two_groups_in_two_jobs_is_warned(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning is due only where others are in both jobs: a lone group waits for nobody.

    Each job has groups of its own names here, as where no name is given.
    """
    with (
        trainers(address, 2) as (a, b),
        Trainer(address, "c", 0, job_id="critic") as c,
        Trainer(address, "d", 1, job_id="critic") as d,
    ):
        ready = threading.Barrier(2)

        def train(actor: Trainer, critic: Trainer) -> None:
            for _ in range(6):
                ready.wait(60.0)
                actor.step()
                ready.wait(60.0)
                critic.step()

        together(lambda: train(a, c), lambda: train(b, d))
    lines = [each.getMessage() for each in caplog.records if "one thread trains in" in each.msg]
    assert 1 <= len(lines) <= 4
    assert all("Optimizer(manager, [a, b])" in line for line in lines)
