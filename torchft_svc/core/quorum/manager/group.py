"""One replica group, as its manager sees it: the calls of its workers, two barriers, and news.

Two barriers follow each other in every round: in the *quorum* barrier all workers ask, the group
asks the lighthouse once, and all are answered; in the *commit* barrier all workers vote, and all
get the same decision. A round has a number, which is sent with the quorum and repeated in the vote,
so that a late or repeated vote can not count in another round (rule M7).

A quorum barrier that fails has failed for the workers that have not reached it yet, too: each gets
the same error when it comes. Otherwise it would wait for the others, which have continued with the
step and may wait for it in a collective of the group.

A group rank belongs to the worker whose stream is open or, without a stream, that asked last:
anybody who reaches the manager may claim a rank. The request of another worker is held until the
owner is gone, which makes the other its successor, or gives a sign of life.

Inputs are past facts, carry ``now`` (monotonic seconds) where the time matters, and return orders.
One timer, for `Group.next_deadline`, calls `Group.tick`.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from torchft_svc.core.link import Absence
from torchft_svc.core.pausable_clock import MAX_LOOK_S, PausableClock
from torchft_svc.core.quorum.activity import Phase, PhaseReport, WorkerActivities
from torchft_svc.core.quorum.assignment import QuorumResult, assign
from torchft_svc.core.quorum.layout import group_layout
from torchft_svc.core.quorum.manager.commit_barrier import (
    AnswerVote,
    CommitBarrier,
    RefuseWorker,
    newer_call,
)
from torchft_svc.core.quorum.manager.ended import EndedQuorumBarriers
from torchft_svc.core.quorum.manager.lives import GroupLives
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Departure,
    Drain,
    Kill,
    Leave,
    LighthouseNews,
    Lost,
    NewcomerWaits,
    NoQuorumYet,
)
from torchft_svc.core.quorum.tally import (
    MAX_EVENTS_KEPT,
    MAX_EVENTS_SENT,
    EventKind,
    GroupEvent,
    StepTimes,
    Tally,
)
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import (
    MAX_DIFFERENCES,
    DifferenceReport,
    GroupRequest,
    Quorum,
    Vote,
    WorkerRequest,
)
from torchft_svc.errors import (
    ConfigError,
    DeadlineExceeded,
    GroupLeft,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
)

# The lighthouse's answer, or its reason, must still reach the workers within their own deadlines.
ANSWER_MARGIN_S = 0.05
# Groups wait for one another in every step; a worker that waits longer receives the reason.
EXPLAIN_AFTER_S = 2.0
# How long a manager that continues a term commits no step, because it does not know yet whether its
# group is still in the quorum; shorter if no lighthouse can be reached. What a session has missed
# follows the welcome at once.
HOLD_S = 1.0
MISSED_NEWS_S = 0.05
# How long another worker waits for a group rank whose owner has no stream: the death of such an
# owner goes unnoticed. With a stream its end shows it, at once or, if its machine is gone, after
# about the same time.
OWNER_SILENCE_S = 5.0


# -- news for workers ------------------------------------------------------------------------------


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


# What is sent to workers. Bytes: news from a lighthouse, as it has encoded them.
SentNews = LighthouseNews | NoQuorumYet | ManagerOver | bytes
WorkerNews = SentNews | OwnGroupLost  # which is sent as `Lost`


# -- orders ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskLighthouse:
    """Send ``request`` to the lighthouse, within ``timeout_s``; then call
    `Group.lighthouse_answered`."""

    request: GroupRequest
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StopAsking:
    """Withdraw the request of ``round`` from the lighthouse."""

    round: int


@dataclass(frozen=True, slots=True)
class AnswerWorker:
    """Send the worker its part in a quorum, and the round to vote in."""

    caller: int
    request: WorkerRequest
    assignment: QuorumResult
    round: int


@dataclass(frozen=True, slots=True)
class NotifyWorkers:
    """Send ``news`` to the attached workers with these group ranks."""

    group_ranks: tuple[int, ...]
    news: WorkerNews


@dataclass(frozen=True, slots=True)
class EndGroup:
    """End the group when its workers have received their last news."""


Answer = AnswerWorker | AnswerVote | RefuseWorker
Order = AskLighthouse | StopAsking | Leave | Answer | NotifyWorkers | EndGroup
Orders = tuple[Order, ...]


# -- the machine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a worker that waits.

    ``asking_rank``: the group rank that waits for a quorum by it (None: the call is a vote, or of
    another worker than the owner of its rank).
    """

    action: str
    timeout_s: float
    deadline: float
    asking_rank: int | None = None


class Group:
    """A group of ``world_size`` workers; ``commits`` are the barriers of their votes.

    A caller is a number of the shell's choice for each call. ``first_round`` must be far from the
    rounds of an earlier manager of the same workers, above or below them.

    `tick` is called at least every ``look_s``; a longer time without it is a pause of this process,
    which counts as no silence of a worker (infinite: there are no pauses).
    """

    def __init__(
        self, world_size: int, first_round: int = 1, now: float = 0.0, look_s: float = MAX_LOOK_S
    ) -> None:
        if world_size < 1:
            raise ConfigError("group_world_size", world_size, "a group has at least one worker")
        self.world_size = world_size
        self.look_s = look_s
        self.commits = CommitBarrier(world_size, first_round)
        self.is_over = False  # this manager ends, and so do its workers' streams
        self.kill_reason: str | None = None  # this group ends because of it
        self._orders: list[Order] = []  # of the present input
        # Calls, and what the workers do.
        self._clock = PausableClock(look_s, now)  # of the activities and requests
        self._activities = WorkerActivities()
        self._calls: dict[int, _Call] = {}  # that wait, by caller
        self._num_asking: collections.Counter[int] = collections.Counter()  # by group rank
        self._asked_at = 0.0  # since when some worker waits for a quorum, if one does
        self._differences: collections.deque[DifferenceReport] = collections.deque(
            maxlen=MAX_DIFFERENCES
        )  # that workers have reported since the last beat
        # Of group rank 0: what its time was spent on, until when.
        self._tally: tuple[Tally, float] | None = None
        self._step_times: dict[int, StepTimes] = {}  # by group rank
        # What has happened, and when: since the last beat, and the last ones for a new session, of
        # the workers, which repeat theirs to a new manager, and of this manager itself.
        self._events: collections.deque[tuple[GroupEvent, float]] = collections.deque(
            maxlen=MAX_EVENTS_SENT
        )
        self._last_events: collections.deque[tuple[GroupEvent, float]] = collections.deque(
            maxlen=MAX_EVENTS_KEPT
        )
        self._last_own_events: collections.deque[tuple[GroupEvent, float]] = collections.deque(
            maxlen=MAX_EVENTS_KEPT
        )
        self._source, self._num_events = f"manager:{first_round}", 0
        self._away_s = 0.0  # how long no lighthouse could be reached while the group asked
        # Which worker each group rank belongs to.
        self._attached: dict[int, str] = {}
        self._workers: dict[int, str] = {}  # that have asked
        self._voters: dict[int, str] = {}  # the last ones; they may have asked an earlier manager
        self._owners: dict[int, str] = {}
        self._lives = GroupLives()
        self._held: dict[int, tuple[WorkerRequest, int]] = {}  # requests of others than the owner
        self._suspects: dict[int, int] = {}  # ranks whose owner may be dead, with who found it
        # When a suspect counts as dead, unless it gives a sign of life.
        self._silences: collections.deque[tuple[float, int, int]] = collections.deque()
        self._checkpoint_addresses: dict[int, str] = {}
        self._leader_ends = False  # group rank 0 has ended on purpose
        # The quorum barrier.
        self._round = first_round - 1
        self._asking = False
        self._requests: dict[int, tuple[WorkerRequest, int]] = {}  # by group rank, with the caller
        self._formed: tuple[Quorum, str] | None = None  # sent last, and the group's id in it
        self._over = EndedQuorumBarriers()
        self._rounds_before: dict[int, int] = {}  # by group rank, see `phase_reported`
        self._restarted = False  # the next request is that of another incarnation
        self._is_resumed = False  # in the term of a manager before, until the group asks
        self._held_until = math.inf  # no step is committed before (inf: none is held)
        # The end of the group.
        self._drain_reason: str | None = None
        # Whether all workers have gone since the drain: one that comes may be of the next life.
        self._all_gone_since = False
        self._ended_workers: dict[int, tuple[str, str]] = {}  # that have to end: their ids, and why
        # News that a worker receives when it attaches.
        self._last_command: WorkerNews | None = None
        self._pending: dict[str, WorkerNews] = {}  # why a term has to end, by its kind
        # Workers that were considered gone since the last request: by group rank, id and news.
        self._gone: dict[int, tuple[str, OwnGroupLost]] = {}

    # -- calls of workers ------------------------------------------------------------------------

    def quorum_requested(
        self, request: WorkerRequest, caller: int, timeout_s: float, now: float
    ) -> Orders:
        """A worker asks; when all have asked, the group asks the lighthouse.

        The worker is refused if its rank does not exist, or belongs to another worker that waits.
        """
        asking_rank = self._record_asking(request, now)
        self._calls[caller] = _Call("quorum", timeout_s, now + timeout_s, asking_rank)
        try:
            self._check_rank(request.group_rank)
            request.check()
            self._lives.record_arrival(request.group_rank, request.worker_id)
            if self.belongs_to(request.group_rank, request.worker_id):
                self._refuse_held(request.group_rank)
                self._enter_barrier(request, caller, now)
            else:
                self._hold_request(request, caller, now)
        except RequestRefused as error:
            self._send_answer(RefuseWorker(caller, error))
        return self._take_orders()

    def vote_received(self, vote: Vote, caller: int, timeout_s: float, now: float) -> Orders:
        """A worker votes, see `CommitBarrier.count_vote`.

        The worker is refused if its rank does not exist or belongs to another worker, or if the
        vote belongs to another round.
        """
        self._calls[caller] = _Call("commit vote", timeout_s, now + timeout_s)
        try:
            self._check_rank(vote.group_rank)
            vote.check()
            if not self.belongs_to(vote.group_rank, vote.worker_id):
                raise self._rank_taken(vote.group_rank, "is there")
            answers = self.commits.count_vote(vote, caller, self._requests_in_barrier())
            self._voters[vote.group_rank] = vote.worker_id
            self._refuse_held(vote.group_rank)
            self._send_answers(answers)
        except RequestRefused as error:
            self._send_answer(RefuseWorker(caller, error))
        return self._take_orders()

    def call_withdrawn(self, caller: int) -> Orders:
        """A worker gave up waiting, or its connection ended; ignored if it was answered."""
        if self._end_call(caller):
            self._release_others(caller)
        return self._take_orders()

    def _record_asking(self, request: WorkerRequest, now: float) -> int | None:
        """Record that a worker waits for a quorum; returns its group rank, unless that belongs to
        another worker."""
        rank = request.group_rank
        if not self.belongs_to(rank, request.worker_id):
            return None
        at = self._clock.now(now)
        if not self._num_asking:
            self._asked_at = at
        if rank in self._attached:  # others do not report its end
            self._activities.asks(rank, request.step, at)
        self._num_asking[rank] += 1
        return rank

    def _end_call(self, caller: int) -> bool:
        """Remove the call; returns whether it was still waiting."""
        call = self._calls.pop(caller, None)
        rank = call.asking_rank if call else None
        if rank is not None:
            self._num_asking[rank] -= 1
            if not self._num_asking[rank]:
                del self._num_asking[rank]
        return call is not None

    def _release_others(self, caller: int) -> None:
        """The call of a worker is over without an answer: the others must not wait for it."""
        for rank, (_, waiting) in list(self._requests.items()):
            if waiting == caller:
                self._abandon_barrier(rank)
                return
        held_rank = self.held_rank(caller)
        if held_rank is not None:
            del self._held[held_rank]
            return
        self._send_answers(self.commits.withdraw_vote(caller))

    # -- workers and their streams ---------------------------------------------------------------

    def worker_attached(self, group_rank: int, worker_id: str) -> Orders:
        """A worker has opened its stream, over which it receives news.

        A worker that is not known, while all others are gone, belongs to the next life of a group
        that was drained. Those whose streams have only broken come back, and have to end, too.

        Raises: RequestRefused: the rank does not exist, or belongs to another worker.
        """
        self._check_rank(group_rank)
        self._lives.record_arrival(group_rank, worker_id)
        if not self.belongs_to(group_rank, worker_id):
            raise self._rank_taken(group_rank, "is there")
        is_known = self._lives.is_known(group_rank, worker_id)
        if self._all_gone_since and not self._attached and not is_known:
            self._drain_reason = None  # it was for the workers that have ended
            if self.kill_reason is None:
                self._last_command = None  # and so was this
        self._attached[group_rank] = self._owners[group_rank] = worker_id
        self._suspects.pop(group_rank, None)
        self._activities.starts(group_rank)
        self._lives.admit_worker(group_rank, worker_id)
        if self._last_command is not None:
            self._orders.append(NotifyWorkers((group_rank,), self._last_command))
        gone_id, lost = self._gone.pop(group_rank, ("", None))
        if lost is not None and gone_id == worker_id:
            self._orders.append(NotifyWorkers((group_rank,), lost))
        self._orders += [NotifyWorkers((group_rank,), news) for news in self._pending.values()]
        return self._take_orders()

    def worker_detached(
        self, group_rank: int, worker_id: str, reason: str, now: float, *, ends: bool = False
    ) -> Orders:
        """A worker's last stream has ended: those that wait for it are refused, and the group
        leaves.

        ``ends``: its program ends on purpose. The next worker with this rank makes this another
        incarnation of the group.
        """
        if self._attached.get(group_rank) != worker_id:
            return ()
        del self._attached[group_rank]
        self._activities.gone(group_rank)
        self._rounds_before.pop(group_rank, None)
        self._step_times.pop(group_rank, None)
        if group_rank == 0:
            self._leader_ends, self._tally = ends, None
        self._all_gone_since = not self._attached
        self._workers.setdefault(group_rank, worker_id)  # it may only have been frozen
        self._restarted = True
        gone = f"group rank {group_rank} is gone: {reason}"
        self._withdraw_request()
        self._end_remaining_workers()
        if self._lives.is_awaited(group_rank, worker_id, self._requests):
            self._fail_barrier(QuorumFailed(gone))
        self._send_answers(self.commits.drop_votes(gone))
        self._gone[group_rank] = worker_id, OwnGroupLost(gone)
        self._send_leave(Leave(gone, ends=ends))
        self._free_rank(group_rank, now)
        return self._take_orders()

    def belongs_to(self, group_rank: int, worker_id: str) -> bool:
        """Whether no other worker is known to have this rank."""
        return self._owners.get(group_rank, worker_id) == worker_id

    def await_owner(self, group_rank: int, caller: int, now: float) -> None:
        """Wait for a sign of life of the owner, which ``caller`` would succeed."""
        self._silences.append((now + OWNER_SILENCE_S, group_rank, caller))

    def end_silence(self, group_rank: int, caller: int, now: float) -> None:
        """The owner is dead, unless it has given a sign of life since ``caller`` came."""
        if self._suspects.get(group_rank) == caller:
            self._free_rank(group_rank, now)

    def _free_rank(self, group_rank: int, now: float) -> None:
        """The rank belongs to the worker that waits for it, or comes next."""
        self._owners.pop(group_rank, None)
        self._suspects.pop(group_rank, None)
        held = self._held.pop(group_rank, None)
        if held:
            self._enter_barrier(*held, now)

    def _hold_request(self, request: WorkerRequest, caller: int, now: float) -> None:
        """Another worker asks with a rank that is taken: while it is not known whether the owner
        lives, it may be its successor.

        An owner without a worker id is not awaited: such workers are one and the same, also after a
        restart. Nor is one with a stream, whose end would show that it is dead.
        """
        rank = request.group_rank
        if rank in self._requests or self.commits.awaits_decision(rank):
            raise self._rank_taken(rank, "already waits")
        held = self._held.get(rank)
        if held and held[0].worker_id != request.worker_id:
            raise self._rank_taken(rank, "is there")
        self._held[rank] = (request, caller)
        if held:
            self._send_answer(RefuseWorker(held[1], QuorumFailed(newer_call(rank))))
        if rank not in self._attached and self._owners[rank] and rank not in self._suspects:
            self._suspects[rank] = caller
            self.await_owner(rank, caller, now)

    def _refuse_held(self, group_rank: int) -> None:
        """The owner of the rank lives: refuse the other worker that asks with it."""
        self._suspects.pop(group_rank, None)
        held = self._held.pop(group_rank, None)
        if held:
            self._send_answer(RefuseWorker(held[1], self._rank_taken(group_rank, "is there")))

    def _check_rank(self, group_rank: int) -> None:
        if not 0 <= group_rank < self.world_size:
            raise RequestRefused(
                f"group rank {group_rank} is outside this group of {self.world_size} workers"
            )

    def _rank_taken(self, group_rank: int, what: str) -> RequestRefused:
        return RequestRefused(
            f"group rank {group_rank} is taken: another worker with this rank {what}; "
            "give every worker of the group a rank of its own"
        )

    # -- what workers do -------------------------------------------------------------------------

    def phase_reported(self, group_rank: int, report: PhaseReport, now: float) -> Orders:
        """A worker does something else.

        An earlier manager may have answered only some of the workers before it died. The others ask
        again, and learn that their peers do not ask the same any more, and may wait for them in a
        collective of the group. They are in the round before the last one of these; the numbers of
        their requests may differ.
        """
        if group_rank in self._num_asking:  # overtaken by the request, whose answer comes first
            return ()
        self._record_activity(group_rank, report, now)
        if self.commits.is_inherited:
            self._rounds_before[group_rank] = report.round_before
            self._refuse_answered()
            if report.went_on_to:
                self._send_answers(self.commits.step_begun(group_rank, report.went_on_to))
        return self._take_orders()

    def difference_reported(self, report: DifferenceReport) -> None:
        """A worker reports that the groups' states differ."""
        self._differences.append(report)

    def tally_reported(self, group_rank: int, tally: Tally, now: float) -> None:
        """A worker reports what its time was spent on: that of group rank 0 counts, and the step
        times of the slowest one."""
        if tally.step_times is not None:
            self._step_times[group_rank] = replace(tally.step_times, group_rank=group_rank)
        if group_rank == 0:
            self._tally = replace(tally, away_s=0.0), now - tally.ago_s

    def record_predecessor(self, how_it_ended: str, ended_at: float) -> None:
        """Record that the manager before this one died at ``ended_at``.

        The workers need not notice it, and all of them may.
        """
        cause = f"its manager {how_it_ended}, and was started again"
        self._report_event(EventKind.MANAGER_DIED, cause, ended_at)

    def event_reported(self, event: GroupEvent, now: float) -> None:
        """A worker reports what has happened to the group."""
        self._events.append((event, now - event.ago_s))
        self._last_events.append((event, now - event.ago_s))

    def make_beat(self, now: float) -> Beat:
        """A sign of life, with what the group does, if its workers report that."""
        activity, at = self._activities.slowest(), self._clock.now(now)
        differences = tuple(self._differences)
        self._differences.clear()
        tally = None
        if self._tally is not None:
            tally = replace(
                self._tally[0],
                away_s=self._away_s,
                ago_s=max(0.0, now - self._tally[1]),
                step_times=max(
                    self._step_times.values(), key=lambda each: each.own_s, default=None
                ),
            )
        events = tuple(
            replace(each, ago_s=max(0.0, now - happened_at)) for each, happened_at in self._events
        )
        self._events.clear()
        if activity is None:
            return Beat(differences=differences, tally=tally, events=events)
        return Beat(
            activity.phase,
            activity.step,
            at - activity.since,
            differences,
            tally,
            events,
            activity.received_bytes,
            activity.state_bytes,
        )

    def reached(self) -> int:
        """The step that all workers have reached (0: not all have reported one)."""
        return self._activities.reached(self.world_size)

    @property
    def is_whole(self) -> bool:
        """Whether all workers have reported what they do."""
        return self._activities.num_workers >= self.world_size

    def _record_activity(self, group_rank: int, report: PhaseReport, now: float) -> None:
        if group_rank in self._attached:  # others do not report the end of a phase
            self._activities.reported(group_rank, report, self._clock.now(now))

    # -- the quorum barrier ----------------------------------------------------------------------

    def lighthouse_answered(
        self, round_: int, outcome: Quorum | TorchFTError, replica_id: str, now: float
    ) -> Orders:
        """The request of ``round_``, in which the group has this id, has an answer or an error.

        After a heal that failed for some of them, workers may be at different steps. Then the group
        has asked as one that is behind, and all its workers heal again. If it is not behind, nobody
        can say which worker is right, and all get the error. A heal may also lead to a lower step,
        if the reported one is not believed.
        """
        if not self._asking or round_ != self._round:
            return ()
        self._asking = False
        if isinstance(outcome, Quorum):
            self._answer_barrier(outcome, replica_id, now)
        elif self._drain_reason is not None:
            self._end_workers(self._drain_reason)
        else:
            self._fail_barrier(outcome)
        return self._take_orders()

    def _enter_barrier(self, request: WorkerRequest, caller: int, now: float) -> None:
        rank = request.group_rank
        ended_id, end_reason = self._ended_workers.get(rank, ("", ""))
        if ended_id and ended_id == request.worker_id and self._restarted:
            # Its answer was lost, and a peer that received one has ended: nobody else will ask.
            self._send_answer(RefuseWorker(caller, GroupLeft(end_reason)))
            return
        late = self.late_answer(request, caller)
        if late is not None:
            self._send_answer(late, now)
            return
        self._send_answers(
            self.commits.answer_inherited(request)
            or self.commits.drop_votes(
                f"group rank {rank} asked for a new quorum instead of voting"
            )
        )
        waiting = self._requests.get(rank)
        if waiting and request.question > waiting[0].question > 0:
            # It has given up its request before, which is not known here yet.
            self._abandon_barrier(rank)
            waiting = None
        if waiting:
            # The same worker asks again: its first call was lost on the way back.
            self._send_answer(RefuseWorker(waiting[1], QuorumFailed(newer_call(rank))))
        self._requests[rank] = (request, caller)
        if waiting and request == waiting[0] and self._asking:
            return
        # If the request has changed, what the lighthouse knows is out of date.
        self._withdraw_request()
        self._admit_worker(request)
        self._refuse_answered()
        if len(self._requests) < self.world_size:
            self._end_remaining_workers()
        elif self._drain_reason is not None:
            self._send_leave(self._drained_leave(self._drain_reason))
            self._end_workers(self._drain_reason)
        else:
            self._ask_lighthouse(now)

    def _admit_worker(self, request: WorkerRequest) -> None:
        """Record the worker; another one at a known rank makes this another incarnation."""
        rank = request.group_rank
        if {self._attached.get(rank), self._workers.get(rank)} - {None, request.worker_id}:
            self._restarted = True
            # That was for the workers before. The living ones repeat it; but a dead one may still
            # ask, and the new ones would end, and leave the last one waiting.
            self._drain_reason = None
        self._workers[rank] = self._owners[rank] = request.worker_id
        self._lives.admit_worker(rank, request.worker_id)
        self._checkpoint_addresses[rank] = request.checkpoint_address
        if request.drain_reason:
            self._drain_reason = self._drain_reason or request.drain_reason

    def _ask_lighthouse(self, now: float) -> None:
        requests = self._requests_in_barrier()
        self._lives.join_workers({each.group_rank: each.worker_id for each in requests})
        self._round += 1
        self.commits.announce_round(self._round)
        self._asking = True
        combined = self.combine_requests(requests)
        self._restarted = self._is_resumed = False
        self._pending.clear()
        self._gone.clear()
        deadline = min(self._calls[caller].deadline for _, caller in self._requests.values())
        self._orders.append(AskLighthouse(combined, deadline - now - ANSWER_MARGIN_S))

    def combine_requests(self, requests: Collection[WorkerRequest]) -> GroupRequest:
        """The request of the group, from those of all its workers."""
        seen = max(requests, key=lambda request: request.last_quorum_id)
        has_history = all(request.last_quorum_id for request in requests)
        in_order = sorted(requests, key=lambda request: request.group_rank)
        return GroupRequest(
            round=self._round,
            step=min(request.step for request in requests),
            shrink_only=any(request.shrink_only for request in requests),
            commit_failures=max(request.commit_failures for request in requests),
            # A worker that is not in the quorum of the group was restarted while no manager lived.
            new_incarnation=self._restarted or (self._is_resumed and not has_history),
            unhealed=any(request.unhealed for request in requests),
            seen_quorum_id=seen.last_quorum_id,
            seen_num_groups=seen.last_num_groups,
            has_history=has_history,
            layout=group_layout([request.layout for request in in_order]),
            step_quorum_id=min(request.step_quorum_id for request in requests),
            steady=all(request.steady for request in requests),
            agreed=all(request.agreed for request in requests),
        )

    def _withdraw_request(self) -> None:
        """Stop asking the lighthouse, if the group does."""
        if self._asking:
            self._orders.append(StopAsking(self._round))
        self._asking = False

    def _answer_barrier(self, quorum: Quorum, replica_id: str, now: float) -> None:
        requests = self._requests_in_barrier()
        steps = {request.step for request in requests}
        if self._is_torn(steps, quorum.max_step):
            self._fail_barrier(_different_steps(requests))
            return
        answers = [
            _assignment_or_error(caller, request, quorum, replica_id, self._round)
            for request, caller in self._requests.values()
        ]
        self._over.record_answers(requests, None)
        self.commits.open_round({*steps, quorum.max_step})
        self._formed = quorum, replica_id
        self._requests = {}
        for answer in answers:
            self._send_answer(answer, now)

    def _is_torn(self, steps: set[int], max_step: int) -> bool:
        """Whether the workers are at different steps, and this quorum does not heal all of them."""
        heals = min(steps) != max_step  # behind, or not believed
        certain = {
            asked.step for asked, _ in self._requests.values() if not (heals and asked.unhealed)
        }
        return len(steps) > 1 and min(steps) <= max_step < max(certain, default=0)

    def _abandon_barrier(self, group_rank: int) -> None:
        """A worker no longer waits in it; the others must not wait for that worker."""
        self._withdraw_request()
        self._fail_barrier(QuorumFailed(f"group rank {group_rank} gave up waiting"))

    def _fail_barrier(self, error: TorchFTError) -> None:
        """End the quorum barrier, if there is one, for the waiting workers and those still to
        come."""
        if not self._requests:
            return
        known = self._attached, self._workers, self._voters
        absent = {
            rank: worker_id
            for rank in range(self.world_size)
            if rank not in self._requests
            and (worker_id := next(filter(None, (each.get(rank) for each in known)), ""))
        }  # a worker that was never there has begun no step
        self._over.record_failure(self._requests_in_barrier(), absent, error)
        self._refuse_requests(error)

    def _refuse_requests(self, error: TorchFTError) -> None:
        callers = self.callers_in_barrier()
        self._requests = {}
        for caller in callers:
            self._send_answer(RefuseWorker(caller, error))

    def _refuse_answered(self) -> None:
        """Refuse requests whose round an earlier manager has already answered for another worker
        of this group."""
        for rank, (request, caller) in list(self._requests.items()):
            ahead = self.answered_before(request)
            if ahead is not None:
                del self._requests[rank]
                error = QuorumFailed(
                    f"the manager died when only group rank {ahead} had its answer"
                )
                self._over.record_answers([request], error)
                self._send_answer(RefuseWorker(caller, error))

    def answered_before(self, request: WorkerRequest) -> int | None:
        """The group rank of another worker to which an earlier manager has answered the same."""
        if not self.commits.is_inherited or not request.last_round:
            return None
        rounds = self._rounds_before.items()
        return next((rank for rank, before in rounds if before == request.last_round), None)

    def late_answer(
        self, request: WorkerRequest, caller: int
    ) -> AnswerWorker | RefuseWorker | None:
        """The answer for a worker that comes to a barrier which is over; None if it is not."""
        ended = self._over.find_repeated(request)
        if ended is not None:
            if ended.error is not None:
                return RefuseWorker(caller, ended.error)
            # Also if the round is over by now, which it learns when it votes.
            assert self._formed is not None
            return _assignment_or_error(caller, request, *self._formed, self._round)
        error = self._over.pop_missed(request)
        if error is None:
            return None
        self._admit_worker(request)
        return RefuseWorker(caller, error)

    def _requests_in_barrier(self) -> list[WorkerRequest]:
        """The requests that wait in the quorum barrier."""
        return [request for request, _ in self._requests.values()]

    # -- the end of the group --------------------------------------------------------------------

    def begin_drain(self, reason: str) -> None:
        """The group leaves for good when all workers have finished their step."""
        self._drain_reason = self._drain_reason or reason
        self._all_gone_since = False
        # Where a quorum is asked for already, one with this group may be on its way, and has to be
        # honoured: the lighthouse's last word comes as an input, as always.
        if self._asking:
            self._send_leave(self._drained_leave(self._drain_reason))
        else:
            self._end_remaining_workers()

    def _end_remaining_workers(self) -> None:
        """End the other workers of a drained group that has lost one, and so has left, as soon as
        all of them ask."""
        left = self._attached.keys()
        is_short = self._restarted and bool(left) and left <= self._requests.keys()
        if self._drain_reason is not None and is_short:
            self._end_workers(self._drain_reason)

    def _end_workers(self, reason: str) -> None:
        """Refuse all that ask, for good; a worker that does not receive it is refused again."""
        self._ended_workers = {
            rank: (each.worker_id, reason)
            for rank, (each, _) in self._requests.items()
            if each.worker_id
        }
        for rank in self._requests.keys() - self._attached.keys():
            self._owners.pop(rank, None)
        self._refuse_requests(GroupLeft(reason))

    def _drained_leave(self, reason: str) -> Leave:
        """The message with which a drained group leaves.

        In a term the others may be in a step with this group, unless all have agreed to ask.
        """
        requests = self._requests_in_barrier()
        # The manager that has formed their quorum may have died.
        may_be = any(request.last_quorum_id for request in requests)
        in_term = self._formed[0].steady if self._formed else may_be
        knows = not in_term or all(request.agreed for request in requests)
        return Leave(reason, between_steps=knows, ends=True, departure=Departure.DRAINED)

    def _send_leave(self, leave: Leave) -> None:
        if not leave.between_steps:
            self._send_news(OwnGroupLost(leave.reason))
            quorum = self.last_quorum
            if quorum is not None:
                # A worker whose answer was lost receives it again, and must not go on in it.
                ends = TermEnds(quorum.quorum_id, quorum.max_step + 1, leave.reason)
                self._pending["left"] = ends
        if self.kill_reason is not None:  # of which the worker that is gone has died
            leave = replace(leave, reason=self.kill_reason, ends=True, departure=Departure.KILLED)
        self._orders.append(leave)

    # -- news and commands -----------------------------------------------------------------------

    def news_received(
        self,
        news: LighthouseNews,
        replica_id: str,
        quorum_id: int,
        encoded: bytes | None = None,
    ) -> Orders:
        """The lighthouse or an operator has news for this group, which has this id and was last in
        ``quorum_id``.

        All attached workers receive them, as ``encoded`` if that is known. Workers that attach
        later receive a command, too, and until the group asks for the next quorum also what ends
        the present one: a member is lost, a newcomer waits, or the term is to end, or is over. The
        last one of each kind counts.
        """
        sent = news if encoded is None else encoded
        match news:
            case Kill():
                self._send_command(sent)
                if self.kill_reason is None:
                    self.kill_reason = f"killed: {news.reason}"
                    self._orders.append(EndGroup())
            case Drain():
                self._send_command(sent)
                self.begin_drain(news.reason)
            case Lost() if news.replica_id == replica_id:
                self._send_until_asked("left out", sent)
                # The group may have moved to another lighthouse meanwhile, as another incarnation,
                # which was no member.
                if news.quorum_id >= quorum_id and self._was_member(news.replica_id):
                    self._deny_steps(0)
            case TermEnds(step=None):
                self._send_until_asked("to end", sent)
            case TermEnds():
                self._send_until_asked("is over", sent)
                if news.quorum_id == quorum_id and news.step is not None:
                    self._deny_steps(news.step)
            case Lost() | NewcomerWaits():
                self._send_until_asked(type(news).__name__, sent)
        return self._take_orders()

    def manager_stops(self) -> Orders:
        """This manager ends, and no other one follows: the workers need not look for one."""
        self.is_over = True
        how = "has shut down" if self._leader_ends else "stops or is dead"
        self._send_news(ManagerOver(f"the process of group rank 0, which had started it, {how}"))
        return self._take_orders()

    def _send_news(self, news: WorkerNews) -> None:
        """Send it to every attached worker."""
        if self._attached:
            self._orders.append(NotifyWorkers(tuple(sorted(self._attached)), news))

    def _send_command(self, news: WorkerNews) -> None:
        self._last_command = news
        self._send_news(news)

    def _send_until_asked(self, kind: str, news: WorkerNews) -> None:
        self._pending[kind] = news
        self._send_news(news)

    def _deny_steps(self, first: int) -> None:
        """Commit no step from ``first`` on in the present quorum: workers that stood still may vote
        before they have read the news."""
        self._send_answers(self.commits.deny_steps(first))

    def _was_member(self, replica_id: str) -> bool:
        quorum = self.last_quorum
        return quorum is None or any(each.replica_id == replica_id for each in quorum.participants)

    # -- a term that this manager continues ------------------------------------------------------

    def term_resumed(self, now: float) -> None:
        """A manager before had a quorum for the group, which continues in it: no step is committed
        until it is known whether that is still in force, see `HOLD_S`."""
        self._is_resumed = True
        self.commits.hold_yes()
        self._held_until = now + HOLD_S

    def link_changed(self, now: float, *, is_open: bool, absence: Absence | None = None) -> Orders:
        """The session has begun, maybe after an ``absence`` of all lighthouses; or a lighthouse
        could not be reached, or was lost.

        The lighthouse may be another one than before: it receives the last events again.
        """
        if is_open:
            last = [*self._last_own_events, *self._last_events]
            older = [each for each in self._events if each not in last]
            self._events.clear()
            self._events.extend([*older, *last])  # where all are too many, older ones give way
        if absence is not None:
            self._record_absence(absence, now)
        if self._held_until < math.inf:
            self._held_until = min(self._held_until, now + MISSED_NEWS_S * is_open)
        return self.tick(now)

    def _record_absence(self, absence: Absence, now: float) -> None:
        if self._asking:
            since = max(absence.since, now - (self._clock.now(now) - self._asked_at))
            self._away_s += max(0.0, now - since)
        lasts_s = max(0.0, now - absence.since)
        self._report_event(EventKind.LIGHTHOUSE_AWAY, absence.reason, now, lasts_s)

    def _report_event(self, kind: EventKind, cause: str, at: float, lasts_s: float = 0.0) -> None:
        self._num_events += 1
        event = GroupEvent(
            kind=kind,
            source=self._source,
            number=self._num_events,
            cause=cause,
            lasts_s=lasts_s,
        )
        self._events.append((event, at))
        self._last_own_events.append((event, at))

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """The time at which to call `tick` (infinite: nothing waits)."""
        calls = (call.deadline for call in self._calls.values())
        silences = (until for until, _, _ in self._silences)
        return min(itertools.chain(calls, silences, (self._held_until,)))

    def tick(self, now: float) -> Orders:
        """End calls, silences and holds whose time is over."""
        if now >= self._held_until:
            self._held_until = math.inf
            self._send_answers(self.commits.release_yes())
        for caller in [who for who, call in self._calls.items() if call.deadline <= now]:
            call = self._calls.get(caller)
            if call is None:  # answered by what came before
                continue
            late = DeadlineExceeded(call.action, call.timeout_s, self.why(caller))
            self._send_answer(RefuseWorker(caller, late))
            self._release_others(caller)
        while self._silences and self._silences[0][0] <= now:
            _, group_rank, caller = self._silences.popleft()
            self.end_silence(group_rank, caller, now)
        return self._take_orders()

    def explain_wait(self, lighthouse_reason: str, now: float) -> Orders:
        """Send the reason to one worker that waits for a quorum, every `look_s`; in the log of each
        worker it would be the same line."""
        first = min(self._num_asking.keys() & self._attached, default=None)
        if self._clock.now(now) - self._asked_at < EXPLAIN_AFTER_S or first is None:
            return ()
        reason = lighthouse_reason if self._asking else self.why()
        return (NotifyWorkers((first,), NoQuorumYet(reason)),)

    # -- queries ---------------------------------------------------------------------------------

    def checkpoint_address(self, group_rank: int) -> str:
        """The address at which worker ``group_rank`` serves its state.

        Raises:
            RequestRefused: the rank does not exist, or has not asked for a quorum yet.
        """
        self._check_rank(group_rank)
        if group_rank not in self._checkpoint_addresses:
            raise RequestRefused(
                f"group rank {group_rank} has not reported where it serves its state"
            )
        return self._checkpoint_addresses[group_rank]

    @property
    def last_quorum(self) -> Quorum | None:
        """The last quorum delivered to the workers."""
        return self._formed[0] if self._formed else None

    def callers_in_barrier(self) -> list[int]:
        """The callers that wait in the quorum barrier."""
        return [caller for _, caller in self._requests.values()]

    def held_rank(self, caller: int | None) -> int | None:
        """The group rank that ``caller`` would take over from a worker that may still live;
        None: its request is not held, but in the barrier."""
        return next((rank for rank, (_, held) in self._held.items() if held == caller), None)

    def why(self, caller: int | None = None) -> str:
        """What this group waits for, or ``caller``, whose request may be held."""
        held_rank = self.held_rank(caller)
        if held_rank is not None:
            return f"group rank {held_rank} belongs to another worker, which may be alive"
        if self._asking:
            return "the lighthouse has not answered yet"
        voters = self.commits.voters()
        waiting, barrier = (
            (voters, "voted") if voters else (self._requests.keys(), "asked for a quorum")
        )
        missing = [rank for rank in range(self.world_size) if rank not in waiting]
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        return f"group rank {shown} of {self.world_size} workers has not {barrier}"

    # -- orders ----------------------------------------------------------------------------------

    def _send_answer(self, answer: Answer, now: float = 0.0) -> None:
        """Answer the call of a worker, unless it is over."""
        if not self._end_call(answer.caller):
            return
        if isinstance(answer, AnswerWorker):
            # A worker that keeps the interpreter's lock does not report it.
            request = answer.request
            report = PhaseReport(Phase.TRAINING, request.step)
            self._record_activity(request.group_rank, report, now)
        self._orders.append(answer)

    def _send_answers(self, answers: Iterable[AnswerVote | RefuseWorker]) -> None:
        for answer in answers:
            self._send_answer(answer)

    def _take_orders(self) -> Orders:
        orders, self._orders = tuple(self._orders), []
        return orders


def _assignment_or_error(
    caller: int, request: WorkerRequest, quorum: Quorum, replica_id: str, round_: int
) -> AnswerWorker | RefuseWorker:
    try:
        part = assign(quorum, replica_id, request.group_rank, request.init_sync)
    except QuorumFailed as error:
        return RefuseWorker(caller, error)
    return AnswerWorker(caller, request, part, round_)


def _different_steps(requests: Collection[WorkerRequest]) -> RequestRefused:
    named = sorted((request.group_rank, request.step) for request in requests)
    steps = ", ".join(f"rank {rank} at step {step}" for rank, step in named)
    return RequestRefused(f"the workers of this group are at different steps: {steps}")
