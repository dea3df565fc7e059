"""Each planted fault in the rules of prepared spares (G1, G2, G4) is found by some seed (X3)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.test_planted import INVARIANTS, MAX_SEEDS, Plant
from tools.sim.explore import describe
from tools.sim.fleet import Fleet
from tools.sim.scenario import draw_spares
from torchft_svc.core.quorum.lighthouse.jobs import Job, Jobs
from torchft_svc.core.quorum.lighthouse.overview import History
from torchft_svc.core.quorum.lighthouse.prepared_spares import PreparedSpares


def a_spare_is_a_member_at_once(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Jobs, "holds_spare", lambda self, job_name, member: False)


def each_spare_takes_the_same_place(plant: pytest.MonkeyPatch) -> None:
    """The spares that have joined are not counted."""
    real = Job.num_free_places

    def num_free_places(self: Any) -> int:
        return real(self) + len(self.former_spares)

    plant.setattr(Job, "num_free_places", num_free_places)


def a_place_stays_free(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Jobs, "_fill_places", lambda self, job, now: None)


def a_silent_spare_takes_a_place(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(PreparedSpares, "_is_silent", lambda self, record, now: False)


def the_last_spare_comes_first(plant: pytest.MonkeyPatch) -> None:
    real = PreparedSpares.pop_next

    def pop_next(self: Any, now: float) -> Any:
        self._records = dict(reversed(self._records.items()))
        return real(self, now)

    plant.setattr(PreparedSpares, "pop_next", pop_next)


def spares_that_have_joined_count_as_places(plant: pytest.MonkeyPatch) -> None:
    def record_places(self: Any, quorum: Any) -> None:
        self.history.record_places(len(quorum.participants))

    plant.setattr(Job, "record_places", record_places)


def the_place_of_a_program_that_has_ended_is_taken(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(History, "end_place", lambda self: None)


def spares_take_the_job_back(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "is_for_spares_alone", lambda self, formed: False)


def spares_outlive_their_job(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Jobs, "_end_spares", lambda self, job, now: frozenset())


def a_spare_that_is_away_for_a_moment_outlives_its_job(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Job, "record_spare_away", lambda self, replica_id, until, now: None)


def spares_end_with_the_last_group_however_it_ends(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(History, "end", lambda self: True)


# Each with the first seed of the search, near the first one that finds it.
PLANTS: dict[Plant, int] = {
    a_spare_is_a_member_at_once: 0,
    each_spare_takes_the_same_place: 1,
    a_place_stays_free: 2,
    a_silent_spare_takes_a_place: 172,
    the_last_spare_comes_first: 2,
    spares_that_have_joined_count_as_places: 2,
    the_place_of_a_program_that_has_ended_is_taken: 3,
    spares_take_the_job_back: 31,
    spares_outlive_their_job: 3,
    a_spare_that_is_away_for_a_moment_outlives_its_job: 5160,
    spares_end_with_the_last_group_however_it_ends: 4,
}


@pytest.mark.parametrize(
    ("planted", "first"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS]
)
def test_it_is_found(planted: Plant, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    outcomes = (Fleet(draw_spares(seed, 3)).run() for seed in range(first, first + MAX_SEEDS))
    found = next(outcome for outcome in outcomes if outcome.fell is not None)
    assert found.fell in (*INVARIANTS, "G1", "G2", "G4"), found.what
    monkeypatch.undo()
    assert Fleet(found.scenario).run().fell is None, "it falls without the fault, too"


# What happens in runs that have fallen once, by their seeds.
RUNS_THAT_FELL = {
    5201018: "a group comes back, is no member, and waits for those that start; a spare gives its "
    "place back, and is no group of a job that is over",
    6300841: "the same",
    5200337: "the only member ends on purpose before a spare that took a place is in a quorum",
    7200078: "the session of a spare has broken when the job ends, which the lighthouse knows",
    7200602: "the same",
    7410299: "the job ends at another lighthouse of the list, and begins again at that of a spare",
    7500620: "a group has crashed while it was cut off, and its last sign of life comes after the "
    "next incarnation has asked: that one is refused, and forgotten without a report",
    7900168: "all have ended when a group's manager, which had died long before, would be replaced",
    8100826: "a group that is in no step of the last term is the first of a job that ends",
}


@pytest.mark.parametrize("seed", RUNS_THAT_FELL)
def test_runs_that_fell_once(seed: int) -> None:
    outcome = Fleet(draw_spares(seed)).run()
    assert outcome.fell is None, f"{RUNS_THAT_FELL[seed]}:\n{describe(outcome)}"
