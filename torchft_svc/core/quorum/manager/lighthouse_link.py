"""Decides what a manager asks its lighthouse, and when: the link of a group.

`ManagerLink` is a `LinkMachine` that asks for quorums. A question is repeated over a lighthouse's
restart, and withdrawn when nobody waits for its outcome any more; a group that moves or restarts
leaves first, and returns as another incarnation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from torchft_svc.core.limits import one_line
from torchft_svc.core.link import (
    MAX_LOOK_AGE_S,
    LinkConfig,
    LinkConnection,
    LinkMachine,
    LinkOrder,
    LinkState,
    SendBeat,
)
from torchft_svc.core.quorum.assignment import check_answer
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
from torchft_svc.core.route import LOOK_BACK_S, MIN_PAUSE_S
from torchft_svc.errors import (
    DeadlineExceeded,
    NotLeader,
    PeerError,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unauthorized,
    Unreachable,
)

# The lighthouse's own refusal, which knows the reason, should be here before we stop waiting.
REFUSAL_GRACE_S = 0.25
# A group that has trained keeps trying when its lighthouse does not trust it any more. Its workers
# begin another step as soon as they get the error, and would compute and log for nothing.
DISTRUST_PAUSE_S = 0.5
# Where the job may be at another lighthouse, a newcomer asks so long after it is connected (F4): by
# then all groups that are at the other one have looked back, and have moved. It waits for at most
# this share of its question's time: groups that start over and over have to meet.
NEWCOMER_PAUSE_S = 2 * LOOK_BACK_S + 0.5
NEWCOMER_SHARE = 0.25
# A newcomer that could not reach any lighthouse before asks so long after it is connected (F8): the
# members of the job are back by then. If it could not reach only one of the list, it asks sooner:
# members that lost that one at the same moment continue at the next one without a pause.
RETURN_S = 1.0
GO_ON_S = 0.25

_LEFT = "this group has left the lighthouse"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerLinkConfig(LinkConfig):
    """The settings of a manager's link, see `ManagerConfig`; durations in seconds."""

    store_address: str
    group_world_size: int
    connect_timeout_s: float
    quorum_retries: int
    min_replicas: int
    is_spare: bool = False
    resumed: Resumed | None = None


@dataclass(frozen=True, slots=True)
class AnswerAsker:
    """Report the outcome of the question of ``round``."""

    round: int
    outcome: Quorum | TorchFTError


Message = Question | Withdrawal | SendBeat | Leave  # what goes to the lighthouse after the hello
OwnOrder = Question | Withdrawal | Leave | AnswerAsker | TermEnds  # `TermEnds`: for the workers
Order = LinkOrder | OwnOrder


@dataclass(slots=True)
class LinkQuestion:
    """A question of the group, with a lighthouse or not."""

    ask: GroupRequest
    deadline: float
    timeout_s: float  # when it was asked last
    retries_left: int
    gives_up_at: float = 0.0  # unless it is with a lighthouse by then
    number: int = 0  # under which it is with the lighthouse (0: it is not)
    member: Member | None = None
    sent_at: float = 0.0
    held: Quorum | None = None  # until it is known that the others are not elsewhere
    expires_at: float = math.inf
    again_at: float = -math.inf
    distrust: Unauthorized | None = None  # the outcome at ``again_at``

    def settles_at(self, connection: LinkConnection) -> float:
        """Return when a newcomer asks it, if the job may be at another lighthouse."""
        return self.begins_at(connection, NEWCOMER_PAUSE_S)

    def begins_at(self, connection: LinkConnection, pause_s: float) -> float:
        """Return when a newcomer asks it, if it lets others come first for ``pause_s``."""
        return connection.opened_at + min(pause_s, self.timeout_s * NEWCOMER_SHARE)


@dataclass(slots=True)
class Incarnation:
    """The group under one replica id."""

    replica_id: str
    why_not: TorchFTError  # it is not connected
    pause_s: float = 0.0  # how long a newcomer lets others come first, once it is connected (F8)

    def lost(self, error: TorchFTError, *, everywhere: bool) -> None:
        """Record that ``error`` excludes a lighthouse; ``everywhere``: as all of the list."""
        if everywhere:
            self.pause_s = RETURN_S
        elif not isinstance(error, NotLeader):
            self.pause_s = max(self.pause_s, GO_ON_S)

    def opened(self, *, was_open: bool) -> float:
        """Return how long a newcomer lets others come first over the connection of now."""
        pause_s, self.pause_s = max(self.pause_s, RETURN_S if was_open else 0.0), 0.0
        return pause_s


class ManagerLink(LinkMachine[OwnOrder]):
    """The link of a group; `take_orders` returns `Order`s.

    ``new_replica_id`` names an incarnation, ``draw`` gives numbers from 0 to 1. ``reached`` returns
    the step that all workers have reached. ``address`` is where others reach this manager, to be
    set before `start`.
    """

    config: ManagerLinkConfig
    _looks_at_once = True  # before the first look, a group does not ask (F4)

    def __init__(
        self,
        config: ManagerLinkConfig,
        new_replica_id: Callable[[], str],
        draw: Callable[[], float],
        reached: Callable[[], int] = int,
        address: str = "",
    ) -> None:
        super().__init__(config, draw)
        self.reached = reached
        self.address = address
        self._new_replica_id = new_replica_id
        me = config.resumed or Resumed(replica_id=new_replica_id())
        self._begin_incarnation(me.replica_id)
        # Of the newest quorum that the group has received (0: none).
        self.seen_quorum_id, self._last_num_groups = me.quorum_id, me.num_groups
        # The last quorum that the group was in with the workers that it has now; see `hello`.
        self._last = LastQuorum(me.quorum_id, max(0, me.step - 1))
        self._is_sole = config.resumed is None  # all members that it met know one lighthouse
        self._reported_why = ""  # there is no quorum yet; by the lighthouse, for the last question
        self._has_rivals: bool | None = None  # others would accept the job, too; None: not known
        self._pause_s = 0.0  # for newcomers, over the present connection
        self._num_questions = 0
        self._question: LinkQuestion | None = None
        self._refused_over = 0  # the connection with a lighthouse that knows no prepared spares

    @property
    def replica_id(self) -> str:
        """The replica id of this incarnation: `name:uuid`."""
        return self._me.replica_id

    @property
    def why_no_quorum(self) -> str:
        """What the open question waits for; empty: the lighthouse has not reported it."""
        return self._reported_why if self.state is LinkState.OPEN else str(self._me.why_not)

    def hello(self) -> Hello:
        """The first message of a session."""
        last = self._last.reached(self.reached() - 1)  # its last step may be its alone (rule E5)
        num_groups = self._last_num_groups if last.quorum_id else 0
        return Hello(self._me.replica_id, last, num_groups, self.stands_by)

    @property
    def stands_by(self) -> bool:
        """Whether the group is a prepared spare: it was in no quorum yet (rule G1)."""
        return self.config.is_spare and not self.seen_quorum_id

    # -- inputs of the manager -------------------------------------------------------------------

    def ask_quorum(self, ask: GroupRequest, timeout_s: float, now: float) -> None:
        """Ask for a quorum with the group as a member; replaces the question before.

        `AnswerAsker` has the outcome: `PeerError` if there is none within ``timeout_s``, or no
        lighthouse for the connect timeout; `RequestRefused` or `Unauthorized` if the group is not
        accepted.
        """
        self._withdraw_question()
        retries = self.config.quorum_retries
        self._question = LinkQuestion(ask, now + timeout_s, timeout_s, retries)
        if ask.new_incarnation:
            self._leave_to_return(now)
        self._begin_attempt(now)

    def withdraw_round(self, round_: int, now: float) -> None:
        """Drop the question of ``round_``: nobody waits for its outcome any more."""
        if self._question is not None and self._question.ask.round == round_:
            self._withdraw_question()

    def return_for_worker(self, now: float) -> None:
        """Connect again, if the group has left or is leaving: before its first quorum, a new worker
        wants to know who trains."""
        if self.state in (LinkState.LEAVING, LinkState.LEFT) and not self._restarts:
            self._leave_to_return(now)

    def leave(self, leave: Leave, now: float) -> None:
        """Leave for good. `ConfirmLeft` follows, soon. An answer may come before it."""
        self._leave_for(leave, now, restarts=False)

    # -- inputs of a connection ------------------------------------------------------------------

    def answered(
        self, number: int, question: int, outcome: Quorum | TorchFTError, now: float
    ) -> None:
        """Record the outcome of question ``question`` (0: the number is not known; the last one
        is meant)."""
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
            self._conclude_question(asked, outcome, now)

    def accepts_news(self, number: int, why_no_quorum: str = "") -> bool:
        """Whether news over connection ``number`` are to be passed on; ``why_no_quorum``: what
        the last question waits for, if they report that."""
        is_current = self._current(number) is not None
        if is_current and why_no_quorum:
            self._reported_why = why_no_quorum
        return is_current

    def refuse_spare(self, number: int, now: float) -> None:
        """Record that the lighthouse knows no prepared spares: it would make one a member."""
        if self._current(number) is not None and self.stands_by:
            self._refused_over = number
            self._pursue_question(now)

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self, now: float) -> float:
        """Return when to call `tick` (inf: not before another input)."""
        connection, question = self._connection, self._question
        found = [super().next_deadline(now)]
        if question is not None:
            found.append(question.expires_at if question.number else question.deadline)
            if question.again_at > -math.inf:
                found.append(question.again_at)
            elif not question.number and self.state in (LinkState.PAUSED, LinkState.OPENING):
                found.append(question.gives_up_at)
            elif connection is not None:
                asks_at = question.begins_at(connection, self._pause_s)
                found += [at for at in (asks_at, question.settles_at(connection)) if at > now]
        return min(found)

    def tick(self, now: float) -> None:
        """Act on the deadlines that are over; too early is harmless."""
        question = self._question
        super().tick(now)
        if question is None or question is not self._question:
            return
        if not question.number:
            self._pursue_question(now)
        elif now >= question.expires_at:
            self._send_withdrawal(question)
            silent = DeadlineExceeded("quorum", question.timeout_s, "the lighthouse is silent")
            self._fail_attempt(question, silent, now)

    # -- the connection --------------------------------------------------------------------------

    def _begin_incarnation(self, replica_id: str) -> None:
        self._me = Incarnation(replica_id, self._unreachable("there is no connection yet"))

    def _choose_name(self) -> None:
        super()._choose_name()
        self._begin_incarnation(self._new_replica_id())

    def _on_open(self, connection: LinkConnection, now: float) -> None:
        self._pause_s = self._me.opened(was_open=self._attempts.was_open)
        self._has_rivals = None
        self._pursue_question(now)

    def _on_loss(
        self, connection: LinkConnection, error: TorchFTError, now: float, *, everywhere: bool
    ) -> None:
        question, me = self._question, self._me
        reason = error.reason if isinstance(error, Unreachable) else str(error)
        is_distrusted = everywhere and isinstance(error, Unauthorized)
        me.why_not = error if is_distrusted else self._unreachable(reason)
        me.lost(error, everywhere=everywhere)
        if question is not None and question.number:
            self._conclude_question(
                question, error if isinstance(error, Unauthorized) else me.why_not, now
            )
        self._pursue_question(now)

    def _on_left(self, now: float) -> None:
        question = self._question
        if question is None:
            return
        if self.state is LinkState.LEFT:
            self._end_question(question, QuorumFailed(_LEFT))
            return
        question.number, question.held = 0, None
        question.gives_up_at = self._gives_up_at(question, now)

    def _on_better(self, address: str, now: float) -> None:
        """Move to the earlier lighthouse that would accept the group, as a new incarnation (F3).

        At once, also within a step: a group that asks there waits for this one, and does not train
        alone. The peers are not informed then, because they would discard their step.
        """
        self._log("info", f"lighthouse {address} accepts this group again, returning to it")
        is_asking = self._question is not None and self._question.number > 0
        self._route.return_to(address)
        leave = Leave(f"it goes back to lighthouse {address}", between_steps=not is_asking)
        # The others know this group by its old name, and would not be informed of its loss.
        if self._last.quorum_id:
            self._orders.append(TermEnds(self._last.quorum_id, None, leave.reason))
        self._leave_for(leave, now, restarts=True)

    def _on_look(
        self,
        connection: LinkConnection,
        probed: Collection[str],
        accepting: Collection[str],
        now: float,
    ) -> None:
        if set(self._others(connection)) <= set(probed):
            self._has_rivals = bool(accepting)
        question = self._question
        if question is not None and question.held is not None:
            self.answered(connection.number, question.number, question.held, now)
        self._pursue_question(now)

    def _leave_to_return(self, now: float) -> None:
        self._last = NO_QUORUM
        self._leave_for(Leave("a worker of the group was restarted"), now, restarts=True)

    def _leave_for(self, leave: Leave, now: float, *, restarts: bool) -> None:
        # The lighthouse refuses a longer reason, and treats a session that breaks as a loss.
        self._leave(replace(leave, reason=one_line(leave.reason)), now, restarts=restarts)

    # -- which lighthouse has the job ------------------------------------------------------------

    def _is_settled(self, question: LinkQuestion, connection: LinkConnection, now: float) -> bool:
        """Whether the job is at this lighthouse, as far as can be known, or will be here (F4)."""
        if not self._has_looked(connection, now):
            return False
        if not self._is_newcomer(question) or now >= question.settles_at(connection):
            return True
        others = self._others(connection)
        if others and self._has_rivals is None:
            self._probe(connection, others, now)
            return False
        return not self._has_rivals and now >= question.begins_at(connection, self._pause_s)

    def _has_looked(self, connection: LinkConnection, now: float) -> bool:
        """Whether no earlier lighthouse accepts this group, so that the others are not there."""
        if self.state is LinkState.LEAVING:
            return not self._restarts
        if not self._route.preferred or now - connection.looked_at <= MAX_LOOK_AGE_S:
            return True
        self._probe(connection, self._route.preferred, now)
        return False

    def _others(self, connection: LinkConnection) -> tuple[str, ...]:
        """The rest of the list; none if this lighthouse is not in it: then the leader is
        elected."""
        if connection.address not in self._route.addresses:
            return ()
        return tuple(each for each in self._route.addresses if each != connection.address)

    def _is_newcomer(self, question: LinkQuestion) -> bool:
        """Whether the group knows nothing about the job."""
        return self._last == NO_QUORUM and not question.ask.has_history

    # -- asking ----------------------------------------------------------------------------------

    def _gives_up_at(self, question: LinkQuestion, now: float) -> float:
        return min(question.deadline, now + self.config.connect_timeout_s)

    def _begin_attempt(self, now: float) -> None:
        assert self._question is not None
        self._question.gives_up_at = self._gives_up_at(self._question, now)
        self._pursue_question(now)

    def _pursue_question(self, now: float) -> None:
        """Ask if that is possible now, or give up if that is due."""
        question, connection = self._question, self._connection
        if question is None or question.number or now < question.again_at:
            return
        question.again_at = -math.inf
        refusal = question.distrust or self._refusal_of_spare(connection)
        if refusal is not None:
            self._end_question(question, refusal)
        elif self.state is LinkState.LEFT:
            self._end_question(question, QuorumFailed(_LEFT))
        elif now >= question.deadline:
            late = DeadlineExceeded("quorum", 0.0, "no time is left")
            self._fail_attempt(question, self._me.why_not if connection is None else late, now)
        elif self.state is LinkState.OPEN:
            assert connection is not None
            if self._is_settled(question, connection, now):
                self._send_question(question, connection, now)
        elif self.state is not LinkState.LEAVING:
            why_not = self._me.why_not
            if isinstance(why_not, Unauthorized):
                self._fail_distrusted(question, why_not, now)
            elif now >= question.gives_up_at:
                self._fail_attempt(question, why_not, now)

    def _refusal_of_spare(self, connection: LinkConnection | None) -> RequestRefused | None:
        """Why this prepared spare does not ask the lighthouse of ``connection`` (None: it may)."""
        if connection is None or connection.number != self._refused_over or not self.stands_by:
            return None
        return RequestRefused(
            f"the lighthouse at {connection.address} knows no prepared spares: update it, or start "
            "this group without TORCHFT_SPARE"
        )

    def _send_question(
        self, question: LinkQuestion, connection: LinkConnection, now: float
    ) -> None:
        ask = question.ask
        self._reported_why = ""
        if ask.seen_quorum_id > self.seen_quorum_id:  # the workers had another manager
            self.seen_quorum_id, self._last_num_groups = ask.seen_quorum_id, ask.seen_num_groups
        self._num_questions += 1
        number = question.number = self._num_questions
        question.sent_at, question.timeout_s = now, question.deadline - now
        question.expires_at = question.deadline + REFUSAL_GRACE_S
        connection.alive_at = now
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

    def _conclude_question(
        self, question: LinkQuestion, outcome: Quorum | TorchFTError, now: float
    ) -> None:
        """Handle an ``outcome`` of the lighthouse, which does not hold the question any more."""
        question.number, question.held = 0, None
        if isinstance(outcome, Quorum):
            self.seen_quorum_id = max(self.seen_quorum_id, outcome.quorum_id)
            self._last_num_groups = len(outcome.participants)
            self._is_sole &= all(each.sole_lighthouse for each in outcome.participants)
            self._last = LastQuorum(outcome.quorum_id, outcome.max_step)
            self._end_question(question, outcome)
        elif self.state is LinkState.LEAVING and isinstance(outcome, PeerError):
            # Withdrawn by leaving: asked again elsewhere, if it goes on there.
            self._pursue_question(now)
        elif isinstance(outcome, Unreachable | NotLeader):
            self._log("info", f"the lighthouse could not be asked: {outcome}")
            if now - question.sent_at >= self.config.connect_timeout_s:  # it was reachable
                question.gives_up_at = self._gives_up_at(question, now)
            if now + MIN_PAUSE_S >= question.gives_up_at:
                self._fail_attempt(question, outcome, now)
            else:
                question.again_at = now + MIN_PAUSE_S
        elif isinstance(outcome, Unauthorized):
            self._fail_distrusted(question, outcome, now)
        else:
            self._fail_attempt(question, outcome, now)

    def _fail_distrusted(self, question: LinkQuestion, error: Unauthorized, now: float) -> None:
        if not self.seen_quorum_id:
            self._end_question(question, error)
            return
        question.distrust = error
        question.again_at = min(now + DISTRUST_PAUSE_S, max(now, question.deadline))

    def _fail_attempt(self, question: LinkQuestion, error: TorchFTError, now: float) -> None:
        """End this attempt; there may be another one."""
        question.number, question.held = 0, None
        if isinstance(error, PeerError) and question.retries_left and now < question.deadline:
            question.retries_left -= 1
            self._log("warning", f"quorum failed, asking again: {error}")
            self._begin_attempt(now)
        else:
            self._end_question(question, error)

    def _end_question(self, question: LinkQuestion, outcome: Quorum | TorchFTError) -> None:
        self._question = None
        self._orders.append(AnswerAsker(question.ask.round, outcome))

    def _withdraw_question(self) -> None:
        question, self._question = self._question, None
        if question is not None and question.number:
            self._send_withdrawal(question)

    def _send_withdrawal(self, question: LinkQuestion) -> None:
        if self._connection is not None:
            self._orders.append(Withdrawal(question.number))

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable("lighthouse", ",".join(self.config.lighthouses), reason)
