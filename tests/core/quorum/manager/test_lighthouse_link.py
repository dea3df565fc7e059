"""Tests what only a manager's link does: questions, incarnations, and where its job is."""

from __future__ import annotations

import dataclasses
import math

import pytest
from support.core.links import ASK, CONFIG, REFUSED, ManagerPlay, without_beats

from torchft_svc.core.link import (
    LEAVE_TIMEOUT_S,
    MAX_LOOK_AGE_S,
    Close,
    ConfirmLeft,
    Connect,
    LinkState,
    Probe,
    SendBeat,
)
from torchft_svc.core.quorum.lighthouse.membership import GATHER_S
from torchft_svc.core.quorum.manager.lighthouse_link import (
    DISTRUST_PAUSE_S,
    GO_ON_S,
    NEWCOMER_PAUSE_S,
    NEWCOMER_SHARE,
    REFUSAL_GRACE_S,
    RETURN_S,
    AnswerAsker,
    Order,
)
from torchft_svc.core.quorum.session_messages import Hello, Leave, Question, Withdrawal
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import (
    NO_QUORUM,
    GroupRequest,
    LastQuorum,
    Member,
    Quorum,
    Resumed,
)
from torchft_svc.core.route import LOOK_BACK_S, MAX_PAUSE_S, MIN_PAUSE_S
from torchft_svc.errors import (
    DeadlineExceeded,
    NotLeader,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unauthorized,
)

NEWCOMER = dataclasses.replace(ASK, has_history=False)


def member(replica_id: str = "g:1", *, sole: bool = True, **fields: int) -> Member:
    return Member(
        replica_id=replica_id,
        address="me",
        store_address="store",
        step=3,
        world_size=2,
        has_history=True,
        sole_lighthouse=sole,
        **fields,
    )


def quorum(quorum_id: int, *replica_ids: str) -> Quorum:
    members = tuple(map(member, replica_ids or ("g:1",)))
    return Quorum(quorum_id=quorum_id, participants=members)


def question(number: int = 1, timeout_s: float = 60.0, *, sole: bool = True) -> Question:
    return Question(number, member(sole=sole), timeout_s)


# -- connecting ------------------------------------------------------------------------------------


def test_e7_another_manager_continues_the_incarnation_of_the_one_before() -> None:
    link = ManagerPlay(resumed=Resumed(replica_id="g:old", quorum_id=9, step=3, num_groups=2))
    assert link.until(100.0) == [], "it begins when its worker is there"
    assert link.start() == [Connect(1, "a")]
    assert link.machine.hello() == Hello("g:old", LastQuorum(9, 2), 2), "step 3 may be its alone"
    assert link.machine.seen_quorum_id == 9
    assert link.num_incarnations == 0
    link.open()
    (asked,) = link.ask()
    assert isinstance(asked, Question)
    assert not asked.member.sole_lighthouse, "the others may know another one"


def test_answers_over_a_connection_that_is_over_are_ignored() -> None:
    link = ManagerPlay().opened()
    link.close(1)
    link.until(1.0)
    before = repr(vars(link.machine))
    assert link.answer(quorum(5)) == []
    assert not link.machine.accepts_news(1, "for nobody")
    assert repr(vars(link.machine)) == before


def test_a_group_that_no_lighthouse_trusts_gets_the_error_at_once() -> None:
    link = ManagerPlay("a", "b")
    link(lambda machine: machine.start(0.0))
    link.ask()
    distrust = Unauthorized("lighthouse at a: nobody is known here")
    assert link.close(1, distrust) == [Close(1)], "the other one may trust it"
    link.until(0.5)
    assert link.close(2, distrust) == [Close(2), AnswerAsker(7, distrust)]
    assert link.ask() == [AnswerAsker(7, distrust)]


def test_a_group_that_has_trained_gets_an_error_of_distrust_after_a_pause() -> None:
    link = ManagerPlay().opened()
    link.ask()
    link.answer(quorum(5))
    link.ask()
    distrust = Unauthorized("another token")
    assert link.close(1, distrust) == [Close(1)]
    assert AnswerAsker(7, distrust) not in link.until(DISTRUST_PAUSE_S - 0.01)
    assert AnswerAsker(7, distrust) in link.until(DISTRUST_PAUSE_S)


def test_g1_a_prepared_spare_stands_by_until_it_was_in_a_quorum() -> None:
    link = ManagerPlay(is_spare=True).opened()
    assert link.machine.hello().is_spare
    link.ask(NEWCOMER)
    link.answer(quorum(5))
    assert not link.machine.hello().is_spare
    resumed = Resumed(replica_id="g:old", quorum_id=9, step=3, num_groups=2)
    assert not ManagerPlay(resumed=resumed, is_spare=True).machine.hello().is_spare


def test_g1_a_prepared_spare_asks_no_lighthouse_that_would_make_it_a_member() -> None:
    link = ManagerPlay(is_spare=True)
    link.start()
    link(lambda machine: machine.refuse_spare(1, 0.0))
    link.open()
    (answer,) = link.ask(NEWCOMER)
    assert isinstance(answer, AnswerAsker)
    assert isinstance(answer.outcome, RequestRefused)
    assert "knows no prepared spares: update it" in str(answer.outcome)
    link.close(1)
    connects = [each for each in link.until(10.0) if isinstance(each, Connect)]
    link.open(connects[-1].connection)  # it was updated
    asked = [*link.ask(NEWCOMER), *link.until(link.now + 2.0)]
    assert any(isinstance(each, Question) for each in asked)


def test_an_ordinary_group_may_ask_any_lighthouse() -> None:
    link = ManagerPlay()
    link.start()
    link(lambda machine: machine.refuse_spare(1, 0.0))
    link.open()
    (asked,) = link.ask()
    assert isinstance(asked, Question)


# -- asking ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reached", "step"), [(0, 3), (4, 3), (5, 4), (50, 49)])
def test_e5_a_session_begins_with_a_step_that_all_members_have_reached(
    reached: int, step: int
) -> None:
    """The last one may be this group's alone, but not that of the quorum, which is 3."""
    link = ManagerPlay().opened()
    link.ask()
    link.answer(quorum(5, "g:1", "h:1"))
    link.machine.reached = lambda: reached
    link.close()
    (again,) = link.until(link.now + MIN_PAUSE_S)
    assert again == Connect(2, "a")
    assert link.machine.hello() == Hello("g:1", LastQuorum(5, step), num_groups=2)


def test_a_question_and_its_answer() -> None:
    link = ManagerPlay().opened()
    assert link.ask() == [question()]
    assert link.answer(quorum(5, "g:1", "h:1")) == [AnswerAsker(7, quorum(5, "g:1", "h:1"))]
    assert link.machine.seen_quorum_id == 5
    reported = member(seen_quorum_id=5, last_num_groups=2)
    assert link.ask() == [Question(2, reported, 60.0)]
    link.close()
    again = link.until(link.now + MIN_PAUSE_S)
    assert again == [Connect(2, "a")]
    assert link.machine.hello() == Hello("g:1", LastQuorum(5, 3), num_groups=2)
    assert link.open(2) == [Question(3, reported, 60.0 - link.now)]


def test_a_group_whose_quorum_knew_another_lighthouse_reports_it() -> None:
    link = ManagerPlay().opened()
    link.ask()
    others = Quorum(quorum_id=5, participants=(member(), member("h:1", sole=False)))
    link.answer(others)
    reported = member(sole=False, seen_quorum_id=5, last_num_groups=2)
    assert link.ask() == [Question(2, reported, 60.0)]


def test_answers_to_questions_that_were_given_up_are_dropped() -> None:
    link = ManagerPlay().opened()
    link.ask()
    assert link(lambda machine: machine.withdraw_round(6, 0.0)) == [], "of another round"
    assert link(lambda machine: machine.withdraw_round(7, 0.0)) == [Withdrawal(1)]
    assert link.ask() == [question(2)]
    assert link.answer(quorum(5), question=1) == []
    assert link.log == ["dropped the answer to question 1, which was given up"]
    assert link.answer(RequestRefused("late"), question=1) == []
    assert link.answer(quorum(6), question=0) == [AnswerAsker(7, quorum(6))], (
        "the number is not known"
    )
    assert link.answer(quorum(6), question=0) == []


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (quorum(5, "h:1"), "without 'g:1'"),
        (quorum(4), "older than quorum 5"),
        (QuorumFailed("held back"), "held back"),
        (RequestRefused("wrong layout"), "wrong layout"),
        (DeadlineExceeded("quorum", 60.0, "h is waited for"), "h is waited for"),
    ],
)
def test_an_outcome_that_is_no_quorum_is_an_error(outcome: Quorum | TorchFTError, why: str) -> None:
    link = ManagerPlay().opened()
    link.ask(dataclasses.replace(ASK, seen_quorum_id=5))
    (answer,) = link.answer(outcome)
    assert isinstance(answer, AnswerAsker)
    assert isinstance(answer.outcome, TorchFTError)
    assert why in str(answer.outcome)


def test_ids_may_begin_anew_where_there_are_no_sessions() -> None:
    link = ManagerPlay()
    link(lambda machine: machine.start(0.0))
    assert link(lambda machine: machine.not_supported(1, 0.0)) == [SendBeat()]
    link.open()
    link.ask(dataclasses.replace(ASK, seen_quorum_id=5))
    assert link.answer(quorum(1)) == [AnswerAsker(7, quorum(1))]
    assert link.machine.seen_quorum_id == 5


def test_a_failed_quorum_is_repeated_as_often_as_configured() -> None:
    link = ManagerPlay(retries=2).opened()
    assert link.ask() == [question(1)]
    assert link.answer(QuorumFailed("flaky"), 1) == [question(2)]
    assert link.answer(QuorumFailed("flaky"), 2) == [question(3)]
    (answer,) = link.answer(QuorumFailed("flaky"), 3)
    assert isinstance(answer, AnswerAsker)
    link.ask()
    refused = RequestRefused("it would be refused again")
    assert link.answer(refused, 4) == [AnswerAsker(7, refused)]


def test_a_silent_lighthouse_has_a_little_longer_than_the_question() -> None:
    link = ManagerPlay(retries=1).opened()
    link.ask(timeout_s=1.0)
    assert without_beats(link.until(1.0 + REFUSAL_GRACE_S - 0.01)) == []
    withdrawn, answer = without_beats(link.until(1.0 + REFUSAL_GRACE_S))
    assert withdrawn == Withdrawal(1)
    assert isinstance(answer, AnswerAsker)
    assert str(answer.outcome) == "quorum timed out after 1 s: the lighthouse is silent"


@pytest.mark.parametrize("retries", [0, 1])
def test_a_question_without_a_lighthouse_fails_after_the_connect_timeout(
    retries: int,
) -> None:
    link = ManagerPlay(retries=retries)
    link(lambda machine: machine.start(0.0))
    link.close(1)
    assert link.ask() == []
    found: list[Order] = []
    while not any(isinstance(order, AnswerAsker) for order in found):
        found = link.until(link.now + 0.1)
        connection = link.machine._connection
        if connection is not None:
            link.close(connection.number)
    assert link.now == pytest.approx((1 + retries) * CONFIG.connect_timeout_s, abs=0.2)
    assert AnswerAsker(7, link.machine._me.why_not) in found or "refused" in str(found)


def test_a_question_that_has_waited_for_long_survives_a_lighthouses_restart() -> None:
    """The connect timeout is how long none is reachable, not how old the question may be."""
    link = ManagerPlay().opened()
    link.ask()
    link.until(10 * CONFIG.connect_timeout_s)
    assert link.close() == [Close(1)]
    assert link.until(link.now + MIN_PAUSE_S) == [Connect(2, "a")]
    assert link.machine.hello() == Hello("g:1", NO_QUORUM)
    link.until(link.now + 1.0)
    assert isinstance(link.open(2)[0], Question)


def test_a_lighthouse_that_welcomes_and_never_answers_is_given_up_in_time() -> None:
    link = ManagerPlay().opened()
    link.ask()
    found: list[Order] = []
    number = 1
    while not any(isinstance(order, AnswerAsker) for order in found):
        found = link.close(number) + link.until(link.now + MAX_PAUSE_S)
        number += 1
        link.open(number)
    assert link.now <= CONFIG.connect_timeout_s + 2 * MAX_PAUSE_S


def test_a_call_that_finds_nobody_is_repeated_while_the_heartbeats_go_on() -> None:
    link = ManagerPlay()
    link(lambda machine: machine.start(0.0))
    link(lambda machine: machine.not_supported(1, 0.0))
    link.open()
    link.ask()
    assert link.answer(REFUSED, 1) == []
    assert without_beats(link.until(MIN_PAUSE_S)) == [question(2, timeout_s=60.0 - MIN_PAUSE_S)]


# -- beats -----------------------------------------------------------------------------------------


def test_a_question_is_a_sign_of_life() -> None:
    link = ManagerPlay().opened()
    link.until(0.05)
    link.ask()
    assert link.until(0.149) == []
    assert link.until(0.151) == [SendBeat()]


def test_a_heartbeat_without_a_session_waits_for_the_one_before() -> None:
    link = ManagerPlay()
    link(lambda machine: machine.start(0.0))
    assert link(lambda machine: machine.not_supported(1, 0.0)) == [SendBeat()]
    assert link.until(5.0) == []
    link(lambda machine: machine.beat_was_late(1, 5.0))
    assert link.until(5.0) == [SendBeat()]
    link.until(5.02)
    assert link.open() == []
    assert link.until(5.09) == []
    assert link.until(5.11) == [SendBeat()]


# -- leaving ---------------------------------------------------------------------------------------


def test_it_leaves_and_is_not_waited_for() -> None:
    link = ManagerPlay().opened()
    link.ask()
    assert link.leave() == [Leave("it is ordered to", between_steps=False, ends=True)]
    assert link.until(LEAVE_TIMEOUT_S - 0.01) == [], "no beat brings it back"
    left = AnswerAsker(7, QuorumFailed("this group has left the lighthouse"))
    closed, confirmed, answer = link.until(LEAVE_TIMEOUT_S)
    assert (closed, confirmed, repr(answer)) == (Close(1), ConfirmLeft(), repr(left))
    assert repr(link.ask()) == repr([left]), "whoever asks afterwards gets it, too"
    assert link.leave() == [ConfirmLeft()]
    assert link.machine.next_deadline(link.now) == math.inf


def test_an_answer_before_it_left_counts() -> None:
    link = ManagerPlay().opened()
    link.ask()
    link.leave()
    assert link.answer(quorum(5)) == [AnswerAsker(7, quorum(5))]
    assert link.close() == [Close(1), ConfirmLeft()]


@pytest.mark.parametrize("is_opening", [True, False])
def test_without_a_session_it_is_out_already(is_opening: bool) -> None:
    link = ManagerPlay()
    link(lambda machine: machine.start(0.0))
    if not is_opening:
        link.close()
    assert link.leave() == [Close(1)] * is_opening + [ConfirmLeft()]
    assert link.open() == []


def test_a_restarted_worker_makes_another_incarnation() -> None:
    link = ManagerPlay().opened()
    link.ask()
    link.answer(quorum(5))
    restarted = dataclasses.replace(ASK, new_incarnation=True)
    assert link.ask(restarted) == [
        Leave("a worker of the group was restarted", between_steps=False, ends=False)
    ]
    assert link(lambda machine: machine.withdraw_round(7, 0.0)) == [], (
        "it gives up; the move goes on"
    )
    assert link.close() == [Close(1), ConfirmLeft(), Connect(2, "a")]
    assert link.machine.hello() == Hello("g:2", NO_QUORUM)
    assert link.open(2) == []
    (asked,) = link.ask()
    assert isinstance(asked, Question)
    assert asked.member.replica_id == "g:2"


@pytest.mark.parametrize("has_left", [True, False])
def test_a_new_worker_may_ask_who_trains_before_it_asks_for_a_quorum(has_left: bool) -> None:
    link = ManagerPlay().opened()
    assert link(lambda machine: machine.return_for_worker(0.0)) == [], "it is there"
    link.leave()
    if has_left:
        link.close()
    orders = link(lambda machine: machine.return_for_worker(0.0))
    assert orders == ([ConfirmLeft(), Connect(2, "a")] if has_left else [])
    assert link(lambda machine: machine.return_for_worker(0.0)) == [], "once is enough"
    if not has_left:
        assert link.close() == [Close(1), ConfirmLeft(), Connect(2, "a")]
    assert link.machine.hello() == Hello("g:2", NO_QUORUM)


def test_a_group_that_leaves_while_it_begins_again_does_not_come_back() -> None:
    link = ManagerPlay().opened()
    link.ask(dataclasses.replace(ASK, new_incarnation=True))
    assert link.leave() == []
    closed, confirmed, answer = link.close()
    assert (closed, confirmed) == (Close(1), ConfirmLeft())
    assert isinstance(answer, AnswerAsker)
    assert link.machine.state is LinkState.LEFT


# -- a list of lighthouses -------------------------------------------------------------------------


def at_second(*lighthouses: str) -> ManagerPlay:
    """Connected with the second of two, because the first one refuses."""
    link = ManagerPlay(*(lighthouses or ("a", "b")))
    link(lambda machine: machine.start(0.0))
    link.close(1)
    assert link.until(MIN_PAUSE_S) == [Connect(2, "b")]
    assert link.open(2) == [Probe(2, ("a",))]
    assert link.probed(number=2) == []
    return link


def test_it_goes_back_between_two_steps_and_nobody_gives_one_up() -> None:
    link = at_second()
    assert without_beats(link.until(2.0)) == [Probe(2, ("a",))]
    assert without_beats(link.until(5.0)) == [], "one look at a time"
    assert link.probed(number=2) == []
    assert without_beats(link.until(5.0)) == [Probe(2, ("a",))], "a slow look makes none rarer"
    why = "it goes back to lighthouse a"
    assert link.probed("a", number=2) == [Leave(why, between_steps=True, ends=False)]
    assert link.close(2) == [Close(2), ConfirmLeft(), Connect(3, "a")]
    assert link.machine.hello() == Hello("g:2", NO_QUORUM)


@pytest.mark.parametrize("late", [QuorumFailed("withdrawn"), quorum(5)], ids=["none", "quorum"])
def test_a_question_goes_back_too(late: Quorum | QuorumFailed) -> None:
    """A quorum of the later lighthouse would train where the job is not any more (F4)."""
    link = at_second()
    assert link.ask() == [question(timeout_s=60.0, sole=False)]
    link.until(2.0)
    why = "it goes back to lighthouse a"
    assert link.probed("a", number=2) == [Leave(why, between_steps=False, ends=False)]
    assert link.answer(late, number=2) == []
    link.close(2)
    (asked,) = link.open(3)
    assert isinstance(asked, Question)
    assert asked.member.replica_id == "g:2"
    assert asked.member.seen_quorum_id == 0


def test_f4_a_group_that_was_frozen_looks_back_before_it_asks() -> None:
    """The others may be at the earlier lighthouse since: it would train alone."""
    link = at_second()
    link.now = 2 * MAX_LOOK_AGE_S
    assert link.ask() == [Probe(2, ("a",))]
    assert link.probed(number=2) == [question(sole=False)]


def test_f4_a_group_that_was_frozen_while_it_asked_looks_back_before_it_accepts_the_answer() -> (
    None
):
    """The answer was published when the others had gone back."""
    link = at_second()
    link.ask()
    link.now = 2 * MAX_LOOK_AGE_S
    assert link.answer(quorum(5), number=2) == [Probe(2, ("a",))]
    assert link.probed(number=2) == [AnswerAsker(7, quorum(5))]
    assert link.ask() != []
    link.now *= 3
    assert link.answer(quorum(6), 2, number=2) == [Probe(2, ("a",))]
    ends, left = link.probed("a", number=2)
    assert ends == TermEnds(5, None, "it goes back to lighthouse a")
    assert isinstance(left, Leave)
    link.close(2)
    (asked,) = link.open(3)
    assert isinstance(asked, Question)


def test_f4_the_others_gather_for_longer_than_a_look_is_believed() -> None:
    assert MAX_LOOK_AGE_S <= GATHER_S


def test_f4_a_look_from_before_it_was_frozen_is_too_old() -> None:
    link = at_second()
    link.until(LOOK_BACK_S + MIN_PAUSE_S)
    link.now = 60.0
    assert link.ask() == []
    assert link.probed(number=2) == [Probe(2, ("a",))]
    link.now += 0.1
    assert link.probed(number=2) == [question(timeout_s=59.9, sole=False)]


def test_f4_a_group_that_is_connected_again_looks_back_before_it_asks() -> None:
    """The group was cut off from all lighthouses, and comes back to the one that it was at."""
    link = at_second()
    link.close(2)
    link.until(link.now + MIN_PAUSE_S)
    assert link.open(3) == [Probe(3, ("a",))]
    assert link.ask() == []
    assert link.probed(number=3) == [question(timeout_s=60.0, sole=False)]


def test_f4_a_newcomer_waits_where_the_others_may_be_elsewhere() -> None:
    link = ManagerPlay("a", "b").opened()
    assert link.ask(NEWCOMER) == [Probe(1, ("b",))]
    assert link.probed("b") == []
    assert without_beats(link.until(NEWCOMER_PAUSE_S - 0.01)) == []
    (asked,) = without_beats(link.until(NEWCOMER_PAUSE_S))
    assert isinstance(asked, Question)


def test_f4_a_newcomer_with_little_time_waits_for_less() -> None:
    link = ManagerPlay("a", "b").opened()
    link.ask(NEWCOMER, timeout_s=2.0)
    link.probed("b")
    (asked,) = without_beats(link.until(2.0 * NEWCOMER_SHARE))
    assert isinstance(asked, Question)


def test_f4_a_newcomer_does_not_wait_for_lighthouses_that_accept_nobody() -> None:
    link = ManagerPlay("a", "b").opened()
    link.ask(NEWCOMER)
    (asked,) = link.probed()
    assert isinstance(asked, Question)
    link.answer(quorum(5))
    (asked,) = link.ask(NEWCOMER)
    assert isinstance(asked, Question), "it is no newcomer any more"


def test_a_newcomer_looks_at_all_others() -> None:
    link = at_second("a", "b", "c")
    assert link.ask(NEWCOMER) == [Probe(2, ("a", "c"))]
    (left,) = link.probed("a", "c", number=2)
    assert isinstance(left, Leave)


# -- a lighthouse that was restarted ---------------------------------------------------------------


def returned(link: ManagerPlay, ask: GroupRequest, timeout_s: float = 60.0) -> list[Order]:
    """Ask while no lighthouse can be reached, connect later, and return the orders of then."""
    link(lambda machine: machine.start(link.now))
    link.close()
    link.until(link.now + MAX_PAUSE_S)
    assert link.ask(ask, timeout_s) == []
    return link.open(2)


def asked(orders: list[Order]) -> bool:
    return any(isinstance(each, Question) for each in orders)


@pytest.mark.parametrize(("timeout_s", "pause_s"), [(60.0, RETURN_S), (0.4, 0.1)])
def test_f8_a_newcomer_that_had_to_wait_for_the_lighthouse_lets_the_members_return(
    timeout_s: float, pause_s: float
) -> None:
    """A short question does not wait for all of that."""
    link = ManagerPlay()
    assert not asked(returned(link, NEWCOMER, timeout_s))
    due_at = link.now + pause_s
    assert not asked(link.until(due_at - 0.01))
    assert asked(link.until(due_at + 0.01))


def test_f8_a_group_that_knows_the_job_or_found_a_lighthouse_at_once_does_not_wait() -> None:
    assert asked(returned(ManagerPlay(), ASK))
    assert asked(ManagerPlay().opened().ask(NEWCOMER))


@pytest.mark.parametrize(
    ("trouble", "pause_s"), [(REFUSED, GO_ON_S), (NotLeader(""), 0.0), (NotLeader("b"), 0.0)]
)
def test_f8_a_newcomer_that_found_a_lighthouse_gone_lets_the_members_come_first(
    trouble: TorchFTError, pause_s: float
) -> None:
    """The members may have lost it at the same moment, and go on to the next of the list, too."""
    link = ManagerPlay("a", "b")
    link(lambda machine: machine.start(0.0))
    link.close(1, trouble)
    link.until(MIN_PAUSE_S)
    assert link.open(2) == [Probe(2, ("a",))]
    asks = [*link.ask(NEWCOMER), *link.probed(number=2)]
    assert asked(asks) is not bool(pause_s)
    assert not asked(link.until(link.now + pause_s - 0.01)) or not pause_s
    assert asked([*asks, *link.until(link.now + 0.01)])


@pytest.mark.parametrize(("seen_quorum_id", "num_groups"), [(8, 4), (5, 3)])
def test_q11_workers_report_to_another_manager_how_many_groups_their_quorum_had(
    seen_quorum_id: int, num_groups: int
) -> None:
    """The manager reports that of the newest quorum, its own ones included."""
    link = ManagerPlay().opened()
    link.ask(ASK)
    link.answer(quorum(5, "g:1", "h:1", "i:1"))
    ask = dataclasses.replace(ASK, round=8, seen_quorum_id=seen_quorum_id, seen_num_groups=4)
    (question,) = [each for each in link.ask(ask) if isinstance(each, Question)]
    assert question.member.last_num_groups == num_groups


def test_f8_a_later_question_does_not_wait_again_unless_the_lighthouse_was_lost_again() -> None:
    link = ManagerPlay()
    returned(link, NEWCOMER)
    link.until(link.now + 1.5 * RETURN_S)
    assert asked(link.ask(dataclasses.replace(NEWCOMER, round=8)))
    link.close(2)
    link.until(link.now + MAX_PAUSE_S)
    assert not asked(link.open(3))
    assert asked(link.until(link.now + RETURN_S + 0.01))
