"""Tests of what a worker's time is spent on: each second counts once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_svc.core.quorum.tally import StepTimes, Tally
from torchft_svc.core.quorum.worker.time_use import (
    NUM_WARM_UP_STEPS,
    Recovery,
    RoundWork,
    TimeUse,
)


def tally(use: TimeUse, now: float) -> Tally:
    found = use.tally(now)
    assert found is not None
    return found


def test_committed_and_discarded_steps() -> None:
    use = TimeUse()
    use.begin_step(10.0)
    assert use.tally(11.0) is None, "no step is over"
    assert use.end_committed(12.0, 7) == Recovery(None, 0.0, None)
    use.begin_step(12.5)
    assert use.end_committed(14.0, 7) is None, "the same quorum"
    assert use.end_discarded(15.0) == 1.0
    assert tally(use, 15.5) == Tally(
        committed_s=4.0, discarded_s=1.0, num_committed=2, num_discarded=1, ago_s=0.5
    )


def test_what_the_program_stood_still_for_is_what_the_round_did_meanwhile() -> None:
    use = TimeUse()
    use.begin_step(0.0)
    use.begin_round()
    use.change_work(RoundWork.WAITING, 0.0)
    use.change_work(RoundWork.RECONFIGURING, 2.0)
    use.change_work(RoundWork.HEALING, 2.5)
    use.change_work(None, 4.0)
    use.stood_still(1.0, 4.25)  # the forward pass had gone on for a second
    recovery = use.end_committed(6.0, 7)
    assert recovery == Recovery(None, 0.5, 1.5)
    found = tally(use, 6.0)
    assert (found.waiting_s, found.reconfiguring_s, found.healing_s) == (1.25, 0.5, 1.5)
    assert found.committed_s == 2.75
    assert found.total_s == 6.0


def test_a_step_that_is_summed_again_has_waited_beyond_a_usual_step() -> None:
    use = TimeUse()
    use.begin_step(0.0)
    for now in (1.0, 2.0, 3.0):
        use.end_committed(now, 7)
    use.sum_again(9.0)
    recovery = use.end_committed(9.5, 8)
    assert recovery == Recovery(paused_s=5.5, reconfigured_s=0.0, healed_s=None)
    found = tally(use, 9.5)
    assert (found.committed_s, found.waiting_s, found.reconfiguring_s) == (4.0, 5.0, 0.5)


def test_a_pause_counts_from_the_last_commit() -> None:
    use = TimeUse()
    use.begin_step(0.0)
    use.end_committed(1.0, 7)
    use.end_committed(2.0, 7)
    use.end_discarded(5.0)
    recovery = use.end_committed(6.0, 8)
    assert recovery is not None
    assert recovery.paused_s == pytest.approx(3.0)


def test_a_wait_for_the_same_quorum_is_a_part_of_the_step() -> None:
    use = TimeUse()
    use.begin_step(0.0)
    use.end_committed(1.0, 7, 1)
    use.begin_round()
    use.change_work(RoundWork.WAITING, 1.0)
    use.stood_still(1.0, 2.0)
    assert use.end_committed(3.0, 7, 2) is None
    assert (tally(use, 3.0).committed_s, tally(use, 3.0).waiting_s) == (3.0, 0.0)


def test_a_wait_for_another_quorum_counts_beyond_a_usual_step() -> None:
    use = TimeUse()
    use.begin_step(0.0)
    use.end_committed(1.0, 7, 1)
    for step in (2, 3):  # each waits for its quorum for half of its time
        use.begin_round()
        use.change_work(RoundWork.WAITING, step - 1.0)
        use.stood_still(step - 1.0, step - 0.5)
        use.end_committed(float(step), 7, step)
    use.begin_round()
    use.change_work(RoundWork.WAITING, 3.0)
    use.change_work(RoundWork.RECONFIGURING, 4.0)
    use.change_work(None, 4.25)
    use.stood_still(3.0, 4.25)
    use.end_committed(4.75, 8, 4)
    found = tally(use, 4.75)
    assert (found.committed_s, found.waiting_s, found.reconfiguring_s) == (4.0, 0.5, 0.25)


def test_steps_that_the_others_commit_while_a_group_is_away_are_of_use() -> None:
    use = TimeUse()
    use.begin_step(0.0)
    for step in (1, 2, 3):
        use.end_committed(float(step), 7, step)
    use.end_discarded(11.0)  # it was frozen
    use.stood_still(11.0, 12.0)
    use.end_committed(13.0, 9, 9)  # after it has healed to step 8
    found = tally(use, 13.0)
    assert (found.committed_s, found.num_committed) == (9.0, 4), "5 steps of the others"
    assert found.discarded_s + found.waiting_s == 4.0
    assert found.total_s == 13.0


def test_a_step_in_which_all_stood_still_makes_no_later_one_longer() -> None:
    """A group is frozen right after a step of 5 s; the others commit 50 steps of 0.1 s without it,
    and have waited for it for 5 s."""
    use, now = TimeUse(), 0.0
    use.begin_step(now)
    for step in range(1, 41):
        now += 5.0 if step == 40 else 0.1
        use.end_committed(now, 7, step)
    use.stood_still(now, now + 10.0)
    now += 10.1
    use.end_committed(now, 9, 91)
    found = tally(use, now)
    assert found.committed_s == pytest.approx(3.9 + 5.0 + 5.0 + 0.1)
    assert found.waiting_s == pytest.approx(5.0)


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 5.0),
            st.sampled_from(["wait", "work", "again", "commit", "discard", "round"]),
            st.sampled_from([*RoundWork, None]),
            st.floats(0.0, 1.0),
        ),
        max_size=40,
    )
)
def test_n6_each_second_counts_once(
    inputs: list[tuple[float, str, RoundWork | None, float]],
) -> None:
    use, now, still_until, ended_at, step, quorum_id = TimeUse(), 100.0, 100.0, None, 0, 7
    use.begin_step(now)
    for pause_s, what, work, share in inputs:
        now += pause_s
        if what == "wait":
            since = still_until + (now - still_until) * share
            use.stood_still(since, now)
            still_until = now
        elif what == "work":
            use.change_work(work, now)
        elif what == "round":
            use.change_work(None, now)
            use.begin_round()
        elif what == "again":
            use.sum_again(now)
        else:
            step += 1 if share < 0.5 else 7
            quorum_id += work is None
            use.end_committed(now, quorum_id, step) if what == "commit" else use.end_discarded(now)
            still_until = ended_at = now
    if ended_at is not None:
        found = tally(use, now)
        assert found.total_s == pytest.approx(ended_at - 100.0, abs=1e-6)
        assert found.ago_s == pytest.approx(now - ended_at, abs=1e-6)


def steps(use: TimeUse, since: float, num: int, train_s: float = 0.5) -> float:
    """Commit steps, each with a wait of a quarter of a second for sums; returns when they end."""
    for _ in range(num):
        use.begin_step(since)
        use.record_wait(0.25)
        since += train_s + 0.25
        use.end_committed(since, 7)
        since += 0.125
        use.end_update(since)
        since += 0.0625
    return since


def test_n9_the_phases_of_a_step_do_not_contain_waits() -> None:
    use = TimeUse()
    now = steps(use, 0.0, 1 + NUM_WARM_UP_STEPS, train_s=8.0)
    assert tally(use, now).step_times is None, "the first steps compile"
    now = steps(use, now, 2)
    expected = StepTimes(0.5, 0.125, 0.0625, 0.25, num_steps=2, load=1.0)
    assert tally(use, now).step_times == expected
    assert (expected.own_s, expected.step_s) == (0.6875, 0.9375)


def test_n9_waits_between_steps_and_for_the_quorum_are_not_own_work() -> None:
    use = TimeUse()
    now = steps(use, 0.0, 2 + NUM_WARM_UP_STEPS)
    use.record_wait(0.5)  # for a reduction between the steps
    now += 0.5
    use.begin_step(now)
    use.stood_still(now, now + 1.0)
    use.end_committed(now + 1.5, 7)
    times = tally(use, now + 1.5).step_times
    assert times is not None
    assert (times.training_s, times.updating_s, times.between_s) == (0.5, 0.125, 0.0625)
    assert times.waiting_s > 0.25


def test_n9_the_load_is_a_mean_over_the_same_steps_as_the_times() -> None:
    use = TimeUse()
    now = steps(use, 0.0, 1 + NUM_WARM_UP_STEPS)
    for train_s, load in ((1.0, 2.0), (0.5, 1.0), (1.5, 3.0)):
        use.begin_step(now)
        use.record_load(load)
        now += train_s
        use.end_committed(now, 7)
    times = tally(use, now).step_times
    assert times is not None
    assert (times.num_steps, times.load) == (3, pytest.approx(2.0, rel=0.2))
    assert times.training_s / times.load == pytest.approx(0.5)
    now = steps(use, now, 40)
    times = tally(use, now).step_times
    assert times is not None
    assert times.load == pytest.approx(1.0, rel=0.01), "a step without a loader is an even share"


def test_n9_a_step_in_another_quorum_says_nothing_of_the_group() -> None:
    use = TimeUse()
    now = steps(use, 0.0, 3 + NUM_WARM_UP_STEPS)
    before = tally(use, now).step_times
    use.begin_step(now)
    use.end_committed(now + 60.0, 8)
    assert tally(use, now + 60.0).step_times == before


def test_n9_the_mean_follows_within_seconds() -> None:
    use = TimeUse()
    now = steps(use, 0.0, 20)
    steps(use, now, 40, train_s=1.5)
    times = tally(use, now + 100.0).step_times
    assert times is not None
    assert times.training_s == pytest.approx(1.5, rel=0.01)
