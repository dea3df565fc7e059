"""Fleets with faults keep the invariants: a fixed set of seeds, as CI runs it."""

from __future__ import annotations

import dataclasses

import pytest
from click.testing import CliRunner

from tools.sim.__main__ import main
from tools.sim.explore import describe, run_seed, shrink
from tools.sim.fleet import Fleet
from tools.sim.scenario import (
    MEAN_COPY_S,
    Fault,
    draw,
    draw_long_terms,
    draw_ordinary,
    draw_steady,
)
from torchft_svc.core.quorum.lighthouse.membership import Membership

NUM_SEEDS = 40
NUM_MANY = 1000


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 10))
def test_small_fleets(first: int) -> None:
    for seed in range(first, first + 10):
        outcome = run_seed(seed)
        assert outcome.fell is None, describe(outcome)


def test_a_step_of_a_group_that_is_kept_out_may_be_repeated() -> None:
    """The group has committed the step alone, and a restarted lighthouse learns of that."""
    outcome = Fleet(draw_steady(2044, 3)).run()
    assert outcome.fell is None, describe(outcome)


@pytest.mark.parametrize("seed", [1795454312655, 88000001207])
def test_groups_that_end_without_a_quorum_meet_when_they_ask_for_long(seed: int) -> None:
    outcome = Fleet(draw_ordinary(seed)).run()
    assert outcome.fell is None, describe(outcome)


@pytest.mark.parametrize(
    "seed",
    [
        1795454312521,
        77000000332,
        77000000656,
        77000002519,
        88000002308,
        1795467220970,
        1795469485628,
        1795471214663,
        1795475450334,
        1795475456064,
        1795573166467,
        1795573166811,
        1795573167877,
        1795577538882,
        1795577541382,
        1795580897170,
        1795581476686,
        1795582889946,
        1795583301615,
        1795599580858,
        1795600241691,
    ],
)
def test_runs_that_fell_once(seed: int) -> None:
    """A late heartbeat follows a leave; a drain is sent while streams are broken; beats are rarer
    than the join timeout is long; a cut begins while messages are on their way; a lighthouse that
    does not lead any more is called; a member is lost while a stream is broken and gets the answer
    again; one that was no member beats late; an operator goes back three times, as two groups turn
    out one after the other to have no whole state; a worker of a short life never came;
    newcomers begin anew at a leader whose clock is behind, before members of a newer quorum come
    back; workers were a step ahead of their groups before a quorum; a newcomer is the first at a
    lighthouse that is back, while the other one of the list leads no more; a newcomer goes on to
    the next lighthouse of a list at the same moment as the members; news of an earlier term come
    while a group asks; of a life of a group only one rank was let in;
    a worker has not noticed at the end that its stream has ended; workers of two lives ask
    together, and the group restarts once more; a lighthouse dies just when a group moves back to
    it; a worker goes on without its last update, as its manager dies before the other is sent it;
    operators command a lighthouse that stands still; a frozen group reads an old answer
    while it leaves."""
    outcome = Fleet(draw_ordinary(seed)).run()
    assert outcome.fell is None, describe(outcome)


@pytest.mark.parametrize("seed", [665, 690])
def test_a_job_that_has_split_is_one_again(seed: int) -> None:
    """A newcomer is the first at a restarted lighthouse, which is restarted again. The others learn
    of it, also one whose session begins just then."""
    outcome = Fleet(draw_long_terms(seed, 3)).run()
    assert outcome.fell is None, describe(outcome)


def test_a_group_that_missed_the_quorum_that_it_should_have_healed_in_heals_in_the_next() -> None:
    """The group was at the step of a newcomer that has begun anew at a restarted lighthouse."""
    outcome = Fleet(draw_ordinary(99000001591)).run()
    assert outcome.fell is None, describe(outcome)


def test_a_worker_that_fetches_a_preview_does_not_wait_in_the_quorum() -> None:
    """Workers that have asked in vain wait for one that fetches, in a collective of the group.

    That one asks when it is done, learns that the question has failed, and comes, too.
    """
    drawn = draw_ordinary(20036)  # groups that begin from a checkpoint fetch a preview
    calm = dataclasses.replace(
        drawn, seed=22, num_groups=4, num_jobs=1, group_world_size=2, save_every=5, faults=()
    )
    outcome = Fleet(calm).run()
    assert outcome.fell is None, describe(outcome)


def test_a_group_does_not_hang_while_one_of_its_workers_fetches_a_preview() -> None:
    """The other one has asked in vain, and waits in a collective of the group for long."""
    outcome = Fleet(draw(6401797)).run()
    assert outcome.fell is None, describe(outcome)


@pytest.mark.parametrize("seed", [6301686, 6300256, 1795660698601])
def test_a_worker_asks_for_a_manager_while_a_peer_waits_in_a_collective(seed: int) -> None:
    """The manager dies when one of its workers has the quorum, and comes back after 7 s.

    The question of the other one fails after 5 s (rule M3), later than a group may be locked.
    """
    outcome = Fleet(draw(seed)).run()
    assert outcome.fell is None, describe(outcome)


def test_a_group_whose_manager_dies_when_the_others_ask_loses_its_step() -> None:
    """The others have committed it, as the last one before a newcomer joins, and wait for nobody
    whose session has ended (rule E7)."""
    outcome = Fleet(draw(7310119)).run()
    assert outcome.fell is None, describe(outcome)


def test_a_launcher_ends_workers_that_no_manager_has_drained() -> None:
    """One worker gets a signal while its manager is away for 7 s, and ends without it."""
    outcome = Fleet(draw(7301267)).run()
    assert outcome.fell is None, describe(outcome)


def test_a_thousand_groups() -> None:
    outcome = Fleet(draw_ordinary(1, NUM_MANY)).run()
    assert outcome.fell is None, describe(outcome)
    assert outcome.num_commits >= NUM_MANY


def test_a_seed_is_one_and_the_same_run() -> None:
    first, again = (Fleet(draw(7)).run() for _ in range(2))
    assert first == again
    assert first.num_commits > 0


def test_the_story_of_a_fall_is_short_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Membership, "dead", lambda self, now: [])
    monkeypatch.setattr(Membership, "next_death", lambda self: None)
    fallen = next(
        outcome for seed in range(60) if (outcome := Fleet(draw(seed)).run()).fell is not None
    )
    small = shrink(fallen, max_runs=60)
    assert small.fell == fallen.fell
    assert len(small.scenario.faults) <= len(fallen.scenario.faults)
    again = Fleet(small.scenario).run()
    assert (again.fell, again.what) == (small.fell, small.what)
    monkeypatch.undo()
    assert Fleet(small.scenario).run().fell is None
    assert f"--seed {small.scenario.seed}" in describe(small)


def test_a_run_depends_on_its_faults_alone() -> None:
    """Chance decides nothing but moments in a calm run: everybody trains from the first step."""
    calm = dataclasses.replace(draw_ordinary(3), faults=())
    outcome = Fleet(calm).run()
    assert outcome.fell is None
    assert outcome.num_commits > 0


def test_a_drain_costs_nobody_a_step() -> None:
    """The group ends between two steps, and its peers are informed in time."""
    for seed in range(3):
        drawn = draw_ordinary(seed, num_groups=4)
        rules = dataclasses.replace(
            drawn.trainer,
            min_replica_size=1,
            shrink_only_rate=0.0,
            mean_copy_s=MEAN_COPY_S,  # a heal that comes too late is discarded
        )
        config = dataclasses.replace(drawn.config, min_replicas=1)
        drains = tuple(
            Fault(at=12.0 + 3 * each, kind="drain", target=each, seconds=1.0, value=each % 2)
            for each in range(3)
        )
        calm = dataclasses.replace(drawn, trainer=rules, config=config, requested_min_replicas=0)
        outcome = Fleet(dataclasses.replace(calm, faults=drains)).run()
        assert outcome.fell is None, describe(outcome)
        assert outcome.num_discards == 0, "\n".join(outcome.trace)
        assert sum("leaves: " in line for line in outcome.trace) >= 3


def test_the_command_counts_what_it_has_seen() -> None:
    result = CliRunner().invoke(main, ["--seed", "0", "--count", "2", "--processes", "1"])
    assert result.exit_code == 0, result.output
    assert "2 seeds" in result.output
