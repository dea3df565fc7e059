"""Tests workers of a trainer that are replica groups under a lighthouse, with real processes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.trainer_workers import SIZE, Workers, digest, job, noted, train_function, workers

from torchft_svc.coordination import LighthouseClient, LighthouseServer
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.testing.proxy import Proxy
from torchft_svc.trainer.job import WorkerJob
from torchft_svc.trainer.messages import Failed, Joined, Position, StateOffered

pytestmark = pytest.mark.processes


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Workers]:
    with workers(tmp_path) as started:
        yield started


@contextlib.contextmanager
def lighthouse(min_replicas: int = 2) -> Iterator[str]:
    """The address of one that waits for so many workers."""
    with LighthouseServer(
        "127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=20_000
    ) as server:
        yield server.address().removeprefix("http://")


def per_step(**changes: Any) -> WorkerJob:
    return job(fault_tolerance="per-step", **changes)


def trained(state: dict[str, Any]) -> dict[str, Any]:
    """What has to be equal in all workers: each keeps its own running averages."""
    parts = state["parts"]
    model = {name: each for name, each in parts["model"].items() if "running" not in name}
    return {**parts, "model": model}


def test_a_lost_worker_is_replaced_by_one_that_takes_over_the_state(team: Workers) -> None:
    notes = team.folder / "notes"
    config = {"epochs": 3, "notes": str(notes), "lose": (2, 12)}
    made = per_step(train_fn=train_function, config=config)
    with lighthouse(min_replicas=3) as address:
        three = team.start(made, 3)
        team.form(three, address=address)
        team.train(three)
        assert team.processes[2].wait(60.0) == -signal.SIGKILL
        (new,) = team.start(made, 1)
        team.join(new, world=1, rank=2, world_size=3, address=address)
        team.train([new])
        members = [*three[:2], new]
        # The new one begins in the second pass, as the others are.
        assert {each.position for each in team.finish(members)} == {Position(epoch=3, step=24)}
        states = [digest(team.state(worker)) for worker in members]
        assert trained(states[0]) == trained(states[1]) == trained(states[2])
        team.end(members)
    used = [number for numbers in noted(notes).values() for number in numbers]
    # What the lost worker used before it was lost was noted, too.
    assert sorted(used) == sorted(3 * list(range(SIZE)))


def test_who_has_joined_is_known_to_the_lighthouse(team: Workers) -> None:
    """Another one that asks would train without it, and could have finished when it asks."""
    two = team.start(per_step(), 2)
    with lighthouse() as address, Proxy(address) as slow:
        slow.hold()
        timer = threading.Timer(0.5, slow.release)
        timer.start()
        for rank, where in enumerate((address, slow.address)):
            team.join(two[rank], world=1, rank=rank, world_size=2, address=where)
        for worker in two:
            team.wait_for(worker, Joined)
        with LighthouseClient(address, timedelta(seconds=10)) as client:
            (known,) = client.status()
        timer.join()
        names = {stable_name(group.replica_id) for group in known.groups}
        assert names == {f"worker-{worker}" for worker in two}
        team.train(two)
        team.finish(two)
        team.end(two)


def test_the_others_train_on_with_the_samples_of_a_lost_worker(team: Workers) -> None:
    notes = team.folder / "notes"
    config = {"epochs": 2, "notes": str(notes), "lose": (1, 4)}
    with lighthouse() as address:
        three = team.start(per_step(train_fn=train_function, config=config), 3)
        team.form(three, address=address)
        team.train(three, epoch=2)
        survivors = [0, 2]
        done = team.finish(survivors)
        # 4 steps of three workers, then 48 samples are left of the first pass.
        assert {each.position for each in done} == {Position(epoch=2, step=4 + 6 + 12)}
        states = [digest(team.state(worker)) for worker in survivors]
        assert trained(states[0]) == trained(states[1])
        team.end(survivors)
    used = [number for numbers in noted(notes).values() for number in numbers]
    assert sorted(used) == sorted(2 * list(range(SIZE)))


def test_a_run_that_was_resumed_equals_one_that_was_not(team: Workers) -> None:
    with lighthouse() as address:
        undisturbed = team.start(per_step(), 2)
        team.form(undisturbed, address=address)
        team.train(undisturbed)
        first = team.finish(undisturbed)
        team.train(undisturbed, epoch=3)
        last = team.finish(undisturbed)
        assert last[0].result["train_loss"] < first[0].result["train_loss"]
        wanted, other = (digest(team.state(worker)) for worker in undisturbed)
        assert trained(wanted) == trained(other)
        team.end(undisturbed)

        lost = team.start(per_step(config={"lose": (3, 17)}), 2)
        team.form(lost, address=address)
        team.train(lost, epoch=3)
        assert team.processes[lost[1]].wait(60.0) == -signal.SIGKILL
        # The other one waits for a quorum that needs two.
        (offered,) = team.abandon(lost[:1])
        team.wait_for_ends(lost[:1])
        assert offered.position == Position(epoch=1, step=17, num_samples=40)
        resumed = team.start(per_step(), 2)
        team.form(resumed, state=offered, address=address)
        team.train(resumed, epoch=3)
        team.finish(resumed)
        states = [digest(team.state(worker)) for worker in resumed]
        assert states[0]["position"] == wanted["position"]
        assert trained(states[0]) == trained(states[1]) == trained(wanted)
        team.end(resumed)


def test_a_failure_of_one_does_not_stop_the_others(team: Workers) -> None:
    with lighthouse() as address:
        three = team.start(per_step(config={"fail": (1, 4)}), 3)
        team.form(three, address=address)
        team.train(three)
        failed = team.wait_for(1, Failed)
        assert not failed.is_peers
        done = team.finish([0, 2])
        assert [each.position.epoch for each in done] == [1, 1]
        team.abandon([1])
        team.wait_for_ends([1])
        team.end([0, 2])


def test_a_worker_that_waits_for_others_can_be_ended(team: Workers) -> None:
    with lighthouse() as address:
        (one,) = team.start(per_step(), 1)
        team.form([one], address=address)
        team.train([one])
        team.end([one])
        assert not any(isinstance(each, Failed | StateOffered) for each in team.answers[one])
