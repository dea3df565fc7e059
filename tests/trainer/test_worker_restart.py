"""Tests workers of a trainer that share a process group of torch, with real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.running import eventually
from support.trainer_workers import (
    SIZE,
    Workers,
    digest,
    job,
    make_wide_model,
    noted,
    train_function,
    workers,
)
from torch import nn
from torch.utils.data import TensorDataset

from torchft_svc.trainer.messages import (
    Abandon,
    CheckpointWritten,
    Failed,
    Position,
    StateHandle,
    StateOffered,
)

pytestmark = pytest.mark.processes


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Workers]:
    with workers(tmp_path) as started:
        yield started


def test_workers_train_alike_and_the_loss_goes_down(team: Workers) -> None:
    both = team.start(job(), 2)
    team.form(both)
    team.train(both)
    first = team.finish(both)
    team.train(both, epoch=8)
    last = team.finish(both)
    assert [each.position.epoch for each in (*first, *last)] == [1, 1, 8, 8]
    assert last[0].position.step == 8 * 12
    assert last[0].result["train_loss"] < first[0].result["train_loss"] / 2
    states = [digest(team.state(worker)) for worker in both]
    assert states[0]["parts"]["optimizer"] == states[1]["parts"]["optimizer"]
    parts = team.validate(both)
    assert sum(each.result["num_samples"] for each in parts) == 33
    team.end(both)


def test_the_survivors_of_a_loss_offer_the_state_of_a_whole_step(team: Workers) -> None:
    settings = job(config={"lose": (2, 5)})
    three = team.start(settings, 3)
    team.form(three)
    team.train(three, epoch=5)
    assert team.processes[2].wait(60.0) == -signal.SIGKILL
    offered = [team.read(handle) for handle in team.abandon(three[:2])]
    team.wait_for_ends(three[:2])
    assert [state.position for state in offered] == 2 * [Position(step=5, num_samples=60)]
    # The same workers without a loss, up to that step.
    again = team.start(job(), 3)
    team.form(again)
    team.train(again, epoch=5, step=5)
    team.finish(again)
    for survivor, state in enumerate(offered):
        assert digest(state) == digest(team.state(again[survivor]))
    team.end(again)


@pytest.mark.parametrize("kind", ["creators", "function"])
def test_a_run_that_was_resumed_equals_one_that_was_not(team: Workers, kind: str) -> None:
    def made(**config: Any) -> Any:
        config = {"epochs": 3, **config}
        if kind == "creators":
            return job(config=config)
        return job(config=config, train_fn=train_function, model_creator=None)

    undisturbed = team.start(made(), 2)
    team.form(undisturbed)
    team.train(undisturbed, epoch=3)
    team.finish(undisturbed)
    wanted = digest(team.state(undisturbed[0]))
    assert wanted["position"] == Position(epoch=3, step=36)
    team.end(undisturbed)

    lost = team.start(made(lose=(undisturbed[-1] + 2, 17)), 2)
    team.form(lost)
    team.train(lost, epoch=3)
    assert team.processes[lost[1]].wait(60.0) == -signal.SIGKILL
    (offered,) = team.abandon(lost[:1])
    assert offered.position == Position(epoch=1, step=17, num_samples=40)
    resumed = team.start(made(), 2)
    joined = team.form(resumed, state=offered)
    assert joined[0].position == offered.position
    team.train(resumed, epoch=3)
    team.finish(resumed)
    assert digest(team.state(resumed[0])) == wanted
    team.end(resumed)


def test_a_resumed_run_of_three_workers_sums_in_the_same_order(team: Workers) -> None:
    made = job(model_creator=make_wide_model)

    def run(state: StateHandle | None, until: int) -> list[StateHandle]:
        three = team.start(made, 3)
        team.form(three, state=state)
        team.train(three, step=until)
        team.finish(three)
        return team.abandon(three)

    undisturbed = run(None, 6)[0]
    resumed = run(run(None, 4)[1], 6)[0]
    assert digest(team.read(resumed)) == digest(team.read(undisturbed))


def test_what_is_made_between_passes_is_the_same_in_each_worker(team: Workers) -> None:
    def function(context: Any) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = context.prepare(model, optimizer)
        drawn = []
        for _ in range(context.position.epoch, 3):
            drawn.append(torch.rand(()).item())
            for (inputs,) in context.batches(TensorDataset(torch.ones(8, 1)), batch_size=2):
                model(inputs).sum().backward()
                optimizer.step()
        return drawn

    both = team.start(job(train_fn=function, model_creator=None), 2)
    team.form(both)
    team.train(both, epoch=3)
    first, second = (each.result for each in team.finish(both))
    assert first == second
    assert len(set(first)) == 3
    team.end(both)


def test_each_sample_is_used_once_while_the_number_of_workers_changes(team: Workers) -> None:
    notes = team.folder / "notes"
    settings = {"epochs": 1, "notes": str(notes)}
    state = None
    for size, lose in ((3, (2, 2)), (2, (4, 4)), (4, (99, 99))):
        made = job(train_fn=train_function, config={**settings, "lose": lose})
        members = team.start(made, size)
        team.form(members, state=state)
        team.train(members)
        if lose[0] in members:
            team.processes[lose[0]].wait(60.0)
            survivors = [worker for worker in members if worker != lose[0]]
            state = team.abandon(survivors)[0]
            team.wait_for_ends(survivors)
        else:
            team.finish(members)
            team.end(members)
    used = [number for numbers in noted(notes).values() for number in numbers]
    assert sorted(used) == list(range(SIZE))


def test_a_step_that_waits_for_a_frozen_worker_is_abandoned(team: Workers) -> None:
    both = team.start(job(), 2)
    team.form(both)
    team.train(both, epoch=100_000)
    team.until(lambda: bool(team.position(both[0]).step > 3), "some steps")
    team.processes[1].send_signal(signal.SIGSTOP)
    (offered,) = team.abandon(both[:1])
    assert offered.position.step > 3
    team.wait_for_ends(both[:1])


def test_the_state_is_offered_while_the_program_does_something_else(team: Workers) -> None:
    held = team.folder / "held"
    (one,) = team.start(job(config={"hold": str(held)}), 1)
    team.form([one])
    team.train([one], epoch=100_000)
    team.until(lambda: bool(team.position(one).step > 3), "some steps")
    held.touch()  # from the next step on its loss takes a minute
    eventually(lambda: (team.folder / "held.there").exists())
    began_at = time.monotonic()
    team.abandon([one])
    assert time.monotonic() - began_at < 20.0


def test_a_failure_is_reported_with_its_traceback_and_the_state_can_be_had(team: Workers) -> None:
    both = team.start(job(config={"fail": (0, 4)}), 2)
    team.form(both)
    team.train(both)
    failed = team.wait_for(both[0], Failed)
    assert failed.kind.endswith("TooMuch")
    assert "in lose_at" in failed.traceback
    assert not failed.is_peers
    assert failed.position == Position(step=4, num_samples=32)
    offered = team.abandon(both)
    assert [each.position.step for each in offered] == [4, 4]
    team.wait_for_ends(both)


def test_a_failed_collective_is_reported_as_a_peers_failure(team: Workers) -> None:
    both = team.start(job(config={"lose": (1, 4)}), 2)
    team.form(both)
    team.train(both)
    assert team.wait_for(both[0], Failed).is_peers
    (offered,) = team.abandon(both[:1])
    assert offered.position.step == 4
    team.wait_for_ends(both[:1])


def test_a_worker_ends_when_its_trainer_does(team: Workers) -> None:
    both = team.start(job(), 2)
    team.form(both)
    team.train(both, epoch=100_000)
    team.until(lambda: bool(team.position(both[0]).step > 3), "some steps")
    for worker in both:
        team.disconnect(worker)
    team.wait_for_ends(both)


def test_a_world_that_is_not_complete_can_be_abandoned(team: Workers) -> None:
    both = team.start(job(), 2)
    team.join(both[0], world=1, rank=0, world_size=2)
    team.send(both[0], Abandon(reason="the other one is lost"))
    team.wait_for_ends(both[:1])
    assert not any(isinstance(each, Failed | StateOffered) for each in team.answers[both[0]])


def test_train_until_a_step(team: Workers) -> None:
    (one,) = team.start(job(), 1)
    team.form([one])
    team.train([one], step=5)
    assert team.finish([one])[0].position == Position(step=5, num_samples=20)
    team.train([one])
    (done,) = team.finish([one])
    assert done.position == Position(epoch=1, step=24)
    assert done.result["num_samples"] == SIZE - 20
    team.end([one])


def test_checkpoints_are_written_by_one_worker_and_can_be_resumed_from(team: Workers) -> None:
    folder = str(team.folder / "checkpoints")
    made = job(checkpoint_every_steps=4, keep_last=9)
    both = team.start(made, 2)
    team.form(both)
    team.train(both, step=4, checkpoint_dir=folder)
    team.finish(both)
    assert team.wait_for(both[0], CheckpointWritten).position == Position()  # before the pass
    team.train(both, checkpoint_dir=folder)
    team.finish(both)
    written = team.wait_for(both[0], CheckpointWritten)
    assert written.position == Position(step=4, num_samples=32)
    wanted = digest(team.state(both[0]))
    team.end(both)
    assert not any(isinstance(each, CheckpointWritten) for each in team.answers[both[1]])
    again = team.start(made, 2)
    joined = team.form(again, checkpoint=written.path)
    assert joined[0].position == written.position
    team.train(again)
    team.finish(again)
    assert digest(team.state(again[0])) == wanted
    team.end(again)
