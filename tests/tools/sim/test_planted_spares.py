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


@pytest.mark.parametrize("seed", [5201018, 6300841])
def test_a_spare_that_gives_its_place_back_is_no_group_of_a_job_that_is_over(seed: int) -> None:
    """A group that comes back is no member then: it waits for those that start, and spares wait."""
    outcome = Fleet(draw_spares(seed)).run()
    assert outcome.fell is None, describe(outcome)


def test_a_spare_ends_with_its_job_just_after_it_has_taken_a_place() -> None:
    """The only member of the last quorum ends on purpose before the spare is in a quorum."""
    outcome = Fleet(draw_spares(5200337)).run()
    assert outcome.fell is None, describe(outcome)


@pytest.mark.parametrize("seed", [7200078, 7200602])
def test_a_spare_ends_with_its_job_if_its_session_has_just_broken(seed: int) -> None:
    """The lighthouse knows that, and the spare is back some milliseconds after the end."""
    outcome = Fleet(draw_spares(seed)).run()
    assert outcome.fell is None, describe(outcome)


def test_a_spare_at_a_lighthouse_where_the_job_has_not_finished_stands_by() -> None:
    """The job has finished at another lighthouse of the list, and begins again at this one."""
    outcome = Fleet(draw_spares(7410299)).run()
    assert outcome.fell is None, describe(outcome)


def test_a_spare_ends_with_its_job_after_a_group_was_refused_because_its_name_was_taken() -> None:
    """A group has crashed while it was cut off, and its last sign of life comes after the next
    incarnation has asked: that one is refused, and the lighthouse forgets it without a report."""
    outcome = Fleet(draw_spares(7500620)).run()
    assert outcome.fell is None, describe(outcome)
