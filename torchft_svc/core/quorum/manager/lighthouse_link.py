"""Decides what a manager does with its lighthouses: where to connect, what to ask, when to move.

`LinkMachine` is told what happens, with ``now`` in monotonic seconds, and has orders for the shell,
which owns the streams and the timers. A question is repeated over a lighthouse's restart, and
withdrawn when nobody waits for it; a group that moves or restarts leaves first, and comes back as
another incarnation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from torchft_svc.core.limits import one_line
from torchft_svc.core.quorum.assignment import check_answer
from torchft_svc.core.quorum.manager.link_types import (
    AnswerAsker,
    Close,
    ConfirmLeft,
    Connect,
    Incarnation,
    LinkConfig,
    LinkConnection,
    LinkQuestion,
    LinkState,
    Log,
    Order,
    Probe,
    SendBeat,
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
from torchft_svc.core.route import LOOK_BACK_S, MIN_PAUSE_S, Backoff, Route
from torchft_svc.errors import (
    DeadlineExceeded,
    NotLeader,
    PeerError,
    QuorumFailed,
    TorchFTError,
    Unauthorized,
    Unreachable,
)

# A lighthouse that takes the connection but does not answer is as good as none.
WELCOME_TIMEOUT_S = 2.0
# The lighthouse's own refusal, which knows the reason, should be here before we stop waiting.
REFUSAL_GRACE_S = 0.25
# Leaving is a courtesy: a lighthouse that does not answer must not hold up the end.
LEAVE_TIMEOUT_S = 1.0
# A lighthouse may want fewer heartbeats; one that wants none for a minute is mistaken, and a group
# that obeyed would count as dead.
MAX_WANTED_INTERVAL_S = 60.0
# A group that has trained keeps trying when its lighthouse does not trust it any more. Its workers
# begin another step as soon as they get the error, and would compute and log for nothing.
DISTRUST_PAUSE_S = 0.5
# The reason is repeated in the log, so that it is near the end.
LOG_AGAIN_S = 5.0
# So old the last look at earlier lighthouses may be when a later one is asked, and when it answers
# (F4): groups gather there for as long (Q11). One look after the other at a silent one is no older.
MAX_LOOK_AGE_S = 2 * LOOK_BACK_S

_LEFT = "this group has left the lighthouse"


@dataclass(slots=True)
class LinkMachine:
    """``new_replica_id`` names an incarnation, ``draw`` gives numbers from 0 to 1.

    ``reached`` tells the step that all workers have reached. ``address`` is where others reach this
    manager, to be set before `start`. Inputs about a connection that is over are ignored.
    """

    config: LinkConfig
    new_replica_id: Callable[[], str]
    draw: Callable[[], float]
    reached: Callable[[], int] = int
    address: str = ""
    seen_quorum_id: int = 0  # of the newest quorum that the group has received (0: none)
    state: LinkState = LinkState.PAUSED
    _restarts: bool = False  # as soon as it has left
    _last_num_groups: int = 0
    _is_sole: bool = True  # no group of a quorum has known another lighthouse
    _last: LastQuorum = NO_QUORUM  # that the group was in with the workers that it has now
    _told_why: str = ""  # there is no quorum yet; by the lighthouse, about the last question
    _num_connections: int = 0
    _num_questions: int = 0
    _connection: LinkConnection | None = None
    _question: LinkQuestion | None = None
    _orders: list[Order] = field(default_factory=list)
    _route: Route = field(init=False)
    _me: Incarnation = field(init=False)

    def __post_init__(self) -> None:
        self._route = Route(self.config.lighthouses)
        me = self.config.resumed or Resumed(replica_id=self.new_replica_id())
        self._begin_incarnation(me.replica_id)
        self._last = LastQuorum(me.quorum_id, max(0, me.step - 1))  # as in `_connect`
        self.seen_quorum_id, self._last_num_groups = me.quorum_id, me.num_groups
        self._is_sole = self.config.resumed is None

    @property
    def replica_id(self) -> str:
        """Of this incarnation."""
        return self._me.replica_id

    @property
    def why_no_quorum(self) -> str:
        """What the open question waits for; empty: the lighthouse does not say."""
        return self._told_why if self.state is LinkState.OPEN else str(self._me.why_not)

    def take_orders(self) -> tuple[Order, ...]:
        """The orders of the inputs since the last call; to be called after each input."""
        orders, self._orders = tuple(self._orders), []
        return orders

    # -- inputs of the manager -------------------------------------------------------------------

    def start(self, now: float) -> None:
        self._connect(now)

    def ask(self, ask: GroupRequest, timeout_s: float, now: float) -> None:
        """The group asks for a quorum with it as a member; replaces the question before.

        `AnswerAsker` tells the outcome: `PeerError` if there is none within ``timeout_s``, or no
        lighthouse for the connect timeout; `RequestRefused` or `Unauthorized` if the group is not
        accepted.
        """
        self._withdraw()
        self._question = LinkQuestion(ask, now + timeout_s, timeout_s, self.config.quorum_retries)
        if ask.new_incarnation:
            self._last = NO_QUORUM
            self._begin_again(Leave("a worker of the group was restarted"), now)
        self._begin_attempt(now)

    def withdraw(self, round_: int, now: float) -> None:
        """Nobody waits for the outcome of ``round_`` any more."""
        if self._question is not None and self._question.ask.round == round_:
            self._withdraw()

    def leave(self, leave: Leave, now: float) -> None:
        """`ConfirmLeft` follows, soon. An answer may come before it."""
        self._restarts = False
        if self.state is LinkState.OPEN:
            self._send_leave(leave, now)
        elif self.state is not LinkState.LEAVING:
            self._have_left(now)

    # -- inputs of a connection ------------------------------------------------------------------

    def introduced(self, number: int, now: float) -> None:
        """The lighthouse was reached: it has to answer now."""
        connection = self._current(number)
        if connection is not None and self.state is LinkState.OPENING:
            connection.closes_at = now + WELCOME_TIMEOUT_S

    def not_supported(self, number: int, now: float) -> None:
        """It has no sessions, like the public release's lighthouse: heartbeats and questions are
        calls."""
        connection = self._current(number)
        if connection is not None and self.state is LinkState.OPENING:
            self._log("info", "the lighthouse has no sessions, sending heartbeats")
            connection.is_unary = True
            connection.interval_s = self.config.heartbeat_interval_s
            connection.closes_at = math.inf
            self._beat(connection, now)

    def welcomed(self, number: int, min_interval_s: float, now: float) -> None:
        """The lighthouse takes this group, and wants no more than one heartbeat in
        ``min_interval_s``; without a session it says so in answer to each heartbeat."""
        connection = self._current(number)
        if connection is None or self.state not in (LinkState.OPENING, LinkState.OPEN):
            return
        wanted_s = min(min_interval_s, MAX_WANTED_INTERVAL_S)
        connection.interval_s = max(self.config.heartbeat_interval_s, wanted_s)
        if connection.is_unary:
            self._plan_call(connection, now)
        elif self.state is LinkState.OPENING:
            connection.beat_at = now + connection.interval_s * self._between(0.9)
        if self.state is LinkState.OPENING:
            self._opened(connection, now)

    def beat_at_once(self, now: float) -> None:
        """Send the next beat now, if there is a session: it carries what people wait for."""
        if self._connection is not None and self.state is LinkState.OPEN:
            self._beat(self._connection, now)

    def beat_was_late(self, number: int, now: float) -> None:
        """A heartbeat without a session was not answered in time; that breaks nothing."""
        connection = self._current(number)
        if connection is not None:
            self._plan_call(connection, now)

    def answered(
        self, number: int, question: int, outcome: Quorum | TorchFTError, now: float
    ) -> None:
        """Question ``question`` has an outcome (0: the number is not known; the last one is
        meant)."""
        connection, asked = self._current(number), self._question
        if connection is None:
            return
        if asked is None or not asked.number or question not in (0, asked.number):
            if isinstance(outcome, Quorum) and question:
                # The others may go on with it; the next quorum reunites them.
                self._log("info", f"dropped the answer to question {question}, which was given up")
            return
        assert asked.member is not None
        if isinstance(outcome, Quorum):
            try:
                check_answer(asked.member, outcome, ids_grow=not connection.is_unary)
            except QuorumFailed as error:
                outcome = error
        if isinstance(outcome, Quorum) and not self._has_looked(connection, now):
            asked.held = outcome
        else:
            self._conclude(asked, outcome, now)

    def news(self, number: int, why_no_quorum: str = "") -> bool:
        """Whether news over connection ``number`` are to be passed on; ``why_no_quorum``: what
        the last question waits for, if they say that."""
        is_current = self._current(number) is not None
        if is_current and why_no_quorum:
            self._told_why = why_no_quorum
        return is_current

    def probed(self, number: int, takers: Collection[str], now: float) -> None:
        """Of the lighthouses of a `Probe`, ``takers`` would take this group."""
        connection = self._current(number)
        if connection is None or self.state is not LinkState.OPEN:
            return
        better = next((each for each in self._route.preferred if each in takers), None)
        if better is not None:
            self._go_back(better, now)
            return
        connection.looked_at = connection.probing_since
        if set(self._others(connection)) <= set(connection.probing):
            connection.has_rivals = bool(takers)
        connection.probing = ()
        # A look that takes long, because nobody answers, makes the next one no rarer.
        next_at = connection.probing_since + LOOK_BACK_S * self._between(0.5)
        connection.look_at = max(now, next_at) if self._route.preferred else math.inf
        question = self._question
        if question is not None and question.held is not None:
            self.answered(number, question.number, question.held, now)
        self._pursue(now)

    def closed(self, number: int, error: TorchFTError, now: float) -> None:
        """The connection broke because of ``error``, or the lighthouse ended it."""
        if self._current(number) is None:
            return
        if self.state is LinkState.LEAVING:
            self._have_left(now)
        else:
            self._lose(error, now)

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self, now: float) -> float:
        """When to call `tick` (inf: not before another input)."""
        connection, question = self._connection, self._question
        found = [math.inf]
        if self.state is LinkState.PAUSED:
            found.append(self._me.retry_at)
        elif connection is not None:
            found += [connection.closes_at, connection.beat_at, connection.look_at]
        if question is not None:
            found.append(question.expires_at if question.number else question.deadline)
            if question.again_at > -math.inf:
                found.append(question.again_at)
            elif not question.number and self.state in (LinkState.PAUSED, LinkState.OPENING):
                found.append(question.gives_up_at)
            elif connection is not None:
                found += question.looks_at(connection, now)
        return min(found)

    def tick(self, now: float) -> None:
        """To be called at `next_deadline`; too early is harmless."""
        connection, question = self._connection, self._question
        if self.state is LinkState.PAUSED and now >= self._me.retry_at:
            self._connect(now)
        elif connection is not None and now >= connection.closes_at:
            if self.state is LinkState.LEAVING:
                self._have_left(now)
            else:
                self._lose(Unreachable("lighthouse", connection.address, "it does not answer"), now)
        elif connection is not None and self.state is not LinkState.LEAVING:
            self._tick_connection(connection, now)
        if question is not None and question is self._question:
            self._tick_question(question, now)

    def _tick_connection(self, connection: LinkConnection, now: float) -> None:
        if now >= connection.beat_at:
            silent_s = now - connection.asked_at  # a question is a sign of life, too
            wait_s = connection.interval_s - silent_s
            if connection.is_unary or silent_s >= 0.9 * connection.interval_s:
                self._beat(connection, now)
                wait_s = math.inf if connection.is_unary else connection.interval_s
            connection.beat_after(wait_s * self._between(0.9), now, self.config)
        if now >= connection.look_at:
            self._look(connection, self._route.preferred, now)

    def _tick_question(self, question: LinkQuestion, now: float) -> None:
        if not question.number:
            self._pursue(now)
        elif now >= question.expires_at:
            self._send_withdrawal(question)
            silent = DeadlineExceeded("quorum", question.timeout_s, "the lighthouse is silent")
            self._fail(question, silent, now)

    # -- connecting ------------------------------------------------------------------------------

    def _begin_incarnation(self, replica_id: str) -> None:
        why_not = self._unreachable("there is no connection yet")
        self._me = Incarnation(replica_id, Backoff(self.draw), why_not)

    def _connect(self, now: float) -> None:
        self._num_connections += 1
        address = self._route.current
        self._connection = connection = LinkConnection(
            self._num_connections, address, closes_at=now + WELCOME_TIMEOUT_S
        )
        self.state = LinkState.OPENING
        last = self._last.reached(self.reached() - 1)  # its last step may be its alone (rule E5)
        hello = Hello(self._me.replica_id, last, self._last_num_groups if last.quorum_id else 0)
        self._orders.append(Connect(connection.number, address, hello))

    def _opened(self, connection: LinkConnection, now: float) -> None:
        self.state = LinkState.OPEN
        self._route.worked()
        me = self._me
        connection.pause_s = me.opened()
        connection.closes_at = math.inf
        connection.opened_at = now
        if self._route.preferred:
            self._look(connection, self._route.preferred, now)
        self._pursue(now)

    def _lose(self, error: TorchFTError, now: float) -> None:
        """The connection is over, but the group has not left."""
        self._close()
        question, me = self._question, self._me
        self.state = LinkState.PAUSED
        self._log_trouble(error, now)
        leader = error.leader if isinstance(error, NotLeader) else ""
        all_failed = not self._route.go_on(leader)
        reason = error.reason if isinstance(error, Unreachable) else str(error)
        is_distrusted = all_failed and isinstance(error, Unauthorized)
        me.why_not = error if is_distrusted else self._unreachable(reason)
        me.failed(error, everywhere=all_failed)
        me.retry_at = now + me.backoff.pause_s()
        if question is not None and question.number:
            self._conclude(question, error if isinstance(error, Unauthorized) else me.why_not, now)
        self._pursue(now)

    def _log_trouble(self, error: TorchFTError, now: float) -> None:
        me = self._me
        if me.failing_since is None:
            me.failing_since = me.logged_at = now
            what = "lost the lighthouse" if me.was_open else "there is no lighthouse"
            self._log("warning", f"{what}: {error}")
        elif now - me.logged_at >= LOG_AGAIN_S:
            me.logged_at = now
            self._log("warning", f"no lighthouse for {now - me.failing_since:.0f} s: {error}")

    def _close(self) -> None:
        if self._connection is not None:
            self._orders.append(Close(self._connection.number))
            self._connection = None

    # -- leaving, and beginning again ------------------------------------------------------------

    def _send_leave(self, leave: Leave, now: float) -> None:
        assert self._connection is not None
        self.state = LinkState.LEAVING
        connection = self._connection
        connection.closes_at = now + LEAVE_TIMEOUT_S
        connection.beat_at = connection.look_at = math.inf  # a beat would bring the group back
        # The lighthouse refuses a longer reason, and takes a session that breaks for a loss.
        self._orders.append(replace(leave, reason=one_line(leave.reason)))

    def _begin_again(self, leave: Leave, now: float) -> None:
        """As another incarnation; this one leaves, if it has not."""
        self._restarts = True
        if self.state is LinkState.OPEN:
            self._send_leave(leave, now)
        elif self.state is not LinkState.LEAVING:
            self._have_left(now)

    def _have_left(self, now: float) -> None:
        self._close()
        self._orders.append(ConfirmLeft())
        question = self._question
        if self._restarts:
            self._restarts = False
            self._begin_incarnation(self.new_replica_id())
            self._connect(now)
            if question is not None:
                question.number, question.held = 0, None
                question.gives_up_at = self._gives_up_at(question, now)
            return
        self.state = LinkState.LEFT
        if question is not None:
            self._end(question, QuorumFailed(_LEFT))

    def _go_back(self, address: str, now: float) -> None:
        """Move to the earlier lighthouse that would take the group, as a new incarnation (F3).

        At once, also within a step: a group that asks there waits for this one, and does not train
        alone. The peers are not told then, because they would discard their step.
        """
        self._log("info", f"lighthouse {address} accepts this group again, returning to it")
        is_asking = self._question is not None and self._question.number > 0
        self._route.go_back(address)
        leave = Leave(f"it goes back to lighthouse {address}", between_steps=not is_asking)
        # The others know this group by its old name, and would not hear of its loss.
        if self._last.quorum_id:
            self._orders.append(TermEnds(self._last.quorum_id, None, leave.reason))
        self._begin_again(leave, now)

    # -- looking at other lighthouses ------------------------------------------------------------

    def _look(self, connection: LinkConnection, addresses: tuple[str, ...], now: float) -> None:
        connection.look_at = math.inf
        if not connection.probing:
            connection.probing, connection.probing_since = addresses, now
            self._orders.append(Probe(connection.number, addresses))

    def _is_settled(self, question: LinkQuestion, connection: LinkConnection, now: float) -> bool:
        """Whether the job is at this lighthouse, as far as can be known, or will be here (F4)."""
        if not self._has_looked(connection, now):
            return False
        if not self._is_newcomer(question) or now >= question.settles_at(connection):
            return True
        others = self._others(connection)
        if others and connection.has_rivals is None:
            self._look(connection, others, now)
            return False
        return not connection.has_rivals and now >= question.begins_at(connection)

    def _has_looked(self, connection: LinkConnection, now: float) -> bool:
        """Whether no earlier lighthouse takes this group, so that the others are not there."""
        if self.state is LinkState.LEAVING:
            return not self._restarts
        if not self._route.preferred or now - connection.looked_at <= MAX_LOOK_AGE_S:
            return True
        self._look(connection, self._route.preferred, now)
        return False

    def _others(self, connection: LinkConnection) -> tuple[str, ...]:
        """The rest of the list; none if this lighthouse is not in it: then the leader is
        elected."""
        if connection.address not in self._route.addresses:
            return ()
        return tuple(each for each in self._route.addresses if each != connection.address)

    def _is_newcomer(self, question: LinkQuestion) -> bool:
        """The group knows nothing about the job."""
        return self._last == NO_QUORUM and not question.ask.has_history

    # -- asking ----------------------------------------------------------------------------------

    def _gives_up_at(self, question: LinkQuestion, now: float) -> float:
        return min(question.deadline, now + self.config.connect_timeout_s)

    def _begin_attempt(self, now: float) -> None:
        assert self._question is not None
        self._question.gives_up_at = self._gives_up_at(self._question, now)
        self._pursue(now)

    def _pursue(self, now: float) -> None:
        """Ask if that is possible now, or give up if that is due."""
        question, connection = self._question, self._connection
        if question is None or question.number or now < question.again_at:
            return
        question.again_at = -math.inf
        if question.distrust is not None:
            self._end(question, question.distrust)
        elif self.state is LinkState.LEFT:
            self._end(question, QuorumFailed(_LEFT))
        elif now >= question.deadline:
            late = DeadlineExceeded("quorum", 0.0, "no time is left")
            self._fail(question, self._me.why_not if connection is None else late, now)
        elif self.state is LinkState.OPEN:
            assert connection is not None
            if self._is_settled(question, connection, now):
                self._send_question(question, connection, now)
        elif self.state is not LinkState.LEAVING:
            why_not = self._me.why_not
            if isinstance(why_not, Unauthorized):
                self._fail_distrusted(question, why_not, now)
            elif now >= question.gives_up_at:
                self._fail(question, why_not, now)

    def _send_question(
        self, question: LinkQuestion, connection: LinkConnection, now: float
    ) -> None:
        ask = question.ask
        self._told_why = ""
        if ask.seen_quorum_id > self.seen_quorum_id:  # the workers had another manager
            self.seen_quorum_id, self._last_num_groups = ask.seen_quorum_id, ask.seen_num_groups
        self._num_questions += 1
        number = question.number = self._num_questions
        question.sent_at, question.timeout_s = now, question.deadline - now
        question.expires_at = question.deadline + REFUSAL_GRACE_S
        connection.asked_at = now
        question.member = Member(
            replica_id=self._me.replica_id,
            address=self.address,
            store_address=self.config.store_address,
            step=ask.step,
            world_size=self.config.group_world_size,
            shrink_only=ask.shrink_only,
            commit_failures=ask.commit_failures,
            seen_quorum_id=self.seen_quorum_id,
            min_replicas=self.config.min_replicas,
            last_num_groups=self._last_num_groups,
            unhealed=ask.unhealed,
            has_history=ask.has_history,
            layout=ask.layout,
            step_quorum_id=ask.step_quorum_id,
            steady=ask.steady and not connection.is_unary,
            sole_lighthouse=self._is_sole and self._route.is_sole,
        )
        self._orders.append(Question(number, question.member, question.timeout_s, ask.agreed))

    def _conclude(self, question: LinkQuestion, outcome: Quorum | TorchFTError, now: float) -> None:
        """The lighthouse has answered; it does not hold the question any more."""
        question.number, question.held = 0, None
        if isinstance(outcome, Quorum):
            self.seen_quorum_id = max(self.seen_quorum_id, outcome.quorum_id)
            self._last_num_groups = len(outcome.participants)
            self._is_sole &= all(each.sole_lighthouse for each in outcome.participants)
            self._last = LastQuorum(outcome.quorum_id, outcome.max_step)
            self._end(question, outcome)
        elif self.state is LinkState.LEAVING and isinstance(outcome, PeerError):
            self._pursue(now)  # withdrawn by leaving: asked again elsewhere, if it goes on there
        elif isinstance(outcome, Unreachable | NotLeader):
            self._log("info", f"the lighthouse could not be asked: {outcome}")
            if now - question.sent_at >= self.config.connect_timeout_s:  # it was reachable
                question.gives_up_at = self._gives_up_at(question, now)
            if now + MIN_PAUSE_S >= question.gives_up_at:
                self._fail(question, outcome, now)
            else:
                question.again_at = now + MIN_PAUSE_S
        elif isinstance(outcome, Unauthorized):
            self._fail_distrusted(question, outcome, now)
        else:
            self._fail(question, outcome, now)

    def _fail_distrusted(self, question: LinkQuestion, error: Unauthorized, now: float) -> None:
        if not self.seen_quorum_id:
            self._end(question, error)
            return
        question.distrust = error
        question.again_at = min(now + DISTRUST_PAUSE_S, max(now, question.deadline))

    def _fail(self, question: LinkQuestion, error: TorchFTError, now: float) -> None:
        """This attempt has failed; there may be another one."""
        question.number, question.held = 0, None
        if isinstance(error, PeerError) and question.retries_left and now < question.deadline:
            question.retries_left -= 1
            self._log("warning", f"quorum failed, asking again: {error}")
            self._begin_attempt(now)
        else:
            self._end(question, error)

    def _end(self, question: LinkQuestion, outcome: Quorum | TorchFTError) -> None:
        self._question = None
        self._orders.append(AnswerAsker(question.ask.round, outcome))

    def _withdraw(self) -> None:
        question, self._question = self._question, None
        if question is not None and question.number:
            self._send_withdrawal(question)

    def _send_withdrawal(self, question: LinkQuestion) -> None:
        if self._connection is not None:
            self._orders.append(Withdrawal(question.number))

    # -- beats -----------------------------------------------------------------------------------

    def _beat(self, connection: LinkConnection, now: float) -> None:
        connection.beat_sent_at = now
        self._orders.append(SendBeat())

    def _plan_call(self, connection: LinkConnection, now: float) -> None:
        if self.state is not LinkState.LEAVING:
            due_at = connection.beat_sent_at + connection.interval_s * self._between(0.9)
            connection.beat_at = max(now, due_at)

    def _current(self, number: int) -> LinkConnection | None:
        connection = self._connection
        return connection if connection is not None and connection.number == number else None

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable("lighthouse", ",".join(self.config.lighthouses), reason)

    def _between(self, least: float) -> float:
        """A factor from ``least`` to 1."""
        return least + (1 - least) * self.draw()

    def _log(self, level: Literal["info", "warning"], text: str) -> None:
        self._orders.append(Log(level, text))
