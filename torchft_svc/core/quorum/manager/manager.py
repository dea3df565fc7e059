"""Decides what a group's manager tells its workers: answers to their calls, and news (rule M7).

The barriers are `Group`'s. Here is what stands around them: until when a call waits, what each
worker is doing, and which news its workers receive. Inputs carry ``now`` (monotonic seconds) and
return orders; one timer, for `GroupManager.next_deadline`, calls `GroupManager.tick`.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchft_svc.core.pausable_clock import MAX_LOOK_S, PausableClock
from torchft_svc.core.quorum.activity import Phase, PhaseReport, WorkerActivities
from torchft_svc.core.quorum.manager import group_orders
from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.manager.group_orders import (
    OWNER_SILENCE_S,
    AnswerVote,
    AnswerWorker,
    AskLighthouse,
    AwaitOwner,
    RefuseWorker,
    StopAsking,
)
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Drain,
    Kill,
    Leave,
    Lost,
    NewcomerWaits,
    NoQuorumYet,
)
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import (
    MAX_DIFFERENCES,
    DifferenceReport,
    Quorum,
    Vote,
    WorkerRequest,
)
from torchft_svc.errors import DeadlineExceeded, TorchFTError

# The lighthouse's answer, or its reason, must still reach the workers within their own deadlines.
ANSWER_MARGIN_S = 0.05
# Groups wait for one another in every step; a worker that waits longer gets the reason.
TELL_WHY_AFTER_S = 2.0
# A manager that continues a term commits no step before it knows whether its group is still in the
# quorum: for so long, unless no lighthouse can be reached. What a session has missed follows the
# welcome at once.
HOLD_S = 1.0
MISSED_NEWS_S = 0.05


# -- news, besides those of the lighthouse ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnGroupLost:
    """This group leaves its last quorum, because of ``reason``.

    The lighthouse informs the other groups. The remaining workers here would wait for their
    collectives in vain, with NCCL in any case.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class ManagerOver:
    """The manager ends, and no other one follows."""

    reason: str


# Bytes: news from a lighthouse, as it has encoded them.
LighthouseNews = Lost | NewcomerWaits | TermEnds | NoQuorumYet | Kill | Drain
WorkerNews = LighthouseNews | OwnGroupLost | ManagerOver | bytes


# -- orders ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellWorkers:
    """Send ``news`` to the attached workers with these group ranks."""

    group_ranks: tuple[int, ...]
    news: WorkerNews


@dataclass(frozen=True, slots=True)
class AskLink:
    """Ask the lighthouse ``question``, within ``timeout_s``; then `GroupManager.outcome`."""

    question: AskLighthouse
    timeout_s: float


@dataclass(frozen=True, slots=True)
class EndGroup:
    """End the group when its workers have received their last news."""


Order = (
    TellWorkers | AskLink | StopAsking | Leave | AnswerWorker | AnswerVote | RefuseWorker | EndGroup
)
Orders = tuple[Order, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a worker that waits; ``asking_rank``: who waits for a quorum by it."""

    action: str
    timeout_s: float
    deadline: float
    asking_rank: int | None = None


class GroupManager:
    """A group's manager, as its workers see it; only this changes ``group``.

    `tick` is called at least every ``look_s``; a longer time without it is a pause of this process,
    which counts as nobody's silence (infinite: there are no pauses).
    """

    def __init__(self, group: Group, now: float, look_s: float = MAX_LOOK_S) -> None:
        self.group = group
        self.is_over = False  # this manager ends, and so do its workers' streams
        self.kill_reason: str | None = None  # this group ends because of it
        self.look_s = look_s
        self._clock = PausableClock(look_s, now)  # of the activities and questions
        self._activities = WorkerActivities()
        self._callers = itertools.count()
        self._calls: dict[int, _Call] = {}
        # When the owner of a group rank counts as dead, unless it gives a sign of life.
        self._silences: collections.deque[tuple[float, AwaitOwner]] = collections.deque()
        self._attached: set[int] = set()
        self._num_asking: collections.Counter[int] = collections.Counter()  # by group rank
        self._asked_at = 0.0  # since when some worker waits for a quorum, if one does
        self._last_command: WorkerNews | None = None
        self._pending: dict[str, WorkerNews] = {}  # why a term has to end, by its kind
        self._held_until = math.inf  # no step is committed before (inf: none is held)
        # By group rank, who was taken for gone since the last question, and as what.
        self._gone: dict[int, tuple[str, OwnGroupLost]] = {}
        self._leader_ends = False  # group rank 0 has ended on purpose
        # That workers have reported since the last beat.
        self._differences: collections.deque[DifferenceReport] = collections.deque(
            maxlen=MAX_DIFFERENCES
        )

    # -- calls -----------------------------------------------------------------------------------

    def ask(self, request: WorkerRequest, timeout_s: float, now: float) -> tuple[int, Orders]:
        """A worker asks for the quorum: the number of its call, and the orders."""
        rank, asking_rank = request.group_rank, None
        if self.group.belongs_to(rank, request.worker_id):
            at = self._clock.now(now)
            if not self._num_asking:
                self._asked_at = at
            if rank in self._attached:  # others do not report its end
                self._activities.asks(rank, request.step, at)
            self._num_asking[rank] += 1
            asking_rank = rank
        caller = next(self._callers)
        self._calls[caller] = _Call("quorum", timeout_s, now + timeout_s, asking_rank)
        try:
            orders: Sequence[group_orders.Order] = self.group.quorum_requested(request, caller)
        except TorchFTError as error:
            orders = (RefuseWorker(caller, error),)
        return caller, self._follow(orders, now)

    def vote(self, vote: Vote, timeout_s: float, now: float) -> tuple[int, Orders]:
        """A worker votes: the number of its call, and the orders."""
        caller = next(self._callers)
        self._calls[caller] = _Call("commit vote", timeout_s, now + timeout_s)
        try:
            orders: Sequence[group_orders.Order] = self.group.voted(vote, caller)
        except TorchFTError as error:
            orders = (RefuseWorker(caller, error),)
        return caller, self._follow(orders, now)

    def withdraw(self, caller: int, now: float) -> Orders:
        """The worker gave up waiting, or its connection ended; ignored if it was answered."""
        if not self._ends(caller):
            return ()
        return self._follow(self.group.withdrawn(caller), now)

    def outcome(
        self, round_: int, outcome: Quorum | TorchFTError, replica_id: str, now: float
    ) -> Orders:
        """The question of ``round_``, in which the group has this id, has an answer or an error."""
        if isinstance(outcome, Quorum):
            return self._follow(self.group.quorum_formed(round_, outcome, replica_id), now)
        return self._follow(self.group.quorum_failed(round_, outcome), now)

    def _ends(self, caller: int) -> bool:
        """Whether the call was still waiting."""
        call = self._calls.pop(caller, None)
        rank = call.asking_rank if call else None
        if rank is not None:
            self._num_asking[rank] -= 1
            if not self._num_asking[rank]:
                del self._num_asking[rank]
        return call is not None

    # -- the link --------------------------------------------------------------------------------

    def hold(self, now: float) -> None:
        """This manager continues a term: see `HOLD_S`."""
        self.group.resume()
        self._held_until = now + HOLD_S

    def link_changed(self, now: float, *, is_open: bool) -> Orders:
        """The session has begun, or a lighthouse could not be reached, or was lost."""
        if self._held_until < math.inf:
            self._held_until = min(self._held_until, now + MISSED_NEWS_S * is_open)
        return self.tick(now)

    # -- workers ---------------------------------------------------------------------------------

    def attach(self, group_rank: int, worker_id: str) -> Orders:
        """A worker has opened its stream, over which it receives news.

        Raises: RequestRefused: the rank does not exist, or belongs to another worker.
        """
        is_next_life = self.group.attached(group_rank, worker_id)
        if is_next_life and self.kill_reason is None:
            self._last_command = None  # it was for the workers that have ended
        self._attached.add(group_rank)
        news = [*([] if self._last_command is None else [self._last_command])]
        gone = self._gone.pop(group_rank, None)
        if gone is not None and gone[0] == worker_id:
            news.append(gone[1])
        return tuple(TellWorkers((group_rank,), each) for each in (*news, *self._pending.values()))

    def detach(
        self, group_rank: int, worker_id: str, reason: str, now: float, *, ends: bool = False
    ) -> Orders:
        """The worker's last stream has ended. ``ends``: its program ends on purpose."""
        self._attached.discard(group_rank)
        self._activities.gone(group_rank)
        if group_rank == 0:
            self._leader_ends = ends
        orders = self.group.detached(group_rank, worker_id, reason, ends=ends)
        for order in orders:
            if isinstance(order, Leave) and not order.between_steps:
                self._gone[group_rank] = worker_id, OwnGroupLost(order.reason)
        return self._follow(orders, now)

    def receive_phase(self, group_rank: int, report: PhaseReport, now: float) -> Orders:
        """A worker does something else."""
        if group_rank in self._num_asking:  # overtaken by the question, whose answer comes first
            return ()
        self._note(group_rank, report.phase, report.step, now)
        return self._follow(self.group.reported(group_rank, report), now)

    def _note(self, group_rank: int, phase: Phase, step: int, now: float) -> None:
        """Only of attached workers: others do not report the end of a phase."""
        if group_rank in self._attached:
            self._activities.reported(group_rank, phase, step, self._clock.now(now))

    def beat(self, now: float) -> Beat:
        """A sign of life, with what the group does, if its workers report that."""
        doing, at = self._activities.slowest(), self._clock.now(now)
        differences = tuple(self._differences)
        self._differences.clear()
        if doing is None:
            return Beat(differences=differences)
        return Beat(doing.phase, doing.step, at - doing.since, differences)

    def receive_difference(self, report: DifferenceReport) -> None:
        """A worker reports that the groups' states differ."""
        self._differences.append(report)

    def reached(self) -> int:
        """The step that all workers have reached (0: not all have reported one)."""
        return self._activities.reached(self.group.world_size)

    @property
    def is_whole(self) -> bool:
        """Whether all workers have reported what they do."""
        return self._activities.num_workers >= self.group.world_size

    # -- news ------------------------------------------------------------------------------------

    def tell(self, news: WorkerNews) -> Orders:
        """To every attached worker."""
        return (TellWorkers(tuple(sorted(self._attached)), news),) if self._attached else ()

    def tell_until_asked(self, kind: str, news: WorkerNews) -> Orders:
        """To every attached worker, and until the group asks for the next quorum also to one that
        attaches later: a member is lost, a newcomer waits, or the term is to end, or is over. The
        last one of a ``kind`` counts: each of them ends the quorum whose answer such a worker gets
        again."""
        self._pending[kind] = news
        return self.tell(news)

    def term_ends(
        self, news: TermEnds, quorum_id: int, now: float, told: WorkerNews | None = None
    ) -> Orders:
        """A term is to end, or is over: the same, ``told`` as this. The group is in
        ``quorum_id``."""
        if news.step is None:
            return self.tell_until_asked("to end", told or news)
        orders = self.tell_until_asked("is over", told or news)
        is_ours = news.quorum_id == quorum_id
        return (*orders, *(self._deny(news.step, now) if is_ours else ()))

    def left_out(
        self, news: Lost, quorum_id: int, now: float, told: WorkerNews | None = None
    ) -> Orders:
        """The others continue without this group, which is in ``quorum_id``: the same. It may have
        moved to another lighthouse meanwhile, as another incarnation, which was no member."""
        orders = self.tell_until_asked("left out", told or news)
        quorum = self.group.last_quorum
        members = [each.replica_id for each in quorum.participants] if quorum else [news.replica_id]
        is_ours = news.quorum_id >= quorum_id and news.replica_id in members
        return (*orders, *(self._deny(0, now) if is_ours else ()))

    def _deny(self, step: int, now: float) -> Orders:
        """No step from ``step`` on is committed in the present quorum: workers that stood still may
        vote before they have read the news."""
        return self._follow(self.group.commits.deny(step), now)

    def kill(self, reason: str, told: WorkerNews | None = None) -> Orders:
        """The group has to end at once: every worker is ``told``, also one that attaches later."""
        self._last_command = told or Kill(reason)
        is_first = self.kill_reason is None
        self.kill_reason = self.kill_reason or f"killed: {reason}"
        return (*self.tell(self._last_command), *([EndGroup()] if is_first else []))

    def drain(self, reason: str, now: float, told: WorkerNews | None = None) -> Orders:
        """The group has to finish its step and end: every worker is ``told``, also one that
        attaches later."""
        self._last_command = told or Drain(reason)
        orders = self.tell(self._last_command)
        return (*orders, *self._follow(self.group.drain(reason), now))

    def over(self) -> Orders:
        """This manager ends, and no other one follows: the workers need not look for one."""
        self.is_over = True
        how = "has shut down" if self._leader_ends else "stops or is dead"
        reason = f"the process of group rank 0, which had started it, {how}"
        return self.tell(ManagerOver(reason))

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When to call `tick` (infinite: nothing waits)."""
        calls = (call.deadline for call in self._calls.values())
        silences = (until for until, _ in self._silences)
        return min(itertools.chain(calls, silences, (self._held_until,)))

    def tick(self, now: float) -> Orders:
        orders: list[Order] = []
        if now >= self._held_until:
            self._held_until = math.inf
            orders += self._follow(self.group.commits.release(), now)
        expired = [who for who, call in self._calls.items() if call.deadline <= now]
        for caller in expired:
            call = self._calls.get(caller)
            if call is None:  # answered by what came before
                continue
            late = DeadlineExceeded(call.action, call.timeout_s, self.group.why(caller))
            self._ends(caller)
            orders.append(RefuseWorker(caller, late))
            orders += self._follow(self.group.withdrawn(caller), now)
        while self._silences and self._silences[0][0] <= now:
            _, order = self._silences.popleft()
            silent = self.group.owner_was_silent(order.group_rank, order.number)
            orders += self._follow(silent, now)
        return tuple(orders)

    def tell_why(self, lighthouse_says: str, now: float) -> Orders:
        """Every `look_s`, to one worker of the group: in each log it would be the same line."""
        first = min(self._num_asking.keys() & self._attached, default=None)
        if self._clock.now(now) - self._asked_at < TELL_WHY_AFTER_S or first is None:
            return ()
        reason = lighthouse_says if self.group.is_asking else self.group.why()
        return (TellWorkers((first,), NoQuorumYet(reason)),)

    def _note_left(self, reason: str) -> None:
        """A worker whose answer was lost receives it again, and must not go on in that quorum."""
        quorum = self.group.last_quorum
        if quorum is not None:
            self._pending["left"] = TermEnds(quorum.quorum_id, quorum.max_step + 1, reason)

    def _follow(self, orders: Sequence[group_orders.Order], now: float) -> Orders:
        """Complete the orders of the group."""
        completed: list[Order] = []
        for order in orders:
            if isinstance(order, AskLighthouse):
                self._pending.clear()
                self._gone.clear()
                deadline = min(self._calls[caller].deadline for caller in self.group.askers())
                completed.append(AskLink(order, deadline - now - ANSWER_MARGIN_S))
            elif isinstance(order, AwaitOwner):
                self._silences.append((now + OWNER_SILENCE_S, order))
            elif isinstance(order, Leave):
                if not order.between_steps:
                    completed += self.tell(OwnGroupLost(order.reason))
                    self._note_left(order.reason)
                if self.kill_reason is not None:  # of which the worker that is gone has died
                    order = replace(order, reason=self.kill_reason, ends=True)
                completed.append(order)
            elif not isinstance(order, (AnswerWorker, AnswerVote, RefuseWorker)):
                completed.append(order)
            elif self._ends(order.caller):
                if isinstance(order, AnswerWorker):
                    # A worker that keeps the interpreter's lock does not report it.
                    request = order.request
                    self._note(request.group_rank, Phase.TRAINING, request.step, now)
                completed.append(order)
        return tuple(completed)
