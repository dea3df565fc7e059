"""A group's manager in a simulated world: the real barriers, driven as the service drives them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchft_svc.core.activity import Activity, WorkerActivities
from torchft_svc.core.assignment import Assignment
from torchft_svc.core.group import Group
from torchft_svc.core.group_orders import (
    OWNER_SILENCE_S,
    AnswerVote,
    AnswerWorker,
    AskLighthouse,
    AwaitOwner,
    LeaveLighthouse,
    Order,
    RefuseWorker,
    StopAsking,
)
from torchft_svc.core.step import Phase
from torchft_svc.core.types import Quorum, Vote, WorkerRequest
from torchft_svc.errors import CommitFailed, DeadlineExceeded, TorchFTError
from torchft_svc.sim.invariants import Invariants, must
from torchft_svc.sim.link_actor import LinkActor, Outcome
from torchft_svc.sim.trace import Trace
from torchft_svc.sim.world import Process

ANSWER_MARGIN_S = 0.05
FIRST_ROUND = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Assignment):
    """What a worker is told: its part in a quorum, and the round to vote in."""

    round: int


WorkerAnswer = Part | bool | TorchFTError
Reply = Callable[[WorkerAnswer], None]
News = Callable[..., None]  # the kind of news, and what it tells
OnOutcome = Callable[[int, Outcome], None]  # of a round
# How long the workers have to end by themselves when they are told to.
KILL_NEWS_S = 0.5


class ManagerActor:
    """One life of a group's manager."""

    def __init__(
        self,
        process: Process,
        job: str,
        group_world_size: int,
        link: Callable[[News, OnOutcome, Callable[[], Activity | None]], LinkActor],
        on_killed: Callable[[], None],
        shared: tuple[Invariants, Trace],
    ) -> None:
        self.process = process
        self._job = job
        self._group = process.name.partition("/")[0]
        self._on_killed = on_killed
        self._invariants, self._trace = shared
        # Each life begins far from the others; here it is always below the one before.
        self.core = Group(group_world_size, FIRST_ROUND - int(process.world.now * 1000))
        self._activities = WorkerActivities()
        self.link = link(self._hear, self._told, self._activities.slowest)
        self._formed: Quorum | None = None  # the last one that the group was told
        self._callers = itertools.count()
        self._replies: dict[int, Reply] = {}
        self._deadlines: dict[int, float] = {}
        self._rounds: dict[int, int] = {}  # by the callers that vote
        self._askers: dict[int, str] = {}  # the workers that ask, by caller
        self._news: dict[int, News] = {}

    # -- what workers say ------------------------------------------------------------------------

    def attach(self, group_rank: int, worker_id: str, on_news: News) -> None:
        self.core.attached(group_rank, worker_id)
        self._news[group_rank] = on_news

    def detach(self, group_rank: int, worker_id: str, reason: str) -> None:
        self._news.pop(group_rank, None)
        self._activities.gone(group_rank)
        orders = self.core.detached(group_rank, worker_id, reason)
        self._carry_out(orders)
        # Workers of a later life of the group do not miss one of a life before.
        told_all = not orders or all(
            caller in self._askers and _life(self._askers[caller]) > _life(worker_id)
            for caller in self._replies
        )
        must(told_all, "I5", f"{self.process.name}: {worker_id} is gone, and others still wait")

    def hear_phase(self, group_rank: int, phase: Phase, step: int) -> None:
        """A worker does something else now."""
        if group_rank in self._news:
            self._activities.reported(group_rank, phase, step, self.process.world.now)

    def drain(self, reason: str) -> None:
        """The group has to finish its step and end."""
        self._tell_workers("drain")
        self._carry_out(self.core.drain(reason))

    def quorum(self, request: WorkerRequest, timeout_s: float, reply: Reply) -> int:
        """The caller's number, to cancel the call by."""
        is_own = self.core.belongs_to(request.group_rank, request.worker_id)
        if is_own and request.group_rank in self._news:
            self._activities.asks(request.group_rank, request.step, self.process.world.now)

        def enter(caller: int) -> Sequence[Order]:
            self._askers[caller] = request.worker_id
            return self.core.quorum_requested(request, caller)

        return self._wait("quorum", timeout_s, reply, enter)

    def vote(self, vote: Vote, timeout_s: float, reply: Reply) -> int:
        """The caller's number, to cancel the call by."""

        identity = self._invariants.identity

        def enter(caller: int) -> Sequence[Order]:
            self._rounds[caller] = vote.round
            if vote.should_commit:
                identity.voted_yes(self._group, vote.round, vote.group_rank)
            return self.core.voted(vote, caller)

        return self._wait("commit vote", timeout_s, reply, enter)

    def cancel(self, caller: int) -> None:
        """The worker gave up waiting, or its connection ended."""
        if caller in self._replies:
            self._end(caller, CommitFailed("cancelled"))
            self._carry_out(self.core.withdrawn(caller))

    def _wait(
        self,
        action: str,
        timeout_s: float,
        reply: Reply,
        enter: Callable[[int], Sequence[Order]],
    ) -> int:
        caller = next(self._callers)
        self._replies[caller] = reply
        self._deadlines[caller] = self.process.world.now + timeout_s
        self._invariants.waits.begin((self, caller), self.process, action, timeout_s)
        self.process.after(timeout_s, self._expire, caller, action, timeout_s)
        try:
            self._carry_out(enter(caller))
        except TorchFTError as error:
            self._end(caller, error)
        return caller

    def _expire(self, caller: int, action: str, timeout_s: float) -> None:
        if caller in self._replies:
            self._end(caller, DeadlineExceeded(action, timeout_s, self.core.why(caller)))
            self._carry_out(self.core.withdrawn(caller))

    def _end(self, caller: int, answer: WorkerAnswer) -> None:
        """Answer and forget."""
        self._invariants.waits.answered((self, caller), "a manager answers a worker")
        del self._deadlines[caller]
        self._askers.pop(caller, None)
        round_ = self._rounds.pop(caller, 0)
        if answer is True:
            self._invariants.identity.decided(self._group, round_, self.core.world_size)
        self._replies.pop(caller)(answer)

    # -- orders ----------------------------------------------------------------------------------

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, AskLighthouse):
                self._ask(order)
            elif isinstance(order, StopAsking):
                self.link.withdraw(order.round)
            elif isinstance(order, LeaveLighthouse):
                self._trace.record(self.process.name, f"leaves: {order.reason}")
                if not order.between_steps:
                    self._tell_workers("lost", self.link.replica_id, self.link.seen_quorum_id)
                self.link.leave(order.reason, order.between_steps, order.ends)
            elif isinstance(order, AnswerWorker):
                self._answer_worker(order)
            elif isinstance(order, AnswerVote):
                self._end(order.caller, order.should_commit)
            elif isinstance(order, RefuseWorker):
                self._end(order.caller, order.error)
            elif isinstance(order, AwaitOwner):
                self.process.after(OWNER_SILENCE_S, self._look_at_owner, order)

    def _look_at_owner(self, order: AwaitOwner) -> None:
        self._carry_out(self.core.owner_was_silent(order.group_rank, order.number))

    def _ask(self, order: AskLighthouse) -> None:
        now = self.process.world.now
        timeout_s = min(self._deadlines[each] for each in self.core.askers())
        timeout_s -= now + ANSWER_MARGIN_S
        self.link.ask(order, timeout_s)

    def _told(self, round_: int, outcome: Outcome) -> None:
        if isinstance(outcome, Quorum):
            self._invariants.progress.told(self.link.replica_id, outcome)
            self._formed = outcome
            self._carry_out(self.core.quorum_formed(round_, outcome, self.link.replica_id))
        else:
            self._carry_out(self.core.quorum_failed(round_, outcome))

    def _answer_worker(self, order: AnswerWorker) -> None:
        request = order.request
        self.hear_phase(request.group_rank, Phase.TRAINING, request.step)
        part = order.assignment
        assert self._formed is not None
        self._invariants.agreement.assigned(self._job, self._formed, part, request.group_rank)
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        self._end(order.caller, Part(**fields, round=order.round))

    # -- news ------------------------------------------------------------------------------------

    def _hear(self, kind: str, *what: object) -> None:
        if kind == "drain":
            self.drain("the lighthouse says so")
            return
        self._tell_workers(kind, *what)
        if kind == "kill":
            self.process.after(KILL_NEWS_S, self._on_killed)

    def _tell_workers(self, kind: str, *what: object) -> None:
        for tell in list(self._news.values()):
            tell(kind, *what)


def _life(worker_id: str) -> int:
    """The number of the worker's life, which all workers that start together have."""
    return int(worker_id.rpartition(".")[2])
