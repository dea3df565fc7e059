"""Each planted fault in the rules of terms (E1 to E6) is found by some seed (rule X3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sim.test_planted import INVARIANTS, MAX_SEEDS, Plant
from torchft_svc.core import group
from torchft_svc.core.activity import Activity
from torchft_svc.core.job import Job
from torchft_svc.core.manager import GroupManager
from torchft_svc.core.round import Round
from torchft_svc.sim.fleet import Fleet
from torchft_svc.sim.scenario import draw_steady

NUM_GROUPS = 3  # few: such runs are short

# -- who may go on (E1, E3) ----------------------------------------------------------------------


def a_lone_member_goes_on(plant: pytest.MonkeyPatch) -> None:
    real = group.assign

    def assign(quorum: Any, *what: Any) -> Any:
        part = real(quorum, *what)
        is_alone = len(quorum.participants) == 1
        return dataclasses.replace(part, steady=True) if is_alone else part

    plant.setattr(group, "assign", assign)


def who_has_lost_its_update_goes_on(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "_why_not_on", lambda self, request, broken: broken)


# -- the wish (E2) -------------------------------------------------------------------------------


def a_wish_is_lost(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Round, "wants_question", False)


def what_the_sum_of_the_wishes_says_is_ignored(plant: pytest.MonkeyPatch) -> None:
    real = Round.summed
    plant.setattr(Round, "summed", lambda self, wishes: real(self, 0.0))


def who_drains_does_not_say_so(plant: pytest.MonkeyPatch) -> None:
    real = Round.wants_question
    assert isinstance(real, property)
    plant.setattr(
        Round, "wants_question", property(lambda self: self._is_asked_for or self.peers.num_waiting)
    )


# -- the end of a term (E4) ----------------------------------------------------------------------


# -- the step of the job (E5) --------------------------------------------------------------------


def what_beats_tell_is_not_noted(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "note_progress", lambda self: None)


def an_update_that_is_under_way_counts_as_done(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Activity, "reached", property(lambda self: self.step + 1))


def a_worker_goes_on_in_a_quorum_that_its_group_has_left(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(GroupManager, "_note_left", lambda self, reason: None)


# Each with the first seed of the search: near the first one that finds it.
PLANTS: dict[Plant, int] = {
    a_lone_member_goes_on: 8,
    who_has_lost_its_update_goes_on: 7,
    a_wish_is_lost: 3,
    what_the_sum_of_the_wishes_says_is_ignored: 3,
    who_drains_does_not_say_so: 3,
    an_update_that_is_under_way_counts_as_done: 0,
    what_beats_tell_is_not_noted: 209,
    a_worker_goes_on_in_a_quorum_that_its_group_has_left: 3003,
}


@pytest.mark.parametrize(
    ("planted", "first"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS]
)
def test_it_is_found(planted: Plant, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    outcomes = (
        Fleet(draw_steady(seed, NUM_GROUPS)).run() for seed in range(first, first + MAX_SEEDS)
    )
    found = next(outcome for outcome in outcomes if outcome.fell is not None)
    assert found.fell in INVARIANTS, found.what  # an exception shows nothing: the plant may raise
