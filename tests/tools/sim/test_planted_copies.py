"""Planted faults in the rules of buddy copies (B1 to B6) are found by some seed (rule X3).

Which of several whole states is the newest, and which parts fit together, is left to the tables in
`tests/core/quorum/lighthouse`: holders that are well hold the same step, and runs seldom differ.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from sim.test_planted import INVARIANTS, MAX_SEEDS, Plant
from tools.sim.explore import describe
from tools.sim.fleet import Fleet
from tools.sim.scenario import draw_copies
from torchft_svc.core.quorum.lighthouse import copies, holder_plan
from torchft_svc.core.quorum.lighthouse.copies import CopySearch, MembersAndCopies
from torchft_svc.core.quorum.lighthouse.holder_plan import HistoryWatch
from torchft_svc.core.quorum.worker.step import StepState


def states_that_are_to_heal_are_copied(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(StepState, "is_copied", lambda self, every: every > 0 and self.step > 0)


def a_copy_takes_the_place_of_a_living_state(plant: pytest.MonkeyPatch) -> None:
    real = CopySearch.choose_start

    def choose_start(self: Any, view: MembersAndCopies, now: float) -> Any:
        return real(self, dataclasses.replace(view, members={}, committed_step=0), now)

    plant.setattr(CopySearch, "choose_start", choose_start)


def copies_of_a_run_that_has_finished_are_kept(plant: pytest.MonkeyPatch) -> None:
    real = HistoryWatch.is_over

    def is_over(self: Any, view: MembersAndCopies, *what: Any) -> bool:
        return not view.is_finished and real(self, view, *what)

    plant.setattr(HistoryWatch, "is_over", is_over)


def nothing_is_freed(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(holder_plan, "states_to_keep", lambda held, whole, *, is_next_coming: list(held))


def holders_that_are_silent_are_never_forgotten(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(copies, "SILENT_S", math.inf)


# Each with the first seed of the search, near the first one that finds it.
PLANTS: dict[Plant, int] = {
    states_that_are_to_heal_are_copied: 0,
    a_copy_takes_the_place_of_a_living_state: 7,
    copies_of_a_run_that_has_finished_are_kept: 0,
    nothing_is_freed: 0,
    holders_that_are_silent_are_never_forgotten: 31,
}


@pytest.mark.parametrize(
    ("planted", "first"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS]
)
def test_it_is_found(planted: Plant, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    outcomes = (Fleet(draw_copies(seed, 3)).run() for seed in range(first, first + MAX_SEEDS))
    found = next(outcome for outcome in outcomes if outcome.fell is not None)
    assert found.fell in (*INVARIANTS, "B3", "B4", "B5", "B6"), found.what
    monkeypatch.undo()
    assert Fleet(found.scenario).run().fell is None, "it falls without the fault, too"


def test_a_job_finishes_at_another_lighthouse_of_a_list_than_the_first() -> None:
    outcome = Fleet(draw_copies(1056)).run()
    assert outcome.fell is None, describe(outcome)


def test_a_newcomer_is_announced_again_after_a_sum_that_was_made_again() -> None:
    """A newcomer that has lost its lighthouse waits for a moment before it asks once more."""
    outcome = Fleet(draw_copies(4100405)).run()
    assert outcome.fell is None, describe(outcome)


@pytest.mark.parametrize("seed", [388, 242])
def test_a_job_whose_copies_take_long_begins_from_an_older_one(seed: int) -> None:
    """Copies take 1.7 s in the mean. In one run a copy has been on its way for 4 s when all groups
    die; in the other one the workers of a group have copied no common step for 35 s."""
    outcome = Fleet(draw_copies(seed)).run()
    assert outcome.fell is None, describe(outcome)


def test_groups_that_have_waited_for_an_operator_begin_from_one_copy() -> None:
    """The first group to begin from a copy keeps no other from it, though it was in their quorum.

    All of them have begun anew while the holder was away.
    """
    outcome = Fleet(draw_copies(30323)).run()
    assert outcome.fell is None, describe(outcome)


@pytest.mark.parametrize(("seed", "num_groups"), [(20000, None), (0, 3), (7, 3)])
def test_workers_begin_from_copies(seed: int, num_groups: int | None) -> None:
    """One that has found no quorum begins its step again, and a copy is held; parts are held; a
    group begins beside others."""
    fleet = Fleet(draw_copies(seed, num_groups))
    outcome = fleet.run()
    assert outcome.fell is None, describe(outcome)
    assert fleet.shared.copies.num_begun > 0, "no worker has begun from a copy"
