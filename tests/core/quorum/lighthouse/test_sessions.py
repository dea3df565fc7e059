"""Tests the lighthouse's end of sessions as tables: what comes in, and which orders go out."""

from __future__ import annotations

import math

import pytest

from torchft_svc.core.pausable_clock import PausableClock, usual_look_s
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.jobs import ReportHang, ReportLoss
from torchft_svc.core.quorum.lighthouse.lighthouse import (
    ID_EPOCH_S,
    ID_STRIDE,
    MAX_INFORMED_PER_LOOK,
    MAX_SESSIONS_PER_GROUP,
    REPORT_PAUSE_AFTER_S,
    Lighthouse,
    Order,
    Orders,
    Publish,
    RefuseCall,
    ReportAcceptedLoss,
    ReportCommand,
    ReportPause,
    Send,
    first_quorum_id,
)
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Drain,
    Hello,
    Kill,
    Leave,
    Lost,
    NewcomerWaits,
    News,
    NoQuorumYet,
    Question,
    Refusal,
    SessionMessage,
    Welcome,
    Withdrawal,
)
from torchft_svc.core.quorum.types import NO_QUORUM, LastQuorum, Member, QuorumConfig
from torchft_svc.core.streams import EndStream, ReportStandstill
from torchft_svc.errors import (
    DeadlineExceeded,
    NotLeader,
    QuorumFailed,
    RequestRefused,
    Unreachable,
)

JOB = "job"
LONG_S = 100.0
DAY_S = 86_400.0
BEAT = Beat()
FIRST_ID = 10 * ID_STRIDE


def config(**settings: object) -> QuorumConfig:
    return QuorumConfig(**{"min_replicas": 2, "join_timeout_s": 1.0, **settings})  # type: ignore[arg-type]


class Machine:
    """A machine, whose clock goes on by hand, in looks that are never late."""

    def __init__(self, **settings: object) -> None:
        self.now = 100.0
        self.core = Lighthouse(config(**settings), FIRST_ID, self.now)

    def open(self, stream: int, replica_id: str, last: LastQuorum = NO_QUORUM) -> Orders:
        return self.core.opened(stream, JOB, Hello(replica_id, last), self.now)

    def ask(
        self, stream: int, replica_id: str, number: int = 1, timeout_s: float = LONG_S
    ) -> Orders:
        question = Question(number, Member(replica_id=replica_id), timeout_s)
        return self.core.received(stream, question, self.now)

    def call(self, call: int, replica_id: str, timeout_s: float = LONG_S) -> Orders:
        member = Member(replica_id=replica_id)
        return self.core.called(call, JOB, member, timeout_s, self.now)

    def say(self, stream: int, message: SessionMessage = BEAT) -> Orders:
        return self.core.received(stream, message, self.now)

    def close(self, stream: int) -> Orders:
        return self.core.closed(stream, self.now)

    def after(self, seconds: float) -> list[Order]:
        """What is ordered in the time, in which the living beat."""
        end, orders = self.now + seconds, list[Order]()
        while (at := self.core.next_deadline()) is not None and at <= end:
            self.now = max(self.now, at)
            orders += self.core.tick(self.now)
        self.now = end
        return orders

    def pair(self) -> Publish:
        """``a`` and ``b`` with sessions 1 and 2 have a quorum."""
        self.open(1, "a:1")
        self.open(2, "b:1")
        self.ask(1, "a:1")
        (published,) = self.ask(2, "b:1")
        assert isinstance(published, Publish)
        return published


def news(orders: Orders | list[Order]) -> list[tuple[tuple[int, ...], News]]:
    return [(each.streams, each.news) for each in orders if isinstance(each, Send)]


def losses(orders: Orders | list[Order]) -> list[tuple[str, str]]:
    return [(each.replica_id, each.reason) for each in orders if isinstance(each, ReportLoss)]


# -- hello and welcome -----------------------------------------------------------------------------


def test_a_hello_is_welcomed() -> None:
    assert Machine().open(1, "a:1") == (Send((1,), Welcome(0.0025)),)


def test_who_came_first_has_to_beat_less_often_when_the_job_has_grown() -> None:
    machine = Machine()
    for number in range(200):
        machine.open(number, f"group-{number}:1")
    assert machine.say(0) == (Send((0,), Welcome(0.5)),)
    assert machine.say(0) == machine.say(199) == ()
    for number in range(20, 200):
        machine.close(number)
    assert news(machine.say(0)) == [((0,), Welcome(0.05))]


def test_a_hello_that_cannot_be_leaves_nothing() -> None:
    machine = Machine(max_members_per_job=1)
    machine.open(1, "a:1")
    for replica_id in ("", "b:1"):
        with pytest.raises(RequestRefused):
            machine.open(2, replica_id)
    assert machine.close(2) == ()
    assert machine.core.status("", machine.now)[0].groups[0].replica_id == "a:1"


def test_who_is_back_after_its_last_session_broke_learns_that_it_is_out() -> None:
    machine = Machine()
    quorum = machine.pair().quorum
    machine.close(1)
    back = machine.open(3, "a:1", LastQuorum(quorum.quorum_id, 0))
    lost = Lost("a:1", "its session had ended", quorum.quorum_id)
    assert news(back) == [((3,), Welcome(0.005)), ((3,), lost)]


# -- questions -------------------------------------------------------------------------------------


def test_a_quorum_goes_to_each_that_asked_under_the_number_of_its_question() -> None:
    machine = Machine(min_replicas=3)
    machine.open(1, "a:1")
    machine.open(2, "b:1")
    assert machine.ask(1, "a:1", number=7) == ()
    assert machine.call(50, "c:1") == ()
    (published,) = machine.ask(2, "b:1", number=9)
    assert isinstance(published, Publish)
    assert (published.answers, published.calls) == (((1, 7), (2, 9)), (50,))
    members = [each.replica_id for each in published.quorum.participants]
    assert members == ["a:1", "b:1", "c:1"]


def test_a_session_asks_only_for_its_own_group() -> None:
    machine = Machine()
    machine.open(1, "a:1")
    with pytest.raises(RequestRefused, match="'a:1' cannot ask for 'b:1'"):
        machine.ask(1, "b:1")


def test_a_question_that_is_refused_at_once_is_refused_by_its_number() -> None:
    machine = Machine()
    machine.open(1, "a:1")
    bad = Question(4, Member(replica_id="a:1", step=-1), LONG_S)
    ((streams, refusal),) = news(machine.say(1, bad))
    assert streams == (1,)
    assert isinstance(refusal, Refusal)
    assert (refusal.number, "step is -1" in str(refusal.error)) == (4, True)
    (refused,) = machine.core.called(5, JOB, bad.member, LONG_S, machine.now)
    assert isinstance(refused, RefuseCall)
    assert (refused.call, "step is -1" in str(refused.error)) == (5, True)


@pytest.mark.parametrize("how", ["withdrawn", "asked again", "closed", "cancelled"])
def test_who_waits_no_more_is_in_no_quorum(how: str) -> None:
    machine = Machine()
    machine.open(1, "a:1")
    if how == "cancelled":
        machine.call(50, "a:1")
        assert machine.core.cancelled(50, machine.now) == ()
        assert machine.core.cancelled(50, machine.now) == (), "once"
    else:
        machine.ask(1, "a:1", number=1)
    if how == "withdrawn":
        machine.say(1, Withdrawal(1))
    elif how == "asked again":
        machine.ask(1, "a:1", number=2)
        machine.say(1, Withdrawal(2))
    elif how == "closed":
        machine.close(1)
    machine.call(60, "b:1")
    orders = [*machine.call(70, "c:1"), *machine.after(2.0)]
    (published,) = [each for each in orders if isinstance(each, Publish)]
    assert (published.answers, published.calls) == ((), (60, 70))


def test_a_withdrawal_that_was_overtaken_leaves_the_newer_question() -> None:
    machine = Machine()
    machine.open(1, "a:1")
    machine.ask(1, "a:1", number=1)
    machine.ask(1, "a:1", number=2)
    machine.say(1, Withdrawal(1))
    (published,) = machine.call(50, "b:1")
    assert isinstance(published, Publish)
    assert published.answers == ((1, 2),)


def test_a_newer_question_of_a_group_takes_the_place_of_the_one_over_another_stream() -> None:
    machine = Machine()
    machine.open(1, "a:1")
    machine.open(2, "a:1")
    machine.ask(1, "a:1", number=3)
    ((streams, refusal),) = news(machine.ask(2, "a:1", number=8))
    assert streams == (1,)
    assert isinstance(refusal, Refusal)
    assert (refusal.number, type(refusal.error)) == (3, QuorumFailed)


def test_a_question_expires_at_its_own_time_and_says_what_was_waited_for() -> None:
    machine = Machine(min_replicas=3)
    machine.open(1, "a:1")
    machine.ask(1, "a:1", number=6, timeout_s=1.5)
    machine.call(50, "b:1", timeout_s=0.5)
    assert machine.after(0.4) == []
    (refused,) = machine.after(0.2)
    assert isinstance(refused, RefuseCall)
    late = DeadlineExceeded("quorum", 0.5, "2 of at least 3 groups ask (--min-replicas)")
    assert (refused.call, str(refused.error)) == (50, str(late))
    assert machine.after(0.8) == []
    ((streams, refusal),) = news(machine.after(0.2))
    late = DeadlineExceeded("quorum", 1.5, "1 of at least 3 groups ask (--min-replicas)")
    assert (streams, str(refusal)) == ((1,), str(Refusal(6, late)))
    assert machine.say(1, Withdrawal(6)) == (), "nobody waits for it"
    sessions = machine.core._sessions
    assert sessions.questions == sessions.calls == sessions.pauses == {}


def test_an_expired_question_is_answered_if_the_one_before_makes_room_for_a_quorum() -> None:
    """Questions that expire at the same instant are withdrawn one after the other."""
    machine = Machine(min_replicas=1)
    machine.core.heartbeat(JOB, "c:1", machine.now)
    machine.call(1, "a:1", timeout_s=0.5)
    machine.call(2, "b:1", timeout_s=0.5)
    orders = machine.after(0.6)
    reported = [each.call for each in orders if isinstance(each, RefuseCall)]
    reported += [call for each in orders if isinstance(each, Publish) for call in each.calls]
    assert sorted(reported) == [1, 2], "each once"


# -- the reason is sent --------------------------------------------------------------------------


def test_who_waits_long_learns_why_and_again_when_that_changes() -> None:
    machine = Machine()
    machine.open(1, "a:1")
    machine.ask(1, "a:1")
    why = "1 of at least 2 groups ask (--min-replicas)"
    later = "2 of at least 3 groups ask (--min-replicas)"
    assert machine.after(REPORT_PAUSE_AFTER_S - 0.1) == []
    assert machine.after(0.2) == [ReportPause(JOB, 2.0, why), Send((1,), NoQuorumYet(why))]
    machine.say(1)
    assert machine.after(REPORT_PAUSE_AFTER_S) == [], "that is known"
    machine.say(1)
    machine.core.called(50, JOB, Member(replica_id="b:1", min_replicas=3), LONG_S, machine.now)
    machine.open(2, "a:1")
    reported = machine.after(REPORT_PAUSE_AFTER_S)
    assert reported == [ReportPause(JOB, 6.0, later), Send((1,), NoQuorumYet(later))]


def test_of_very_many_only_some_are_informed_at_a_time() -> None:
    machine = Machine(min_replicas=5000, heartbeat_timeout_s=LONG_S)
    for number in range(MAX_INFORMED_PER_LOOK + 1):
        machine.open(number, f"g{number}:1")
        machine.ask(number, f"g{number}:1")
    first, then = (news(machine.after(REPORT_PAUSE_AFTER_S + 0.1)) for _ in range(2))
    assert [len(streams) for streams, _ in first] == [MAX_INFORMED_PER_LOOK]
    assert [streams for streams, _ in then] == [(MAX_INFORMED_PER_LOOK,)]


def test_jobs_that_wait_are_looked_at_each_in_its_turn() -> None:
    machine = Machine()
    for number, job in enumerate(("x", "y")):
        machine.core.called(number, job, Member(replica_id="a:1"), LONG_S, machine.now)
        machine.after(0.5)
    reported = [each.job for each in machine.after(3.7) if isinstance(each, ReportPause)]
    assert reported == ["x", "y"]
    assert machine.core.next_deadline() is not None


# -- the end of sessions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "its session ended"),
        (Unreachable("client", "a:1", "it has gone"), "its session ended"),
        (RequestRefused("nonsense"), "its session was refused: nonsense"),
    ],
)
def test_the_end_of_its_last_session_takes_a_group_out(
    error: Exception | None, reason: str
) -> None:
    machine = Machine()
    quorum_id = machine.pair().quorum.quorum_id
    orders = machine.core.closed(1, machine.now, error)  # type: ignore[arg-type]
    assert losses(orders) == [("a:1", reason)]
    assert news(orders) == [((2,), Lost("a:1", reason, quorum_id))]
    assert machine.core.closed(1, machine.now, error) == (), "once"  # type: ignore[arg-type]


def test_a_group_with_another_session_is_not_lost() -> None:
    machine = Machine()
    machine.pair()
    machine.open(3, "a:1")
    assert machine.close(1) == ()
    assert losses(machine.close(3)) == [("a:1", "its session ended")]


def test_all_sessions_of_a_group_receive_its_news() -> None:
    machine = Machine()
    machine.pair()
    machine.open(3, "a:1")
    machine.open(4, "n:1")
    ((streams, reported),) = news(machine.ask(4, "n:1"))
    assert (sorted(streams), reported) == ([1, 2, 3], NewcomerWaits("n:1"))


def test_of_many_sessions_of_one_group_the_most_silent_is_ended() -> None:
    machine = Machine()
    machine.open(0, "a:1")
    machine.ask(0, "a:1")
    for stream in range(1, MAX_SESSIONS_PER_GROUP):
        machine.open(stream, "a:1")
    machine.say(0)
    ended = machine.open(99, "a:1")
    reported = f"'a:1' has {MAX_SESSIONS_PER_GROUP} others, this one was silent the longest"
    (end,) = [each for each in ended if isinstance(each, EndStream)]
    assert (end.stream, str(end.error)) == (1, reported)
    assert machine.say(1, Leave()) == (), "nothing comes over it any more"
    assert machine.close(1) == ()
    (published,) = machine.call(50, "b:1")
    assert isinstance(published, Publish)
    assert published.answers == ((0, 1),)


def test_who_leaves_is_out_at_once_and_its_question_is_refused() -> None:
    machine = Machine()
    machine.pair()
    machine.ask(1, "a:1", number=5)
    loss, refusal, lost, end = machine.say(1, Leave("preempted"))
    assert losses((loss,)) == [("a:1", "preempted")]
    assert isinstance(lost, Send)
    refused = QuorumFailed("'a:1' is out: preempted")
    assert {str(each.news) for each in (refusal, lost) if isinstance(each, Send)} >= {
        str(Refusal(5, refused))
    }
    assert end == EndStream(1)
    assert machine.close(1) == machine.say(1) == ()


def test_who_leaves_is_out_whatever_other_sessions_it_has() -> None:
    machine = Machine()
    machine.pair()
    machine.open(3, "a:1")
    assert losses(machine.say(1, Leave(ends=True))) == [("a:1", "it has left")]


def test_who_leaves_between_two_steps_is_missed_by_nobody() -> None:
    machine = Machine()
    machine.pair()
    orders = machine.say(1, Leave("drained", between_steps=True, ends=True))
    assert losses(orders) == [("a:1", "drained")]
    assert news(orders) == []


def test_a_reason_that_is_too_long_changes_nothing() -> None:
    machine = Machine()
    machine.open(1, "a:1")
    machine.core.heartbeat(JOB, "b:1", machine.now)
    for leave in (
        lambda: machine.say(1, Leave("x" * 2000)),
        lambda: machine.core.left(JOB, "b:1", Leave("x" * 2000), machine.now),
    ):
        with pytest.raises(RequestRefused):
            leave()
    assert len(machine.core.status(JOB, machine.now)[0].groups) == 2


def test_a_group_without_a_session_leaves_too() -> None:
    machine = Machine()
    machine.core.heartbeat(JOB, "b:1", machine.now)
    assert losses(machine.core.left(JOB, "b:1", Leave(), machine.now)) == [("b:1", "it has left")]


# -- beats, hangs, operators, terms ----------------------------------------------------------------


def test_who_beats_lives_and_who_does_not_is_lost() -> None:
    machine = Machine(heartbeat_timeout_s=5.0)
    machine.open(1, "a:1")
    machine.open(2, "b:1")
    for _ in range(4):
        assert losses(machine.after(3.0)) in ([], [("b:1", "no sign of life for 5 s")])
        machine.say(1)
    assert [each.replica_id for each in machine.core.status(JOB, machine.now)[0].groups] == ["a:1"]


def test_who_hangs_is_killed_over_its_session() -> None:
    machine = Machine(hang_timeout_s=3.0, on_hang="kill")
    machine.open(1, "a:1")
    machine.say(1, Beat(Phase.TRAINING, 7, 2.0))
    hang, kill = machine.after(1.5)
    assert isinstance(hang, ReportHang)
    assert kill == Send((1,), Kill("it hangs: training in step 7 for 3.0 s"))


def test_an_operator_reaches_a_group_by_its_name() -> None:
    machine = Machine()
    machine.pair()
    for command in (Drain("enough"), Kill("enough")):
        reported = machine.core.commanded(JOB, "a", command, machine.now)
        assert reported == (Send((1,), command), ReportCommand(JOB, "a:1", command))
    (loss,) = [each for each in machine.close(1) if isinstance(each, ReportLoss)]
    assert (loss.reason, loss.is_orderly) == ("killed: enough", True)


@pytest.mark.parametrize("command", [Drain("enough"), Kill("enough")])
def test_a_session_begins_with_the_command_that_the_one_before_may_have_lost(
    command: Drain | Kill,
) -> None:
    """The old stream seems to be open, but nothing arrives there."""
    machine = Machine()
    machine.pair()
    machine.core.commanded(JOB, "a", command, machine.now)
    for stream in (3, 4):
        welcome, repeated = machine.open(stream, "a:1")
        assert isinstance(welcome, Send)
        assert repeated == Send((stream,), command)
    assert len(machine.open(5, "b:1")) == 1, "nobody drains it"
    machine.say(4, Leave("drained", between_steps=True, ends=True))
    assert len(machine.open(6, "a:1")) == 1, "it has left: this is its next life"


def test_a_command_that_is_repeated_has_the_time_that_is_left() -> None:
    machine = Machine(heartbeat_timeout_s=100.0)
    machine.pair()
    machine.core.commanded(JOB, "a", Drain("enough", within_s=30.0), machine.now)
    for passed_s, left_s in ((10.0, 20.0), (50.0, 0.0)):
        machine.after(passed_s)
        assert machine.open(3, "a:1")[-1] == Send((3,), Drain("enough", within_s=left_s))
        machine.close(3)


def test_who_is_killed_is_not_drained_instead() -> None:
    machine = Machine()
    machine.pair()
    for command in (Drain("later"), Kill("now"), Drain("later")):
        machine.core.commanded(JOB, "a", command, machine.now)
    assert machine.open(3, "a:1")[-1] == Send((3,), Kill("now"))


@pytest.mark.parametrize(
    ("name", "reason"), [("x", "no living group 'x'"), ("c:1", "has no session")]
)
def test_an_operator_learns_whom_he_cannot_reach(name: str, reason: str) -> None:
    machine = Machine()
    machine.core.heartbeat(JOB, "c:1", machine.now)
    with pytest.raises(RequestRefused, match=reason):
        machine.core.commanded(JOB, name, Kill(""), machine.now)
    (loss,) = [
        each
        for each in machine.core.left(JOB, "c:1", Leave(), machine.now)
        if isinstance(each, ReportLoss)
    ]
    assert not loss.is_orderly, "it was not killed"


def test_an_operator_accepts_a_loss() -> None:
    machine = Machine(min_replicas=1, on_step_regression="hold")
    machine.core.called(1, JOB, Member(replica_id="a:1", step=9), LONG_S, machine.now)
    machine.core.heartbeat(JOB, "b:1", machine.now)
    machine.core.left(JOB, "a:1", Leave(), machine.now)
    machine.core.called(2, JOB, Member(replica_id="b:1", step=3), LONG_S, machine.now)
    machine.after(0.5)
    accepted, published = machine.core.loss_accepted(JOB, machine.now)
    assert accepted == ReportAcceptedLoss(JOB, 9)
    assert isinstance(published, Publish)
    assert published.calls == (2,)
    with pytest.raises(RequestRefused, match="no loss to accept"):
        machine.core.loss_accepted(JOB, machine.now)


def test_at_the_end_of_a_term_all_are_informed_and_forgotten() -> None:
    machine = Machine(min_replicas=3)
    machine.open(1, "a:1")
    machine.ask(1, "a:1")
    machine.call(50, "b:1")
    over = NotLeader("there:1")
    reported = machine.core.lead_ended(over, 20 * ID_STRIDE, machine.now)
    assert reported == (RefuseCall(50, over), EndStream(1, over))
    assert machine.close(1) == machine.core.cancelled(50, machine.now) == ()
    assert machine.core.status("", machine.now) == []
    assert machine.core.next_deadline() is None


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instants", "reported"),
    [
        ([101, 102.9, 103], [1, 2.9, 3]),  # late, but as a busy machine is
        ([101, 108, 109], [1, 2, 3]),  # stopped for 6 s
        ([103, 106, 107], [1, 2, 3]),  # twice
    ],
)
def test_time_without_a_look_does_not_count(instants: list[float], reported: list[float]) -> None:
    clock = PausableClock(1.0, 100.0)
    assert [clock.now(at) - 100 for at in instants] == pytest.approx(reported)
    assert clock.missed_s == pytest.approx(instants[-1] - reported[-1] - 100)


@pytest.mark.parametrize(
    ("timeout_s", "look_s"), [(0.001, 0.02), (0.8, 0.1), (5.0, 0.5), (1e9, 0.5)]
)
def test_it_looks_a_few_times_in_every_timeout(timeout_s: float, look_s: float) -> None:
    assert usual_look_s(timeout_s) == pytest.approx(look_s)


def test_a_standstill_is_nobody_s_silence() -> None:
    machine = Machine(heartbeat_timeout_s=5.0, hang_timeout_s=5.0)
    machine.open(1, "a:1")
    machine.ask(1, "a:1", timeout_s=8.0)
    machine.after(1.0)
    machine.say(1, Beat(Phase.TRAINING, 1, 0.0))
    machine.now += 1000.0
    assert machine.core.tick(machine.now) == (ReportStandstill(pytest.approx(999.5)),)
    assert machine.core.tick(machine.now) == (), "reported once"
    machine.say(1)
    assert losses(machine.after(4.0)) == []
    machine.say(1)
    assert any(isinstance(each, Refusal) for _, each in news(machine.after(3.0)))


def test_no_deadline_is_passed_over_and_none_comes_again_at_once() -> None:
    machine = Machine()
    machine.open(1, "a:1")
    machine.now += 1234.5678
    machine.core.tick(machine.now)
    machine.ask(1, "a:1", timeout_s=0.123)
    while (at := machine.core.next_deadline()) is not None:
        assert at > machine.now
        machine.now = at
        machine.core.tick(at)
    assert machine.core.status("", machine.now) == []


def test_time_goes_on_while_nobody_is_there() -> None:
    """A lighthouse that stands by for days is not looked at.

    Groups that come to it then report ids that are ahead of its beginning by as much.
    """
    reported = FIRST_ID + int(3 * DAY_S * 1000) * ID_STRIDE
    machine = Machine()
    with pytest.raises(RequestRefused, match="was never issued"):
        machine.open(1, "a:1", LastQuorum(reported, 9))
    machine.now += 3 * DAY_S
    assert news(machine.open(1, "a:1", LastQuorum(reported, 9))) == [((1,), Welcome(0.0025))]


def test_ids_follow_the_wall_clock() -> None:
    assert first_quorum_id(0.0, 7) == 7
    assert first_quorum_id(ID_EPOCH_S + 2.0, 7) == 2000 * ID_STRIDE + 7
    assert math.log2(first_quorum_id(ID_EPOCH_S + 69 * 365.25 * DAY_S, 0)) < 53
