"""Tests when the state of a worker is that of a whole step, and which one it hands out."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.trainer_workers import digest, job
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, MultiStepLR

from torchft_svc.client.step.state import StateRegistry
from torchft_svc.errors import ConfigError
from torchft_svc.trainer.held_state import HeldState, StepAbandoned
from torchft_svc.trainer.messages import Position
from torchft_svc.trainer.per_step import PerStepWorld


class Training:
    """A small program, of which each test does the parts of a step that it is about."""

    def __init__(self, seed: int = 0, num_optimizers: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        parts = [self.model[0], self.model[2]][:num_optimizers] if num_optimizers > 1 else None
        self.optimizers = [
            torch.optim.Adam(part.parameters(), lr=0.1) for part in parts or [self.model]
        ]
        self.plans: list[LRScheduler] = [ExponentialLR(self.optimizers[0], gamma=0.5)]
        self.held = HeldState()
        self.held.own([self.model], self.optimizers, self.plans)

    def forward(self) -> None:
        self.model(torch.ones(2, 3) + torch.rand(2, 3)).sum().backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def step(self, plans: bool = True) -> None:
        """One whole step of two samples, up to the next boundary."""
        at = self.held.drawn
        self.held.draw(Position(epoch=at.epoch, step=at.step, num_samples=at.num_samples + 2))
        self.forward()
        self.update()
        if plans:
            self.plans[0].step()
        self.held.complete()

    def now(self, by_main: bool = True) -> Any:
        state = self.held.whole(by_main=by_main)
        return None if state is None else digest(state)


def test_a_step_counts_when_the_program_asks_for_the_next_batch() -> None:
    training = Training()
    assert training.held.position == Position()
    training.step()
    training.step()
    assert training.held.position == Position(step=2, num_samples=4)
    assert training.held.drawn == training.held.position
    training.held.complete(closes_pass=True)
    assert training.held.position == Position(epoch=1, step=2)


def test_before_the_update_the_state_is_that_of_the_last_step() -> None:
    training = Training()
    training.step()
    before = training.now()
    training.held.draw(Position(step=1, num_samples=4))
    training.forward()  # changes the buffers
    training.optimizers[0].param_groups[0]["lr"] = 9.0
    assert training.now() == before
    assert training.now(by_main=False) == before


def test_after_the_update_only_the_main_thread_can_complete_the_step() -> None:
    training = Training()
    for _ in range(2):
        training.step()
    training.held.draw(Position(step=2, num_samples=6))
    training.forward()
    training.update()
    assert training.now(by_main=False) is None
    assert training.now() is None  # the scheduler moves with each step, and has not yet
    training.plans[0].step()
    assert training.now()["position"] == Position(step=3, num_samples=6)
    assert training.held.position == Position(step=3, num_samples=6)


def test_a_scheduler_that_moves_with_passes_is_not_waited_for() -> None:
    training = Training()
    for _ in range(2):
        training.step(plans=False)
    training.plans[0].step()
    training.held.complete(closes_pass=True)
    training.held.draw(Position(epoch=1, step=2, num_samples=2))
    training.forward()
    training.update()
    assert training.now()["position"] == Position(epoch=1, step=3, num_samples=2)


def test_an_update_that_was_not_finished_is_no_state() -> None:
    training = Training()
    training.step()

    def fail(*_: Any) -> None:
        raise ValueError

    training.optimizers[0].register_step_post_hook(fail)
    training.held._begin_update()
    assert training.now() is None


def test_with_several_optimizers_the_state_is_copied() -> None:
    training = Training(num_optimizers=2)
    training.step()
    before = training.now()
    training.held.draw(Position(step=1, num_samples=4))
    training.forward()
    training.optimizers[0].step()
    assert training.now() == before
    training.optimizers[1].step()
    assert training.now() == before
    training.held.complete()
    assert training.now()["position"] == Position(step=2, num_samples=4)


@pytest.mark.parametrize("num_whole", [0, 2])
def test_a_step_of_several_updates_is_handed_out_whole(num_whole: int) -> None:
    training = Training()

    def step(num_updates: int) -> None:
        at = training.held.drawn
        training.held.draw(Position(step=at.step, num_samples=at.num_samples + 2))
        for _ in range(num_updates):
            training.forward()
            training.update()

    for _ in range(num_whole):
        step(3)
        training.held.complete()
    before = training.now()
    step(2)
    training.forward()  # of the third one, which fails
    assert training.now() == before
    assert training.held.position.step == num_whole


def test_a_second_update_shows_that_a_step_was_not_whole() -> None:
    training = Training()
    for _ in range(2):
        training.step(plans=False)
    training.held.draw(Position(step=2, num_samples=6))
    training.forward()
    training.update()
    training.held.abandon("a worker was lost")
    with pytest.raises(StepAbandoned):
        training.update()
    assert training.held.whole() is None


def test_samples_of_accumulated_gradients_count_with_their_update() -> None:
    training = Training()
    training.step()
    before = training.now()
    training.held.draw(Position(step=1, num_samples=4))
    training.forward()
    assert not training.held.complete()
    assert training.held.drawn.num_samples == 4
    assert training.now() == before
    training.held.draw(Position(step=1, num_samples=6))
    training.forward()
    training.update()
    assert training.held.complete()
    assert training.held.position == Position(step=2, num_samples=6)
    training.held.draw(Position(step=2, num_samples=8))
    training.held.undraw()
    assert training.held.drawn == training.held.position


def test_an_abandoned_worker_begins_no_update() -> None:
    training = Training()
    training.step()
    before = training.now()
    training.held.draw(Position(step=1, num_samples=4))
    training.forward()
    training.held.abandon("a worker is lost")
    with pytest.raises(StepAbandoned, match="a worker is lost"):
        training.update()
    assert training.now() == before
    with pytest.raises(StepAbandoned):
        training.held.complete()


def test_no_update_begins_while_the_state_is_read() -> None:
    training = Training()
    training.forward()
    with training.held.holding():
        thread = threading.Thread(target=training.update)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    thread.join(20.0)
    assert not thread.is_alive()


def test_a_state_is_resumed_when_there_is_something_to_load_it_into() -> None:
    source, target = Training(), HeldState()
    for _ in range(3):
        source.step()
    state = source.held.whole()
    assert state is not None
    target.begin_with(state)
    assert target.position == Position(step=3, num_samples=6)
    assert target.whole() is state  # it can be handed on
    other = Training(seed=1)
    target.own([other.model], other.optimizers, other.plans)
    resumed = target.whole()
    assert resumed is not None
    assert digest(resumed) == source.now()


def test_a_program_that_is_started_again_goes_on() -> None:
    training = Training()
    training.step()
    before = training.now()
    again = Training(seed=1)
    training.held.own([again.model], again.optimizers, again.plans)
    assert training.now() == before


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = Training().held.whole()
    assert state is not None
    held = HeldState()
    held.begin_with(state)
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="the program has 0"):
        held.own([model], [torch.optim.Adam(model.parameters())], [])
    other = Training()
    with pytest.raises(ConfigError, match="missing"):
        held.own([model], other.optimizers, other.plans)


def test_a_worker_of_the_per_step_mode_heals_to_schedulers_that_go_on_alike() -> None:
    """The state passes the functions that `PerStepWorld` registers with its manager."""
    groups = []
    for seed in range(2):
        training = Training(seed)
        training.plans = [MultiStepLR(training.optimizers[0], [2, 5, 5], gamma=0.1)]
        training.held = HeldState()
        training.held.own([training.model], training.optimizers, training.plans)
        world = PerStepWorld("a", job(), torch.device("cpu"), training.held)
        groups.append((training, StateRegistry(world._take_over, world._hand_out)))
    (ahead, its_state), (behind, registry) = groups
    for _ in range(3):
        ahead.step()
    registry.load(its_state.collect({}, timeout_s=1.0))
    rates = []
    for _ in range(4):
        for training in (ahead, behind):
            training.step()
        assert behind.plans[0].state_dict() == ahead.plans[0].state_dict()
        rates.append([group[0].optimizers[0].param_groups[0]["lr"] for group in groups])
    assert rates == [pytest.approx([rate, rate]) for rate in (0.01, 0.0001, 0.0001, 0.0001)]
