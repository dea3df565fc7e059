"""Tests `Manager.mean` and `Manager.sum`: one number in all groups, or NaN in all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from support.training import Trainer, in_step, lighthouse, together, trainers

from torchft_svc.client import WorldSizeMode


@pytest.fixture(name="two", scope="module")
def two_() -> Iterator[list[Trainer]]:
    with lighthouse(2) as address, trainers(address, 2) as both:
        in_step(1, *both)
        yield both


def numbers(trainer: Trainer, *, before_vote: bool, fails: bool = False) -> tuple[float, float]:
    """The mean and the sum of 1 (of 3 samples) and 5 (of 1 sample), around the vote of a step."""
    value, weight = (1.0, 3) if trainer.name == "a" else (5.0, 1)
    trainer.backward()
    if fails and trainer.name == "a":
        trainer.manager.report_error(RuntimeError("on purpose"))
    if not before_vote:
        assert trainer.optimizer.step() is not fails
    found = trainer.manager.mean(value, weight), trainer.manager.sum(torch.tensor(value))
    if before_vote:
        assert trainer.optimizer.step() is not fails
    return found


@pytest.mark.parametrize("before_vote", [True, False])
def test_all_groups_get_one_number(two: list[Trainer], before_vote: bool) -> None:
    found = together(*(lambda each=each: numbers(each, before_vote=before_vote) for each in two))
    assert found == [(2.0, 6.0)] * 2


@pytest.mark.parametrize("before_vote", [True, False])
def test_there_is_none_after_a_discarded_step(two: list[Trainer], before_vote: bool) -> None:
    first, second = two

    def fails(trainer: Trainer) -> tuple[float, float]:
        return numbers(trainer, before_vote=before_vote, fails=True)

    for found in together(lambda: fails(first), lambda: fails(second)):
        assert all(map(math.isnan, found))
    in_step(first.manager.current_step() + 1, *two)


def test_weights_of_zero_have_no_mean(two: list[Trainer]) -> None:
    def weigh(trainer: Trainer) -> float:
        trainer.step()
        return trainer.manager.mean(3.0, 0.0)

    assert all(map(math.isnan, together(*(lambda each=each: weigh(each) for each in two))))


def test_a_spare_gets_the_numbers_of_the_others() -> None:
    options = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 1}
    with lighthouse(2) as address, trainers(address, 2, **options) as both:

        def train(trainer: Trainer) -> tuple[float, bool]:
            assert trainer.step()
            own = 1.0 if trainer.manager.is_participating() else 100.0
            return trainer.manager.sum(own), trainer.manager.is_participating()

        assert sorted(together(*(lambda each=each: train(each) for each in both))) == [
            (1.0, False),
            (1.0, True),
        ]
