"""Members of the quorum, and when they are: rules Q1 to Q5 and Q8 as orders of the lighthouse."""

from __future__ import annotations

import pytest
from support.core.scenes import JOB, Refused, Scene, answer, config, formed, loss, member

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.jobs import (
    MAX_ANNOUNCED,
    MAX_ANNOUNCEMENTS,
    ReportStraggler,
)
from torchft_svc.core.quorum.lighthouse.membership import Membership

SILENT = "no sign of life for 100 s"


def test_q1_a_request_counts_as_a_sign_of_life() -> None:
    scene = Scene(config(min_replicas=2))
    caller = scene.ask("a")
    scene.before(100)
    assert scene.pop_orders() == []
    scene.until(100)
    assert scene.pop_orders() == [
        loss("a", SILENT),
        Refused(caller, "QuorumFailed", f"no quorum: 'a' is out: {SILENT}"),
    ]


def test_q1_who_gave_up_is_not_in_the_quorum() -> None:
    scene = Scene(config(min_replicas=2))
    scene.withdraw(scene.ask("a"))
    scene.ask("b")
    assert scene.pop_orders() == []
    assert scene.why() == "waiting for a: alive, but has not asked"


def test_q1_withdrawing_twice_or_an_unknown_caller_changes_nothing() -> None:
    scene = Scene(config(min_replicas=2))
    first = scene.ask("a")
    scene.withdraw(99)
    scene.withdraw(first)
    scene.withdraw(first)
    scene.withdraw(first, job="unknown")
    again = scene.ask("a")
    scene.ask("b")
    assert scene.pop_orders() == [answer(1, member("a"), member("b"), callers=(again, 3))]


def test_q1_a_newer_request_of_a_group_takes_the_place_of_the_older() -> None:
    scene = Scene(config(min_replicas=2))
    scene.ask("a")
    assert scene.pop_orders() == []
    scene.ask("a", step=3)
    sentence = "no quorum: a newer request of 'a' has taken the place of this one"
    assert scene.pop_orders() == [Refused(1, "QuorumFailed", sentence)]
    scene.withdraw(1)  # the shell reports that the refused caller is gone
    scene.ask("b")
    assert scene.pop_orders() == [answer(1, member("a", 3), member("b"), callers=(2, 3))]


def test_q2_all_members_are_back() -> None:
    scene = formed("a", "b")
    scene.ask("a", step=1)
    scene.beat("c")
    assert scene.pop_orders() == []
    scene.ask("b", step=1)
    assert scene.pop_orders() == [answer(1, member("a", 1), member("b", 1), callers=(3, 4))]


def test_q2_a_newcomer_that_asks_is_in() -> None:
    scene = formed("a", "b")
    scene.ask_all("c", "a", "b")
    assert scene.pop_quorums() == [(2, ["a", "b", "c"])]


def test_who_joins_is_distinguished_from_who_stays() -> None:
    scene = formed("a", "b")
    scene.ask_all("c", "a", "b", step=1)
    (order,) = scene.pop_orders()
    assert order.quorum.joining == {"c"}
    scene.ask_all("c", "a", "b", step=2)
    (order,) = scene.pop_orders()
    assert order.quorum.joining == frozenset()


def test_i3_who_joined_and_could_not_heal_is_distinguished_until_it_has() -> None:
    """The joiner has the step of the others with another state; all have discarded the step."""
    scene = formed("a", "b")
    scene.ask_all("c", "a", "b", step=1)
    scene.pop_orders()
    for _ in range(2):
        scene.ask_all("a", "b", step=1)
        scene.ask("c", step=1, unhealed=True)
        (order,) = scene.pop_orders()
        assert [each.replica_id for each in order.quorum.up_to_date] == ["a", "b"]
    scene.leave("a")
    scene.leave("b")
    scene.pop_orders()
    scene.ask("d", step=1, unhealed=True)
    scene.ask("c", step=1, unhealed=True)  # nobody else is left: one of them is right from now on
    (order,) = scene.pop_orders()
    assert [each.replica_id for each in order.quorum.up_to_date] == ["c"]


def test_i3_of_groups_from_different_quorums_the_newest_is_right() -> None:
    """Both come from other lighthouses, and nobody here is as far."""
    scene = formed("a:1", "b:1", "c:1")
    scene.leave("b:1")
    scene.leave("c:1")
    scene.pop_orders()
    scene.ask("b:2", step=7, seen_quorum_id=40, has_history=True)
    scene.ask("c:2", step=7, seen_quorum_id=50, has_history=True)
    scene.ask("a:1", step=1)
    (order,) = scene.pop_orders()
    assert [each.replica_id for each in order.quorum.up_to_date] == ["c:2"]


def test_q3_a_missing_member_is_waited_for_until_the_deadline() -> None:
    scene = formed("a", "b")
    scene.until(150)
    scene.ask("a", step=1)
    scene.before(160)
    assert scene.pop_orders() == []
    assert scene.why() == "waiting for b: alive, but has not asked"
    scene.until(160)
    behind = ReportStraggler(JOB, "b", 1, recipients=("b",))
    assert scene.pop_orders() == [behind, answer(2, member("a", 1), callers=(3,))]


def test_q3_not_enough_at_the_deadline_then_enough() -> None:
    scene = Scene(config(min_replicas=2))
    scene.beat("b")
    scene.ask("a")
    scene.until(50)
    assert scene.pop_orders() == []
    assert scene.why() == "1 of at least 2 groups ask (--min-replicas)"
    scene.ask("c")
    assert scene.pop_quorums() == [(1, ["a", "c"])]


def test_q3_a_cold_start_waits_for_all_who_live() -> None:
    scene = Scene()
    scene.beat("a", "b", "c")
    scene.ask_all("b", "a")
    scene.before(20)
    assert scene.pop_orders() == []
    scene.until(20)
    assert scene.pop_quorums() == [(1, ["a", "b"])]


def test_q3_a_cold_start_is_over_when_all_have_asked() -> None:
    scene = Scene()
    scene.beat("a", "b", "c")
    scene.ask_all("b", "a", "c")
    assert scene.pop_quorums() == [(1, ["a", "b", "c"])]


def test_a_loss_names_the_quorum_that_it_is_a_loss_for() -> None:
    """The group may come back, under the same id, into a later one."""
    scene = formed("a", "b")
    scene.leave("b")
    assert [order.quorum_id for order in scene.pop_orders()] == [1]
    fresh = Scene()
    fresh.beat("a")
    fresh.leave("a")
    assert [order.quorum_id for order in fresh.pop_orders()] == [0]


def test_q3_a_group_that_dies_is_waited_for_no_longer() -> None:
    scene = formed("a", "b", "c")
    scene.ask_all("a", "c", step=1)
    scene.leave("b")
    assert scene.pop_orders() == [
        loss("b"),
        answer(2, member("a", 1), member("c", 1), callers=(4, 5)),
    ]


def test_q4_a_straggler_delays_the_others_once() -> None:
    scene = formed("a", "b", "c")
    scene.ask_all("a", "b", step=1)
    scene.until(110)
    assert scene.pop_quorums() == [(2, ["a", "b"])]
    scene.beat("c")
    scene.ask_all("a", "b", step=2)
    assert scene.pop_quorums() == [(2, ["a", "b"])]


def test_q4_a_straggler_comes_back() -> None:
    scene = formed("a", "b", "c")
    scene.ask_all("a", "b", step=1)
    scene.until(110)
    scene.pop_orders()
    scene.ask("c")
    assert scene.pop_orders() == []
    scene.ask_all("a", "b", step=2)
    assert scene.pop_quorums() == [(3, ["a", "b", "c"])]
    scene.ask_all("a", "b", step=3)
    assert scene.pop_orders() == []
    assert scene.why() == "waiting for c: alive, but has not asked"


def test_q4_a_straggler_that_asked_and_gave_up_is_waited_for_again() -> None:
    scene = formed("a", "b", "c", settings=config(min_replicas=3))
    scene.ask("a", step=1)
    scene.until(110)
    first = scene.ask("b", step=1)
    scene.withdraw(first)  # its turn began with a's, so its time is over again
    scene.ask_all("d", "e", step=1)
    assert scene.pop_quorums() == [(2, ["a", "d", "e"])]


def test_q4_the_deadline_makes_stragglers_even_if_there_are_not_enough() -> None:
    scene = formed("a", "b", settings=config(min_replicas=2))
    first = scene.ask("a", step=1)
    scene.until(110)
    scene.withdraw(first)
    scene.ask("a", step=1)  # b hangs: it is not given join_timeout a second time
    scene.ask("c", step=1)
    assert scene.pop_quorums() == [(2, ["a", "c"])]


def test_q4_a_repeated_request_does_not_put_the_deadline_off() -> None:
    scene = formed("a", "b")
    scene.ask("a", step=1)
    scene.until(109)
    scene.ask("a", step=1)
    scene.until(110)
    assert scene.pop_quorums() == [(2, ["a"])]


def test_q4_giving_up_and_asking_again_does_not_put_the_deadline_off() -> None:
    scene = formed("a", "b")
    first = scene.ask("a", step=1)
    scene.until(105)
    scene.withdraw(first)  # its patience is shorter than join_timeout
    scene.until(106)
    scene.ask("a", step=1)
    scene.until(109.9)
    assert scene.pop_quorums() == []
    scene.until(110)
    assert scene.pop_quorums() == [(2, ["a"])]


def test_q4_giving_up_for_long_is_a_new_beginning() -> None:
    scene = formed("a", "b", settings=config(join_timeout_s=200))
    first = scene.ask("a", step=1)
    scene.until(105)
    scene.withdraw(first)
    for now in (150, 200, 205.5):  # longer than the heartbeat timeout of 100 s
        scene.until(now)
        scene.beat("b")
        scene.beat("a")
    scene.ask("a", step=1)
    for now in (300, 390):
        scene.until(now)
        scene.beat("b")
        scene.beat("a")
    assert scene.pop_quorums() == []
    scene.until(405.5)
    assert scene.pop_quorums() == [(2, ["a"])]


def test_a_member_that_was_silent_for_too_long_is_a_member_again() -> None:
    """The member's successors do not start a second history: rules Q7 and Q10."""
    scene = formed("a", "b", step=7, settings=config(heartbeat_timeout_s=8))
    scene.beat("n")
    scene.until(107)
    scene.beat("n")
    scene.until(108)
    scene.ask("n", step=3)
    assert scene.pop_quorums() == [(2, ["n"])]  # nobody was left
    scene = formed("a", "b", step=7, settings=config(heartbeat_timeout_s=8))
    scene.until(107)
    scene.beat("n")
    scene.until(109)
    scene.beat("a")
    scene.ask("n", step=3)
    scene.pop_orders()
    assert scene.why() == "waiting for a: alive, but has not asked"
    scene.withdraw(scene.ask("a", step=6))
    assert scene.pop_orders() == []


def test_the_deadline_of_a_cold_start_is_not_that_of_members_who_are_back() -> None:
    scene = formed("a", "b", settings=config(heartbeat_timeout_s=30))
    scene.until(125)
    scene.beat("n", "m")
    scene.until(130)
    scene.ask("n")  # nobody else is left: it waits for m until 150
    scene.until(131)
    scene.beat("a", "b")
    scene.ask("a", step=1)  # a member has asked: b is waited for until 141
    scene.pop_orders()
    scene.before(141)
    assert scene.pop_orders() == []
    scene.until(141)
    assert scene.pop_quorums() == [(2, ["a", "n"])]


def test_a_deadline_that_needs_no_decision_does_not_keep_the_lighthouse_awake() -> None:
    """`Scene.until` fails if the lighthouse asks to be woken again and again."""
    scene = formed("a", "b", "c", settings=config(min_replicas=2))
    scene.ask("a")
    scene.withdraw(scene.ask("b"))
    scene.until(150)
    scene.beat("b", "c")
    scene.until(190)
    assert scene.pop_orders() == []


def test_q5_shrink_only_keeps_newcomers_waiting() -> None:
    scene = formed("a", "b")
    scene.ask("c")
    scene.ask("a", shrink_only=True)
    scene.ask("b")
    shrunk = member("a", shrink_only=True)
    assert scene.pop_orders() == [answer(1, shrunk, member("b"), callers=(4, 5))]
    scene.ask_all("a", "b")
    assert scene.pop_orders() == [
        answer(2, member("a"), member("b"), member("c"), callers=(6, 7, 3))
    ]


def test_q8_a_group_lives_exactly_for_the_heartbeat_timeout() -> None:
    scene = Scene()
    scene.beat("a")
    scene.until(50)
    scene.beat("a")
    scene.before(150)
    assert scene.pop_orders() == []
    scene.until(150)
    assert scene.pop_orders() == [loss("a", SILENT)]


def test_q8_a_leave_takes_the_group_and_its_request_out_at_once() -> None:
    scene = Scene(config(min_replicas=2))
    caller = scene.ask("a")
    scene.leave("a", "preempted")
    assert scene.pop_orders() == [
        loss("a", "preempted"),
        Refused(caller, "QuorumFailed", "no quorum: 'a' is out: preempted"),
    ]
    scene.ask("b")
    assert scene.pop_orders() == []


def test_q8_leaving_twice_or_unknown_changes_nothing() -> None:
    scene = Scene()
    scene.leave("a")
    scene.beat("b")
    scene.leave("a")
    scene.leave("b")
    scene.leave("b")
    assert scene.pop_orders() == [loss("b")]


def test_q8_a_waiter_lives_by_its_beats() -> None:
    scene = Scene(config(min_replicas=2))
    scene.ask("a")
    for now in (90, 180, 270):
        scene.until(now)
        scene.beat("a")
    scene.ask("b")
    assert scene.pop_orders() == [answer(1, member("a"), member("b"), callers=(1, 2))]


@pytest.mark.parametrize("timeout_s", [0.1, 0.2, 0.3, 0.7, 5.0])
def test_q8_the_deadline_of_a_death_is_not_lost_in_rounding(timeout_s: float) -> None:
    """Waking at the deadline must find the group dead, else the shell wakes again and again."""
    for tenths in range(1, 200):
        scene = Scene(config(heartbeat_timeout_s=timeout_s))
        scene.now = tenths / 10
        scene.beat("a")
        at = scene.jobs.next_deadline()
        assert at is not None
        assert plain_losses(scene, at) == 1, (tenths, timeout_s)


def plain_losses(scene: Scene, at: float) -> int:
    return len(scene.jobs.tick(at))


def test_a_newcomer_is_announced_once() -> None:
    scene = formed("a", "b")
    assert scene.pop_newcomers() == []
    caller = scene.ask("c")
    assert scene.pop_newcomers() == ["c"]
    scene.withdraw(caller)
    scene.ask("c")
    scene.ask("a", step=1)
    assert scene.pop_newcomers() == []
    assert scene.jobs._jobs[JOB].members.quorum_left() in (["a", "b"], ["b", "a"])


def test_a_newcomer_that_joins_at_once_is_not_announced() -> None:
    scene = formed("a")
    scene.leave("a")
    scene.beat("b")
    scene = formed("a", "b")
    scene.ask_all("a", "b", step=1)
    assert scene.pop_newcomers() == []


def test_who_is_kept_out_is_announced_to_the_next_quorum_too() -> None:
    scene = formed("a", "b")
    scene.ask("c")
    scene.ask("a", step=1, shrink_only=True)
    scene.ask("b", step=1)
    assert scene.pop_quorums() == [(1, ["a", "b"])]
    assert scene.pop_newcomers() == ["c", "c"]
    scene.ask_all("a", "b", step=2)
    assert scene.pop_quorums() == [(2, ["a", "b", "c"])]
    assert scene.pop_newcomers() == []


def test_a_group_that_waits_for_its_name_is_announced_when_it_gets_it() -> None:
    scene = formed("a:1", "b:1")
    scene.ask("b:2")
    assert scene.pop_newcomers() == []
    scene.leave("b:1")
    assert scene.pop_newcomers() == ["b:2"]


def test_a_crowd_is_not_announced_one_by_one() -> None:
    scene = formed("a")
    for number in range(MAX_ANNOUNCED + 20):
        scene.ask(f"b{number}")
    assert len(scene.pop_newcomers()) == MAX_ANNOUNCED


def test_the_more_are_to_be_informed_the_fewer_are_announced() -> None:
    scene = formed(*(f"a{number:03}" for number in range(MAX_ANNOUNCED + 100)))
    for number in range(MAX_ANNOUNCED):
        scene.ask(f"b{number}")
    assert len(scene.pop_newcomers()) == MAX_ANNOUNCEMENTS // (MAX_ANNOUNCED + 100)


def test_a_first_quorum_has_nobody_to_inform() -> None:
    scene = formed("a")
    scene.leave("a")
    scene.ask("b", job="other")
    assert scene.pop_newcomers() == []


def test_who_asks_again_may_have_asked_before_all_others() -> None:
    """The others' wait, counted from b's request, is over when a is back: a began it at 100."""
    scene = formed("a:1", "b:1", "c:1", step=7)
    asked = scene.ask("a:1", 8)
    scene.until(108)
    scene.withdraw(asked)
    scene.until(109)
    scene.ask("b:1", 8)
    scene.until(112)
    assert scene.pop_quorums() == []
    scene.ask("a:1", 8)
    assert scene.pop_quorums() == [(2, ["a:1", "b:1"])]


@pytest.mark.parametrize("end", ["dies", "asks", "has healed"])
def test_who_gives_up_while_others_heal_is_late_when_they_do_not_any_more(end: str) -> None:
    """The time of the one that gives up was over at 110, that of the others would be at 140."""
    scene = formed("a:1", "b:1", "c:1", "d:1", step=7, settings=config(heal_timeout_s=40.0))
    scene.report("b:1", Phase.HEALING, 7)
    scene.ask("a:1", 8)
    asked = scene.ask("c:1", 8)
    scene.ask("d:1", 8)
    scene.until(115)
    scene.withdraw(asked)
    assert scene.why() == "waiting for b:1: alive, but has not asked; b:1 heals since 15 s"
    if end == "dies":
        scene.leave("b:1")
        assert scene.pop_quorums() == [(2, ["a:1", "d:1"])]
    else:
        if end == "has healed":
            scene.report("b:1", Phase.TRAINING, 7)
        scene.ask("b:1", 8)
        assert scene.pop_quorums() == [(2, ["a:1", "b:1", "d:1"])]


def test_who_gives_up_early_while_others_heal_has_no_more_time_than_ever() -> None:
    scene = formed("a:1", "b:1", "c:1", "d:1", step=7, settings=config(heal_timeout_s=40.0))
    scene.report("b:1", Phase.HEALING, 7)
    scene.report("d:1", Phase.HEALING, 7)
    scene.ask("a:1", 8)
    asked = scene.ask("c:1", 8)
    scene.until(105)
    scene.report("d:1", Phase.TRAINING, 7)  # it has until 115 now
    scene.ask("d:1", 8)
    scene.withdraw(asked)
    scene.ask("b:1", 8)
    scene.before(110)
    assert scene.pop_quorums() == []
    scene.until(110)
    assert scene.pop_quorums() == [(2, ["a:1", "b:1", "d:1"])]


def test_an_arrival_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it costs the same for ten groups and ten thousand: nobody looks at all of them."""
    scene = formed("a:1", "b:1", "c:1", "d:1", step=7, settings=config(heal_timeout_s=40.0))
    scene.report("b:1", Phase.HEALING, 7)
    monkeypatch.setattr(Membership, "view", lambda self: pytest.fail("somebody is waited for"))
    asked = scene.ask("a:1", 8)
    scene.ask("c:1", 8)
    scene.report("b:1", Phase.TRAINING, 7)
    scene.withdraw(asked)
    scene.ask("e:1", 8)
    scene.leave("c:1")
    scene.ask("a:1", 8)
    scene.before(110)
    assert scene.pop_quorums() == []


def test_no_later_look_than_the_first_heal_that_was_over() -> None:
    """b's wait, that it has after its heal, ends before c's; c asks again, and b does not."""
    settings = config(heal_timeout_s=40.0)
    scene = formed("a:1", "b:1", "c:1", "d:1", step=7, settings=settings)
    for replica_id in ("b:1", "c:1"):
        scene.report(replica_id, Phase.HEALING, 7)
    scene.ask_all("a:1", "d:1", step=8)
    for now, replica_id in ((105, "b:1"), (107, "c:1")):
        scene.until(now)
        scene.report(replica_id, Phase.TRAINING, 7)
    scene.ask("c:1", 8)
    scene.before(115)
    assert scene.pop_quorums() == []
    scene.until(115)
    assert scene.pop_quorums() == [(2, ["a:1", "c:1", "d:1"])]
