"""Tests of a job's accounts: the parts sum to the wall time, whatever is reported when."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core.scenes import JOB, config, formed

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.goodput import CAUSES, TimeAccounts
from torchft_svc.core.quorum.lighthouse.incidents import Goodput
from torchft_svc.core.quorum.tally import EventKind, GroupEvent, Tally
from torchft_svc.errors import RequestRefused


def check_sums(goodput: Goodput, wall_s: float | None = None) -> None:
    parts = [goodput.committed_s, *goodput.lost_s.values()]
    assert all(each >= 0 for each in parts)
    assert math.isclose(sum(parts), goodput.wall_s, rel_tol=1e-9, abs_tol=1e-6)
    assert 0 <= goodput.ratio <= 1
    assert set(goodput.lost_s) == set(CAUSES)
    if wall_s is not None:
        assert math.isclose(goodput.wall_s, wall_s, rel_tol=1e-9, abs_tol=1e-6)


def lost(goodput: Goodput) -> dict[str, float]:
    return {cause: seconds for cause, seconds in goodput.lost_s.items() if seconds}


def test_n6_before_the_first_quorum_all_time_is_startup() -> None:
    accounts = TimeAccounts(100.0)
    assert accounts.goodput(104.0) == Goodput(
        wall_s=4.0, lost_s={**dict.fromkeys(CAUSES, 0.0), "startup": 4.0}
    )
    accounts.record_quorum({"a"}, 104.0)
    accounts.record_tally("a", Tally(committed_s=6.0, waiting_s=4.0, num_committed=3), 110.0)
    goodput = accounts.goodput(110.0)
    check_sums(goodput, 10.0)
    assert lost(goodput)["startup"] == 4.0


def test_n6_what_the_reference_reports_is_added() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a", "b"}, 0.0)
    accounts.record_tally("a", Tally(committed_s=4.0, num_committed=4), 4.0)
    accounts.record_tally("b", Tally(committed_s=1.0, healing_s=3.0, num_committed=1), 4.0)
    then = Tally(4.0, 1.0, 2.0, 0.5, 0.0, 0.0, 4, 1)
    accounts.record_tally("a", then, 7.5)
    goodput = accounts.goodput(7.5)
    check_sums(goodput, 7.5)
    assert goodput.committed_s == 4.0
    assert lost(goodput) == {"discarded": 1.0, "waiting": 2.0, "reconfiguring": 0.5}


def test_n6_another_reference_follows_and_no_time_counts_twice() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a", "b"}, 0.0)
    for replica_id in ("a", "b"):
        accounts.record_tally(replica_id, Tally(committed_s=4.0, num_committed=4), 4.0)
    accounts.record_tally("a", Tally(committed_s=6.0, num_committed=6), 6.0)
    accounts.forget_group("a")
    accounts.record_tally("b", Tally(committed_s=8.0, num_committed=8), 8.0)
    goodput = accounts.goodput(8.0)
    check_sums(goodput, 8.0)
    assert goodput.committed_s == 8.0


def test_n6_steps_between_the_last_tallies_of_two_references_count() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a", "b"}, 0.0)
    for replica_id in ("a", "b"):
        accounts.record_tally(replica_id, Tally(committed_s=4.0, num_committed=4), 4.0)
    for num in range(5, 11):  # the manager of "a" is dead, and its workers continue
        accounts.record_tally("b", Tally(committed_s=num, num_committed=num), num)
    accounts.forget_group("a")
    accounts.record_tally("b", Tally(committed_s=11.0, num_committed=11), 11.0)
    goodput = accounts.goodput(11.0)
    check_sums(goodput, 11.0)
    assert (goodput.committed_s, lost(goodput)) == (11.0, {})


def test_n6_a_loss_is_found_in_the_tallies_of_a_member_that_is_always_a_little_ahead() -> None:
    accounts, ahead_s = TimeAccounts(0.0), 1 / 64
    accounts.record_quorum({"a", "b"}, 0.0)
    accounts.record_tally("a", Tally(committed_s=1.0, num_committed=1), 1.0)
    for num in range(2, 101):
        accounts.record_tally("b", Tally(num + ahead_s, num_committed=num), num + ahead_s)
        accounts.record_tally("a", Tally(committed_s=num, num_committed=num), num)
    accounts.forget_group("a")
    after = Tally(101 + ahead_s, waiting_s=3.0, num_committed=101)
    accounts.record_tally("b", after, 104 + ahead_s)
    goodput = accounts.goodput(104 + ahead_s)
    check_sums(goodput, 104 + ahead_s)
    assert (goodput.committed_s, lost(goodput)) == (101.0, {"waiting": 3.0 + ahead_s})


def test_n6_a_reference_that_is_silent_while_others_train_is_replaced() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a", "b"}, 0.0)
    for replica_id in ("a", "b"):
        accounts.record_tally(replica_id, Tally(committed_s=4.0, num_committed=4), 4.0)
    for num in range(5, 21):
        accounts.record_tally("b", Tally(committed_s=num, num_committed=num), num)
    goodput = accounts.goodput(20.0)
    check_sums(goodput, 20.0)
    assert (goodput.committed_s, lost(goodput)) == (20.0, {})
    accounts.record_tally("a", Tally(committed_s=21.0, num_committed=21), 21.0)
    accounts.record_tally("b", Tally(committed_s=21.0, num_committed=21), 21.0)
    assert accounts.goodput(21.0).committed_s == 21.0


def test_n6_the_counters_of_a_new_process_begin_again() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    accounts.record_tally("a", Tally(committed_s=20.0, num_committed=20), 20.0)
    accounts.record_tally("a", Tally(committed_s=1.0, waiting_s=2.0, num_committed=1), 23.0)
    accounts.record_tally("a", Tally(committed_s=3.0, waiting_s=2.0, num_committed=3), 25.0)
    goodput = accounts.goodput(25.0)
    check_sums(goodput, 25.0)
    assert (goodput.committed_s, lost(goodput)) == (23.0, {"waiting": 2.0})


def test_n6_a_group_that_heals_is_no_reference() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    accounts.record_tally("b", Tally(healing_s=2.0), 2.0)
    accounts.record_tally("a", Tally(committed_s=4.0, num_committed=4), 4.0)
    assert lost(accounts.goodput(4.0)) == {}


def test_n6_steps_that_the_job_goes_back_behind_were_in_vain() -> None:
    accounts = TimeAccounts(0.0)
    accounts.give_up(5)  # nobody knows how long they took
    accounts.record_quorum({"a"}, 0.0)
    accounts.record_tally("a", Tally(committed_s=8.0, waiting_s=2.0, num_committed=4), 10.0)
    accounts.give_up(3)
    goodput = accounts.goodput(10.0)
    check_sums(goodput, 10.0)
    assert (goodput.committed_s, lost(goodput)) == (2.0, {"waiting": 2.0, "discarded": 6.0})
    accounts.give_up(100)
    assert accounts.goodput(10.0).committed_s == 0.0


def test_n6_steps_given_up_count_as_long_as_those_took_that_are_lost() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    for num in range(1, 101):
        accounts.record_tally("a", Tally(committed_s=num / 10, num_committed=num), num / 10)
    accounts.record_tally("b", Tally(committed_s=8.0, waiting_s=2.0, num_committed=4), 10.0)
    accounts.forget_group("a")
    accounts.give_up(20)  # "b" goes on, whose few steps were slow
    goodput = accounts.goodput(10.0)
    check_sums(goodput, 10.0)
    assert lost(goodput) == {"discarded": pytest.approx(2.0)}
    accounts.give_up(5)
    assert lost(accounts.goodput(10.0)) == {"discarded": pytest.approx(2.5)}


def test_n6_steps_before_the_last_reports_are_given_up_by_their_mean() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    for num in range(1, 1001):
        long_s = num + max(0, num - 100)  # the first hundred take half as long as the others
        accounts.record_tally("a", Tally(committed_s=long_s, num_committed=num), long_s)
    accounts.give_up(900)
    goodput = accounts.goodput(1900.0)
    check_sums(goodput, 1900.0)
    assert 100.0 < goodput.committed_s < 200.0


def test_n6_a_new_lighthouse_gives_up_steps_before_its_start_by_their_mean() -> None:
    accounts = TimeAccounts(100.0)
    accounts.record_tally("a", Tally(committed_s=80.0, waiting_s=21.0, num_committed=40), 101.0)
    accounts.record_tally("a", Tally(committed_s=83.0, waiting_s=21.0, num_committed=43), 104.0)
    accounts.give_up(4)  # three of one second, and one of two
    goodput = accounts.goodput(104.0)
    check_sums(goodput, 104.0)
    assert (goodput.committed_s, lost(goodput)) == (78.0, {"waiting": 21.0, "discarded": 5.0})


def test_n6_what_is_lost_to_a_hang_is_blamed_on_it() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    accounts.record_tally("a", Tally(committed_s=4.0, num_committed=4), 4.0)
    accounts.blame_hang("b")
    assert lost(accounts.goodput(10.0, hangs=True)) == {"hang": 6.0}
    accounts.record_quorum({"a"}, 10.0)
    after = Tally(4.0, 5.0, 1.0, num_committed=4, num_discarded=1)
    accounts.record_tally("a", after, 10.0)
    assert lost(accounts.goodput(10.0)) == {"hang": 6.0}
    accounts.record_tally("a", Tally(4.0, 5.5, 1.0, num_committed=4, num_discarded=2), 10.5)
    assert lost(accounts.goodput(10.5)) == {"hang": 6.0, "discarded": 0.5}


def hung(*replica_ids: str) -> TimeAccounts:
    """Accounts with two seconds that were lost to hangs of these groups."""
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    accounts.record_tally("a", Tally(committed_s=4.0, num_committed=4), 4.0)
    for replica_id in replica_ids:
        accounts.blame_hang(replica_id)
    accounts.record_quorum({"a"}, 6.0)
    accounts.record_tally("a", Tally(4.0, 0.5, 1.5, num_committed=4, num_discarded=1), 6.0)
    accounts.record_tally("a", Tally(6.0, 0.5, 1.5, num_committed=6, num_discarded=1), 8.0)
    assert lost(accounts.goodput(8.0)) == {"hang": 2.0}
    return accounts


def test_n2_nothing_is_lost_to_the_hang_of_a_group_that_was_lost() -> None:
    accounts = hung("b")
    accounts.exonerate("c")
    assert lost(accounts.goodput(8.0)) == {"hang": 2.0}
    for _ in range(2):
        accounts.exonerate("b")
        check_sums(accounts.goodput(8.0), 8.0)
        assert lost(accounts.goodput(8.0)) == {"discarded": 0.5, "waiting": 1.5}
    accounts.record_tally("a", Tally(6.0, 0.5, 3.5, num_committed=6, num_discarded=1), 10.0)
    assert lost(accounts.goodput(10.0)) == {"discarded": 0.5, "waiting": 3.5}


def test_n2_what_another_group_hung_for_stays_lost_to_that() -> None:
    accounts = hung("b", "c")
    accounts.exonerate("b")
    assert lost(accounts.goodput(8.0)) == {"hang": 2.0}
    accounts.exonerate("c")
    assert lost(accounts.goodput(8.0)) == {"discarded": 0.5, "waiting": 1.5}


def test_n2_an_earlier_hang_stays_one_when_another_group_was_lost() -> None:
    accounts = hung("b")
    accounts.blame_hang("c")
    accounts.record_tally("a", Tally(6.0, 0.5, 2.5, num_committed=6, num_discarded=1), 9.0)
    assert lost(accounts.goodput(9.0)) == {"hang": 3.0}
    accounts.exonerate("c")
    assert lost(accounts.goodput(9.0)) == {"hang": 2.0, "waiting": 1.0}


def test_n2_a_hang_that_has_ended_stays_one_when_its_group_is_lost_later() -> None:
    settings = config(hang_timeout_s=6.0, heartbeat_timeout_s=8.0)
    scene = formed("a:1", "b:1", step=4, settings=settings)

    def account(committed: int, waiting_s: float) -> None:
        tally = Tally(float(committed), waiting_s=waiting_s, num_committed=committed)
        scene.jobs.record_report(JOB, "a:1", tally, (), scene.now)

    account(4, 0.0)
    hangs_at = scene.now
    for for_s in (4.0, 8.0, 12.0):  # it beats, so it is not lost
        scene.until(hangs_at + for_s)
        scene.report("b:1", Phase.TRAINING, step=4, for_s=for_s)
        scene.report("a:1", Phase.QUORUM, step=4, for_s=for_s)
    account(4, 12.0)
    assert lost(scene.jobs.goodput(JOB, scene.now)) == {"hang": 12.0}
    scene.until(scene.now + 1.0)
    for replica_id in ("a:1", "b:1"):
        scene.report(replica_id, Phase.TRAINING, step=5)
    account(5, 12.0)
    falls_silent_at = scene.now
    for for_s in (3.0, 6.0, 9.0):
        scene.until(falls_silent_at + for_s)
        scene.report("a:1", Phase.QUORUM, step=5, for_s=for_s)
    account(5, 21.0)
    assert lost(scene.jobs.goodput(JOB, scene.now)) == {"hang": 12.0, "waiting": 9.0}


@pytest.mark.parametrize("later", ["lost", "its manager had died", "cut off"])
def test_n2_the_ledger_and_the_goodput_agree_on_what_a_hang_was(later: str) -> None:
    """A group stands still in a step that its peer waits for, and the reason turns out later."""
    settings = config(hang_timeout_s=6.0, heartbeat_timeout_s=8.0)
    scene = formed("a:1", "b:1", step=4, settings=settings)
    scene.report("b:1", Phase.TRAINING, step=4)
    scene.jobs.record_report(JOB, "a:1", Tally(committed_s=4.0, num_committed=4), (), scene.now)
    scene.until(107.0)
    scene.report("a:1", Phase.QUORUM, step=4, for_s=6.0)
    waited = Tally(4.0, waiting_s=6.0, num_committed=4)
    scene.jobs.record_report(JOB, "a:1", waited, (), scene.now)
    assert lost(scene.jobs.goodput(JOB, scene.now))["hang"] >= 6.0
    if later == "lost":
        scene.until(109.0)
    else:
        is_dead = later == "its manager had died"
        kind = EventKind.MANAGER_DIED if is_dead else EventKind.LIGHTHOUSE_AWAY
        lasts_s = 0.0 if is_dead else 6.0
        why = GroupEvent(kind=kind, source="s", number=1, ago_s=6.0 - lasts_s, lasts_s=lasts_s)
        scene.jobs.record_report(JOB, "b:1", None, [why], scene.now)
        scene.report("b:1", Phase.VOTING, step=4)
    shown = [each.kind.value for each in scene.jobs.incidents(JOB)]
    assert not {"hung", "evicted"} & set(shown), shown
    assert "hang" not in lost(scene.jobs.goodput(JOB, scene.now))
    assert lost(scene.jobs.goodput(JOB, scene.now))["waiting"] == 6.0


def test_n6_a_job_that_was_cut_off_has_trained_on() -> None:
    """No group reaches the lighthouse for six seconds, and it takes all of them for lost."""
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a", "b"}, 0.0)
    for replica_id in ("a", "b"):
        accounts.record_tally(replica_id, Tally(committed_s=4.0, num_committed=4), 4.0)
    accounts.forget_group("a")
    accounts.end(6.0)
    assert lost(accounts.goodput(9.0)) == {"other": 2.0}
    accounts.begin_again(10.0)
    assert lost(accounts.goodput(10.0)) == {"other": 2.0, "waiting": 4.0}
    accounts.record_tally("a", Tally(9.5, waiting_s=0.5, num_committed=9), 10.0)
    goodput = accounts.goodput(10.0)
    check_sums(goodput, 10.0)
    assert (goodput.committed_s, lost(goodput)) == (9.5, {"waiting": 0.5})


def test_n6_a_job_whose_groups_had_died_has_waited() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    accounts.record_tally("a", Tally(committed_s=4.0, num_committed=4), 4.0)
    for back_at in (10.0, 14.0):  # the first time it comes and goes without a step
        accounts.end(back_at - 4.0)
        accounts.begin_again(back_at)
    accounts.record_tally("c", Tally(committed_s=1.0, num_committed=1), 15.0)
    goodput = accounts.goodput(15.0)
    check_sums(goodput, 15.0)
    assert (goodput.committed_s, lost(goodput)) == (5.0, {"other": 2.0, "waiting": 8.0})


def test_n6_of_the_wait_the_time_without_a_lighthouse_has_its_own_cause() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    accounts.record_tally("a", Tally(committed_s=4.0, num_committed=4), 4.0)
    accounts.record_tally("a", Tally(4.0, 0.0, 3.0, away_s=2.0, num_committed=4), 7.0)
    assert lost(accounts.goodput(7.0)) == {"waiting": 1.0, "lighthouse_away": 2.0}


def test_n6_a_step_under_way_counts_as_committed_but_not_for_long() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    accounts.record_tally("a", Tally(committed_s=8.0, num_committed=4), 8.0)
    assert accounts.goodput(11.0).ratio == 1.0
    goodput = accounts.goodput(18.0)
    check_sums(goodput, 18.0)
    assert (goodput.committed_s, lost(goodput)) == (12.0, {"other": 6.0})


def test_n5_a_new_lighthouse_begins_with_the_oldest_group() -> None:
    accounts = TimeAccounts(100.0)
    accounts.record_tally("young", Tally(committed_s=5.0, num_committed=5), 101.0)
    accounts.record_tally("old", Tally(30.0, 2.0, 8.0, num_committed=30), 101.0)
    goodput = accounts.goodput(101.0)
    check_sums(goodput, 40.0)
    assert (goodput.committed_s, lost(goodput)) == (30.0, {"discarded": 2.0, "waiting": 8.0})


def test_n5_of_two_groups_as_old_the_one_that_was_in_more_steps_counts() -> None:
    accounts = TimeAccounts(100.0)
    accounts.record_tally("frozen", Tally(20.0, 20.0, num_committed=20), 101.0)
    accounts.record_tally("other", Tally(30.0, 2.0, 8.0, num_committed=30), 101.25)
    accounts.record_tally("frozen", Tally(21.0, 20.0, num_committed=21), 102.0)
    goodput = accounts.goodput(101.25)
    check_sums(goodput, 40.0)
    assert (goodput.committed_s, lost(goodput)) == (30.0, {"discarded": 2.0, "waiting": 8.0})


def test_the_time_of_a_job_that_has_ended_stands_still() -> None:
    scene = formed("a:1", step=4)
    scene.now = 104.0
    tally = Tally(committed_s=4.0, num_committed=4)
    scene.jobs.record_report(JOB, "a:1", tally, (), scene.now)
    scene.leave("a:1")
    before = scene.jobs.goodput(JOB, scene.now)
    check_sums(before, 4.0)
    assert scene.jobs.goodput(JOB, 200.0) == before
    scene.now = 114.0
    scene.beat("a:2")
    assert lost(scene.jobs.goodput(JOB, scene.now))["waiting"] == 10.0


def test_groups_that_report_nothing_leave_the_time_unknown() -> None:
    scene = formed("a:1", "b:1", step=4)
    scene.now = 130.0
    goodput = scene.jobs.goodput(JOB, scene.now)
    check_sums(goodput, 30.0)
    assert lost(goodput) == {"other": 30.0}
    scene.ask("a:1", step=5)
    assert "waiting" in lost(scene.jobs.goodput(JOB, scene.now))


def test_a_hang_is_shown_while_it_lasts() -> None:
    scene = formed("a:1", "b:1", step=4, settings=config(hang_timeout_s=5.0))
    scene.report("a:1", Phase.TRAINING, step=4)
    scene.until(130.0)
    assert lost(scene.jobs.goodput(JOB, scene.now)) == {"hang": 30.0}


GROUPS = st.sampled_from("abc")
SECONDS = st.floats(0.0, 50.0)
TALLIES = st.builds(
    Tally,
    committed_s=SECONDS,
    discarded_s=SECONDS,
    waiting_s=SECONDS,
    reconfiguring_s=SECONDS,
    healing_s=SECONDS,
    away_s=SECONDS,
    num_committed=st.integers(0, 9),
)
INPUTS = st.one_of(
    st.tuples(st.just("tally"), GROUPS, TALLIES, st.floats(0.0, 5.0)),
    st.tuples(st.just("quorum"), st.sets(GROUPS, min_size=1)),
    st.tuples(st.just("gone"), GROUPS),
    st.tuples(st.just("hangs"), GROUPS),
    st.tuples(st.just("lost"), GROUPS),
    st.tuples(st.just("end")),
    st.tuples(st.just("again")),
)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), INPUTS), max_size=30))
def test_n6_the_parts_always_sum_to_the_wall_time(
    inputs: list[tuple[float, tuple[object, ...]]],
) -> None:
    accounts, now, has_ended = TimeAccounts(1000.0), 1000.0, False
    for pause_s, (what, *given_) in inputs:
        now += pause_s
        fed: list[object] = given_
        if what == "tally" and not has_ended:
            replica_id, tally, ago_s = fed
            accounts.record_tally(replica_id, tally, now - ago_s)  # type: ignore[arg-type,operator]
        elif what == "quorum" and not has_ended:
            accounts.record_quorum(fed[0], now)  # type: ignore[arg-type]
        elif what == "gone":
            accounts.forget_group(fed[0])  # type: ignore[arg-type]
        elif what == "hangs":
            accounts.blame_hang(fed[0])  # type: ignore[arg-type]
        elif what == "lost":
            accounts.exonerate(fed[0])  # type: ignore[arg-type]
        elif what == "end":
            accounts.end(now)
            has_ended = True
        elif what == "again":
            accounts.begin_again(now)
            has_ended = False
        for waits, hangs in ((False, False), (True, False), (False, True)):
            check_sums(accounts.goodput(now, waits=waits, hangs=hangs))


@pytest.mark.parametrize("field", ["committed_s", "waiting_s", "away_s", "ago_s"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_tally_out_of_bounds_is_refused(field: str, value: float) -> None:
    with pytest.raises(RequestRefused, match=field):
        Tally(**{field: value}).check()


def test_n6_a_report_that_was_long_on_its_way_moves_no_time() -> None:
    accounts, late = TimeAccounts(0.0), random.Random(7)
    accounts.record_quorum({"a", "b"}, 0.0)
    for num in range(1, 2001):  # steps of 50 ms, of which the fifth is a wait
        done = Tally(committed_s=0.04 * num, waiting_s=0.01 * num, num_committed=num)
        for replica_id in ("a", "b") if num < 1000 else ("b",):
            accounts.record_tally(replica_id, done, 0.05 * num + late.uniform(0.0, 0.2))
        if num == 1000:
            accounts.forget_group("a")
    goodput = accounts.goodput(100.2)
    check_sums(goodput, 100.2)
    assert goodput.committed_s == pytest.approx(80.0, abs=0.5)
    assert lost(goodput)["waiting"] == pytest.approx(20.0, abs=0.5)


def test_n6_a_process_whose_clock_has_stood_still_is_believed_again() -> None:
    accounts = TimeAccounts(0.0)
    accounts.record_quorum({"a"}, 0.0)
    for num in range(1, 101):
        away_s = 30.0 if num > 50 else 0.0  # its machine was suspended
        accounts.record_tally("a", Tally(committed_s=num, num_committed=num), num + away_s)
    goodput = accounts.goodput(130.0)
    check_sums(goodput, 130.0)
    assert goodput.committed_s == pytest.approx(100.0, abs=1.0), "up to a step"
    assert lost(goodput) == {"waiting": pytest.approx(30.0, abs=1.0)}
