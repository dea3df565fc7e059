"""A group's manager in a simulated world: the real barriers, driven as the service drives them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from tools.sim.invariants import Invariants, must
from tools.sim.link_actor import LinkActor, LinkSite, Outcome
from tools.sim.trace import Trace
from tools.sim.world import Process
from torchft_svc.core.quorum.activity import PhaseReport
from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.manager.group_orders import (
    AnswerVote,
    AnswerWorker,
    RefuseWorker,
    StopAsking,
)
from torchft_svc.core.quorum.manager.link_types import LinkConfig
from torchft_svc.core.quorum.manager.manager import (
    AskLink,
    EndGroup,
    GroupManager,
    Order,
    OwnGroupLost,
    TellWorkers,
    WorkerNews,
)
from torchft_svc.core.quorum.session_messages import Drain, Kill, Leave, Lost, NewcomerWaits
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Quorum, Vote, WorkerRequest
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import CommitFailed, TorchFTError

FIRST_ROUND = 1 << 40


WorkerAnswer = AnswerWorker | AnswerVote | TorchFTError
Reply = Callable[[WorkerAnswer], None]
OnNews = Callable[[WorkerNews], None]
# How long the workers have to end by themselves when they are told to.
KILL_NEWS_S = 0.5


class ManagerActor:
    """One life of a group's manager."""

    def __init__(
        self,
        process: Process,
        site: LinkSite,
        config: LinkConfig,
        on_killed: Callable[[], None],
        invariants: Invariants,
        trace: Trace,
    ) -> None:
        self.process = process
        self._job = site.job
        self._group = site.name
        self._on_killed = on_killed
        self._invariants = invariants
        self._trace = trace
        now = process.world.now
        # Each life begins far from the others; here it is always below the one before.
        group = Group(config.group_world_size, FIRST_ROUND - int(now * 1000))
        self.core = GroupManager(group, now, look_s=math.inf)
        beat = lambda: self.core.beat(process.world.now)  # noqa: E731
        self.link = LinkActor(
            process, site, config, self._receive, self._told, beat, self.core.reached
        )
        self.link.on_change = self._link_changed
        self._replies: dict[int, Reply] = {}
        self._barriers: dict[int, tuple[int, int]] = {}  # round and step, by the callers that vote
        self._askers: dict[int, str] = {}  # the workers that ask, by caller
        # The last life whose workers asked beside those of the one before: they may count as one
        # life, so that the end of one is noticed by the deadline of the others' questions only.
        self._mixed_life = 0
        self._workers: dict[int, tuple[str, OnNews]] = {}  # by group rank
        self._formed: Quorum | None = None  # the last one
        self._timer = DeadlineTimer(process.after, self._tick)
        # Its end, when one worker was told yes, or has its quorum.
        self.on_told: Callable[[AnswerVote | AnswerWorker], None] = lambda answer: None
        if config.resumed is not None:
            self.core.hold(now)
            self._carry_out(())

    def _link_changed(self, is_open: bool) -> None:
        self._carry_out(self.core.link_changed(self.process.world.now, is_open=is_open))

    # -- what workers say ------------------------------------------------------------------------

    def attach(self, group_rank: int, worker_id: str, on_news: OnNews) -> None:
        orders = self.core.attach(group_rank, worker_id)
        self._workers[group_rank] = (worker_id, on_news)
        self._carry_out(orders)

    def is_attached(self, worker_id: str) -> bool:
        return any(attached == worker_id for attached, _ in self._workers.values())

    def detach(self, group_rank: int, worker_id: str, reason: str) -> None:
        if self._workers.get(group_rank, ("",))[0] != worker_id:
            return
        del self._workers[group_rank]
        orders = self.core.detach(group_rank, worker_id, reason, self.process.world.now)
        self._carry_out(orders)
        # Workers of a later life of the group do not miss one of a life before, nor does one whose
        # question is held: it asks as soon as the worker before it is known to be gone.
        told_all = (
            not orders
            or _life(worker_id) <= self._mixed_life
            or all(
                self.core.group.held_rank(caller) is not None
                or (caller in self._askers and _life(self._askers[caller]) > _life(worker_id))
                for caller in self._replies
            )
        )
        must(told_all, "I5", f"{self.process.name}: {worker_id} is gone, and others still wait")

    def receive_phase(self, group_rank: int, report: PhaseReport) -> None:
        self._carry_out(self.core.receive_phase(group_rank, report, self.process.world.now))
        if self.core.is_whole:
            self.link.begin()

    def drain(self, reason: str) -> None:
        self._carry_out(self.core.drain(reason, self.process.world.now))

    def quorum(self, request: WorkerRequest, timeout_s: float, reply: Reply) -> int:
        """The number of the call, for `cancel`."""
        self.link.begin()
        caller, orders = self.core.ask(request, timeout_s, self.process.world.now)
        self._askers[caller] = request.worker_id
        lives = {_life(each) for each in self._askers.values()}
        if len(lives) > 1:
            self._mixed_life = max(lives)
        self._wait(caller, "quorum", timeout_s, reply)
        self._carry_out(orders)
        return caller

    def vote(self, vote: Vote, timeout_s: float, reply: Reply) -> int:
        if vote.should_commit:
            barrier = vote.round, vote.step
            self._invariants.identity.voted_yes(self._group, barrier, vote.group_rank)
        caller, orders = self.core.vote(vote, timeout_s, self.process.world.now)
        self._barriers[caller] = vote.round, vote.step
        self._wait(caller, "commit vote", timeout_s, reply)
        self._carry_out(orders)
        return caller

    def cancel(self, caller: int) -> None:
        if caller in self._replies:
            self._end(caller, CommitFailed("cancelled"))
            self._carry_out(self.core.withdraw(caller, self.process.world.now))

    def _wait(self, caller: int, action: str, timeout_s: float, reply: Reply) -> None:
        self._replies[caller] = reply
        self._invariants.waits.begin((self, caller), self.process, action, timeout_s)

    def _end(self, caller: int, answer: WorkerAnswer) -> None:
        self._invariants.waits.answered((self, caller), "a manager answers a worker")
        self._askers.pop(caller, None)
        barrier = self._barriers.pop(caller, (0, 0))
        is_yes = isinstance(answer, AnswerVote) and answer.should_commit
        if is_yes:
            size = self.core.group.world_size
            self._invariants.identity.decided(self._group, barrier, size)
        self._replies.pop(caller)(answer)
        if isinstance(answer, AnswerWorker) or (isinstance(answer, AnswerVote) and is_yes):
            self.on_told(answer)

    # -- orders ----------------------------------------------------------------------------------

    def _carry_out(self, orders: Sequence[Order]) -> None:
        # It may die while it tells a decision (`on_told`).
        for order in itertools.takewhile(lambda _: not self.process.is_dead, orders):
            if isinstance(order, AskLink):
                self.link.ask(order.question, order.timeout_s)
            elif isinstance(order, StopAsking):
                self.link.withdraw(order.round)
            elif isinstance(order, Leave):
                self._trace.record(self.process.name, f"leaves: {order.reason}")
                self.link.leave(order)
            elif isinstance(order, AnswerWorker):
                self._answer_worker(order)
            elif isinstance(order, AnswerVote):
                self._end(order.caller, order)
            elif isinstance(order, RefuseWorker):
                self._end(order.caller, order.error)
            elif isinstance(order, TellWorkers):
                self._tell_workers(order)
            elif isinstance(order, EndGroup):
                self.process.after(KILL_NEWS_S, self._on_killed)
        self._timer.set(self.core.next_deadline(), self.process.world.now)

    def _tick(self) -> None:
        self._carry_out(self.core.tick(self.process.world.now))

    def _told(self, round_: int, outcome: Outcome) -> None:
        replica_id = self.link.machine.replica_id
        if isinstance(outcome, Quorum):
            self._formed = outcome
        self._carry_out(self.core.outcome(round_, outcome, replica_id, self.process.world.now))

    def _answer_worker(self, order: AnswerWorker) -> None:
        part = order.assignment
        assert self._formed is not None
        agreement = self._invariants.agreement
        agreement.assigned(self._job, self._formed, part, order.request.group_rank)
        self._end(order.caller, order)

    def _tell_workers(self, order: TellWorkers) -> None:
        news = order.news
        if isinstance(news, OwnGroupLost):
            news = Lost(self.link.machine.replica_id, news.reason, self.link.machine.seen_quorum_id)
        for group_rank in order.group_ranks:
            self._workers[group_rank][1](news)

    # -- news ------------------------------------------------------------------------------------

    def _receive(self, news: Lost | Kill | Drain | NewcomerWaits | TermEnds) -> None:
        quorum_id, now = self.link.machine.seen_quorum_id, self.process.world.now
        if isinstance(news, Drain):
            self.drain(news.reason)
        elif isinstance(news, Kill):
            self._carry_out(self.core.kill(news.reason))
        elif isinstance(news, TermEnds):
            self._carry_out(self.core.term_ends(news, quorum_id, now))
        elif isinstance(news, Lost) and news.replica_id == self.link.machine.replica_id:
            self._carry_out(self.core.left_out(news, quorum_id, now))
        else:
            self._carry_out(self.core.tell_until_asked(type(news).__name__, news))


def _life(worker_id: str) -> int:
    """The number of the worker's life, which all workers that start together have."""
    return int(worker_id.rpartition(".")[2])
