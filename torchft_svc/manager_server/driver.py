"""Drives a group's core: feeds it what its workers ask, carries out its orders."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from torchft_svc.core.activity import WorkerActivities
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
from torchft_svc.core.pausable_clock import MAX_LOOK_S, PausableClock
from torchft_svc.core.step import Phase
from torchft_svc.core.types import Quorum, Vote, WorkerRequest, check_step
from torchft_svc.errors import DeadlineExceeded, TorchFTError
from torchft_svc.manager_server.link import LighthouseLink
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import (
    beat_to_wire,
    drain_news,
    kill_news,
    member_lost,
    no_quorum_yet,
    over_news,
    phase_from_wire,
    worker_answer,
)
from torchft_svc.rpc.outbox import Outbox
from torchft_svc.rpc.tasks import Tasks

log = logging.getLogger(__name__)

# The lighthouse's answer, or its reason, must still reach the workers within their own deadlines.
ANSWER_MARGIN_S = 0.05
# Workers that do not read the last news, such as the order to end, do not hold up the end.
LAST_NEWS_S = 0.5
# Groups wait for one another in every step; who waits for longer than this is told what for.
TELL_WHY_AFTER_S = 2.0


class ManagerDriver:
    """Owns the core; to be used on one event loop, inside the block of ``tasks``."""

    def __init__(self, group: Group, link: LighthouseLink, tasks: Tasks) -> None:
        self._core = group
        self._link = link
        link.on_news, link.on_outcome, link.beat = self.hear, self._told, self.beat
        self._tasks = tasks
        self._callers = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._deadlines: dict[int, float] = {}
        self._workers: dict[int, Outbox] = {}
        self._activities = WorkerActivities()
        self._num_asking: collections.Counter[int] = collections.Counter()  # by group rank
        self._asked_at = 0.0  # since when some worker waits for a quorum, if one does
        self._clock = PausableClock(MAX_LOOK_S, time.monotonic())  # of the activities and questions
        self._last_order: bytes | None = None
        self._leader_ends = False  # group rank 0 has ended on purpose
        self.is_over = False  # this manager ends, and so do its workers' streams
        self.kill_reason: str | None = None  # this group ends because of it
        self.killed = asyncio.Event()

    async def quorum(self, request: WorkerRequest, timeout_s: float) -> bytes:
        """Wait until all workers have asked and the lighthouse has answered; the encoded answer."""
        group_rank = request.group_rank
        question = self._wait(
            "quorum", timeout_s, lambda caller: self._core.quorum_requested(request, caller)
        )
        if not self._core.belongs_to(group_rank, request.worker_id):
            return await question
        if not self._num_asking:
            self._asked_at = self._clock.now(time.monotonic())
        if group_rank in self._workers:  # others do not tell when it is over
            self._activities.asks(group_rank, request.step, self._clock.now(time.monotonic()))
        self._num_asking[group_rank] += 1
        try:
            return await question
        finally:
            self._num_asking[group_rank] -= 1
            if not self._num_asking[group_rank]:
                del self._num_asking[group_rank]

    async def should_commit(self, vote: Vote, timeout_s: float) -> bytes:
        """Wait for the group's decision; the encoded answer."""
        return await self._wait(
            "commit vote", timeout_s, lambda caller: self._core.voted(vote, caller)
        )

    def checkpoint_address(self, group_rank: int) -> str:
        """Where worker ``group_rank`` serves its state."""
        return self._core.checkpoint_address(group_rank)

    def attach(self, group_rank: int, worker_id: str, outbox: Outbox) -> None:
        """``outbox`` leads to the worker from now on.

        Raises:
            RequestRefused: the rank does not exist.
        """
        self._core.attached(group_rank, worker_id)
        self._workers[group_rank] = outbox
        if self._last_order is not None:
            outbox.tell(self._last_order)

    def detach(
        self, group_rank: int, worker_id: str, outbox: Outbox, reason: str, *, ends: bool
    ) -> None:
        """The worker's stream has ended; nothing, if it has another one already. ``ends``: its
        program ends on purpose."""
        if self._workers.get(group_rank) is outbox:
            del self._workers[group_rank]
            self._activities.gone(group_rank)
            if group_rank == 0:
                self._leader_ends = ends
            if not self._workers and self.kill_reason is None:
                self._last_order = None  # whoever comes after those that were told begins anew
            self._carry_out(self._core.detached(group_rank, worker_id, reason, ends=ends))

    def hear_phase(self, group_rank: int, message: pb.AttachPhase) -> None:
        """An attached worker does something else now.

        Raises:
            RequestRefused: the step cannot be.
        """
        check_step(message.step)
        phase = phase_from_wire(message.phase)
        is_overtaken = group_rank in self._num_asking  # by the question, whose answer comes first
        if phase is not None and not is_overtaken:
            self._note(group_rank, phase, message.step)

    def _note(self, group_rank: int, phase: Phase, step: int) -> None:
        """Only of attached workers: others do not tell when it is over."""
        if group_rank in self._workers:
            self._activities.reported(group_rank, phase, step, self._clock.now(time.monotonic()))

    def beat(self) -> pb.SessionBeat:
        """A sign of life, with what the group does, if its workers tell."""
        return beat_to_wire(self._activities.slowest(), self._clock.now(time.monotonic()))

    async def keep_looking(self) -> None:
        """What the group does lasts no longer because this process, and it, was stopped.

        Who waits for a quorum is told what for."""
        while True:
            await asyncio.sleep(self._clock.look_s)
            self._tell_why(self._clock.now(time.monotonic()))

    def _tell_why(self, now: float) -> None:
        """To one worker of the group: it would be the same line in the log of each."""
        if now - self._asked_at < TELL_WHY_AFTER_S:
            return
        first = min(self._num_asking.keys() & self._workers.keys(), default=None)
        if first is not None:
            self._workers[first].tell(no_quorum_yet(self._why_no_quorum()))

    def _why_no_quorum(self) -> str:
        return self._link.why_no_quorum if self._core.is_asking else self._core.why()

    def hear(self, news: pb.SessionNews) -> None:
        """News from the lighthouse."""
        kind = news.WhichOneof("kind")
        if kind == "kill":
            self.kill(news.kill.reason)
        elif kind == "drain":
            self.drain(news.drain.reason)
        elif kind == "lost":
            lost = news.lost
            if lost.replica_id == self._link.replica_id:
                log.warning("the others continue without this group: %s", lost.reason)
            else:
                log.info("group lost replica=%s: %s", lost.replica_id, lost.reason)
            self._tell_workers(news.SerializeToString())
        elif kind == "waiting":
            self._tell_workers(news.SerializeToString())

    def kill(self, reason: str) -> None:
        """The group has to end at once: every worker hears of it, then ``killed`` is set."""
        log.warning("killed by request: %r", reason)
        self._order(kill_news(reason))
        if self.kill_reason is None:
            self.kill_reason = f"killed: {reason}"
            self._tasks.start(self._end(), "end")

    def drain(self, reason: str) -> None:
        """The group has to finish its step and end: every worker hears of it."""
        log.warning("draining: %r", reason)
        self._order(drain_news(reason))
        self._carry_out(self._core.drain(reason))

    def tell_over(self) -> None:
        """This manager ends, and there will be no other: nobody need look for one."""
        self.is_over = True
        how = "has shut down" if self._leader_ends else "stops or is dead"
        self._tell_workers(over_news(f"the process of group rank 0, which had started it, {how}"))

    def _order(self, news: bytes) -> None:
        """Also a worker that attaches later hears it."""
        self._last_order = news
        self._tell_workers(news)

    def _tell_workers(self, news: bytes) -> None:
        for outbox in self._workers.values():
            outbox.tell(news)

    async def _end(self) -> None:
        try:
            await self.news_left()
        finally:
            self.killed.set()

    async def news_left(self) -> None:
        """Return when what the workers were told is on its way, or they do not read it."""
        leaving = [asyncio.create_task(outbox.end()) for outbox in self._workers.values()]
        try:
            if leaving:
                await asyncio.wait(leaving, timeout=LAST_NEWS_S)
        finally:
            for each in leaving:
                each.cancel()

    async def _wait(
        self, action: str, timeout_s: float, enter: Callable[[int], Sequence[Order]]
    ) -> bytes:
        caller = next(self._callers)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        self._answers[caller] = answer
        self._deadlines[caller] = time.monotonic() + timeout_s
        expiry = loop.call_later(timeout_s, self._expire, action, caller, timeout_s)
        try:
            self._carry_out(enter(caller))
            return await answer
        finally:
            expiry.cancel()
            del self._deadlines[caller]
            if self._answers.pop(caller, None) is not None:
                self._carry_out(self._core.withdrawn(caller))

    def _expire(self, action: str, caller: int, timeout_s: float) -> None:
        answer = self._answers.get(caller)
        if answer is not None and not answer.done():
            answer.set_exception(DeadlineExceeded(action, timeout_s, self._core.why(caller)))

    def _look_at_owner(self, order: AwaitOwner) -> None:
        self._carry_out(self._core.owner_was_silent(order.group_rank, order.number))

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, AskLighthouse):
                deadline = min(self._deadlines[caller] for caller in self._core.askers())
                timeout_s = deadline - time.monotonic() - ANSWER_MARGIN_S
                self._link.ask(order, timeout_s)
            elif isinstance(order, StopAsking):
                self._link.withdraw(order.round)
            elif isinstance(order, LeaveLighthouse):
                self._leave(order)
            elif isinstance(order, AnswerWorker):
                self._answer_worker(order)
            elif isinstance(order, AnswerVote):
                answer = pb.ShouldCommitResponse(should_commit=order.should_commit)
                self._answer(order.caller, answer.SerializeToString())
            elif isinstance(order, RefuseWorker):
                self._refuse(order.caller, order.error)
            elif isinstance(order, AwaitOwner):
                loop = asyncio.get_running_loop()
                loop.call_later(OWNER_SILENCE_S, self._look_at_owner, order)

    def _leave(self, order: LeaveLighthouse) -> None:
        log.info("leaving: %s", order.reason)
        if not order.between_steps:
            # The lighthouse tells the other groups. Those that hang let the workers that are left
            # here wait for their sums, and NCCL does so in any case.
            me, quorum_id = self._link.replica_id, self._link.seen_quorum_id
            self._tell_workers(member_lost(me, order.reason, quorum_id))
        reason, ends = order.reason, order.ends
        if self.kill_reason is not None:  # of which the worker that is gone has died
            reason, ends = self.kill_reason, True
        leaving = self._link.leave(reason, between_steps=order.between_steps, ends=ends)
        self._tasks.start(leaving, "leave the lighthouse")

    def _answer_worker(self, order: AnswerWorker) -> None:
        # Noted here, because a worker that takes the interpreter's lock and keeps it tells nothing.
        self._note(order.request.group_rank, Phase.TRAINING, order.request.step)
        self._answer(order.caller, worker_answer(order))

    def _refuse(self, caller: int, error: TorchFTError) -> None:
        waiting = self._answers.pop(caller, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def _answer(self, caller: int, encoded: bytes) -> None:
        waiting = self._answers.pop(caller, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(encoded)

    def _told(self, round_: int, outcome: Quorum | TorchFTError) -> None:
        if isinstance(outcome, Quorum):
            self._carry_out(self._core.quorum_formed(round_, outcome, self._link.replica_id))
        else:
            log.info("error for the workers: %s", outcome)  # who say it, or raise it
            self._carry_out(self._core.quorum_failed(round_, outcome))
