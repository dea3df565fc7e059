"""Drives a group's manager: feeds it what its workers ask, carries out its orders."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence

from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.manager.group_orders import (
    AnswerVote,
    AnswerWorker,
    RefuseWorker,
    StopAsking,
)
from torchft_svc.core.quorum.manager.manager import (
    AskLink,
    EndGroup,
    GroupManager,
    ManagerOver,
    Order,
    OwnGroupLost,
    TellWorkers,
    WorkerNews,
)
from torchft_svc.core.quorum.session_messages import Beat, Leave, Lost
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Quorum, Vote, WorkerRequest, check_step
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import TorchFTError
from torchft_svc.host.tasks import Tasks, call_later
from torchft_svc.manager_server.link import LighthouseLink
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import (
    decision_to_wire,
    difference_from_wire,
    report_from_wire,
    term_ends_from_wire,
    worker_answer,
)
from torchft_svc.rpc.codec_session import session_news_to_wire
from torchft_svc.rpc.outbox import Outbox

log = logging.getLogger(__name__)

# Workers that do not read the last news, such as the order to end, do not hold up the end.
LAST_NEWS_S = 0.5

Answer = AnswerWorker | AnswerVote | RefuseWorker


class ManagerDriver:
    """Owns the core; to be used on one event loop, inside the block of ``tasks``."""

    def __init__(self, group: Group, link: LighthouseLink, tasks: Tasks) -> None:
        self._core = GroupManager(group, time.monotonic())
        self._link = link
        link.on_news, link.on_term, link.on_outcome = self.receive, self._term_ends, self._told
        link.beat, link.reached = self.beat, self._core.reached
        link.on_change = self._link_changed
        self._tasks = tasks
        self._replies: dict[int, Callable[[Answer], None]] = {}  # by caller
        self._outboxes: dict[int, Outbox] = {}  # by group rank
        self._timer = DeadlineTimer(call_later, self._tick)
        self.killed = asyncio.Event()

    def hold(self) -> None:
        """See `GroupManager.hold`; before the first call."""
        self._core.hold(time.monotonic())
        self._carry_out(())

    def _link_changed(self, is_open: bool) -> None:
        self._carry_out(self._core.link_changed(time.monotonic(), is_open=is_open))

    @property
    def is_over(self) -> bool:
        """This manager ends, and so do its workers' streams."""
        return self._core.is_over

    @property
    def kill_reason(self) -> str | None:
        """This group ends because of it."""
        return self._core.kill_reason

    # -- calls -----------------------------------------------------------------------------------

    async def quorum(self, request: WorkerRequest, timeout_s: float) -> bytes:
        """Wait until all workers have asked and the lighthouse has answered; the encoded answer."""
        self._link.start()
        return await self._wait(*self._core.ask(request, timeout_s, time.monotonic()))

    async def should_commit(self, vote: Vote, timeout_s: float) -> bytes:
        """Wait for the group's decision; the encoded answer."""
        return await self._wait(*self._core.vote(vote, timeout_s, time.monotonic()))

    def cast(self, vote: Vote, timeout_s: float, reply: Callable[[Answer], None]) -> int:
        """The same without waiting: ``reply`` gets the decision, maybe before this returns the
        number of the caller, for `withdraw`."""
        caller, orders = self._core.vote(vote, timeout_s, time.monotonic())
        self._replies[caller] = reply
        self._carry_out(orders)
        return caller

    def withdraw(self, caller: int) -> None:
        """The caller no longer waits; ignored if it has its answer."""
        self._replies.pop(caller, None)
        self._carry_out(self._core.withdraw(caller, time.monotonic()))

    def checkpoint_address(self, group_rank: int) -> str:
        """Where worker ``group_rank`` serves its state."""
        return self._core.group.checkpoint_address(group_rank)

    async def _wait(self, caller: int, orders: Sequence[Order]) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies[caller] = functools.partial(_settle, answer)
        try:
            self._carry_out(orders)
            return await answer
        finally:
            self.withdraw(caller)

    # -- workers ---------------------------------------------------------------------------------

    def attach(self, group_rank: int, worker_id: str, outbox: Outbox) -> None:
        """``outbox`` leads to the worker from now on.

        Raises:
            RequestRefused: the rank does not exist.
        """
        orders = self._core.attach(group_rank, worker_id)
        self._outboxes[group_rank] = outbox
        self._carry_out(orders)

    def detach(
        self, group_rank: int, worker_id: str, outbox: Outbox, reason: str, *, ends: bool
    ) -> None:
        """The worker's stream has ended; nothing, if it has another one already. ``ends``: its
        program ends on purpose."""
        if self._outboxes.get(group_rank) is outbox:
            del self._outboxes[group_rank]
            now = time.monotonic()
            self._carry_out(self._core.detach(group_rank, worker_id, reason, now, ends=ends))

    def receive_phase(self, group_rank: int, message: pb.AttachPhase) -> None:
        """An attached worker does something else now.

        Raises:
            RequestRefused: the step cannot be.
        """
        check_step(message.step)
        check_step(message.went_on_to)
        report = report_from_wire(message)
        if report is not None:
            self._carry_out(self._core.receive_phase(group_rank, report, time.monotonic()))
        if self._core.is_whole:
            self._link.start()

    def receive_difference(self, message: pb.StateDifference) -> None:
        """An attached worker reports that the groups' states differ.

        Raises:
            RequestRefused: a field is out of bounds.
        """
        self._core.receive_difference(difference_from_wire(message))
        self._link.beat_at_once()

    def beat(self) -> Beat:
        return self._core.beat(time.monotonic())

    async def keep_looking(self) -> None:
        """What the group does lasts no longer because this process, and it, was stopped.

        Who waits for a quorum is told what for."""
        while True:
            await asyncio.sleep(self._core.look_s)
            self._carry_out(self._core.tell_why(self._link.machine.why_no_quorum, time.monotonic()))

    # -- news ------------------------------------------------------------------------------------

    def receive(self, news: pb.SessionNews) -> None:
        """Act on news from the lighthouse, and forward it to the workers."""
        kind, encoded = news.WhichOneof("kind"), news.SerializeToString()
        if kind == "kill":
            self.kill(news.kill.reason, encoded)
        elif kind == "drain":
            self.drain(news.drain.reason, encoded)
        elif kind == "lost":
            self._lost(news.lost, encoded)
        elif kind == "waiting":
            self._carry_out(self._core.tell_until_asked(kind, encoded))
        elif kind == "term_ends":
            self._term_ends(term_ends_from_wire(news.term_ends), encoded)

    def _lost(self, lost: pb.MemberLost, told: bytes) -> None:
        link = self._link.machine
        if lost.replica_id == link.replica_id:
            log.warning("the others continue without this group: %s", lost.reason)
            news = Lost(lost.replica_id, lost.reason, lost.quorum_id)
            orders = self._core.left_out(news, link.seen_quorum_id, time.monotonic(), told)
        else:
            log.info("group lost replica=%s: %s", lost.replica_id, lost.reason)
            orders = self._core.tell_until_asked("lost", told)
        self._carry_out(orders)

    def _term_ends(self, news: TermEnds, told: bytes | None = None) -> None:
        quorum_id, now = self._link.machine.seen_quorum_id, time.monotonic()
        self._carry_out(self._core.term_ends(news, quorum_id, now, told))

    def kill(self, reason: str, told: bytes | None = None) -> None:
        """The group has to end at once: every worker is told, then ``killed`` is set."""
        log.warning("killed by request: %r", reason)
        self._carry_out(self._core.kill(reason, told))

    def drain(self, reason: str, told: bytes | None = None) -> None:
        """The group has to finish its step and end: every worker is told."""
        log.warning("draining: %r", reason)
        self._carry_out(self._core.drain(reason, time.monotonic(), told))

    def tell_over(self) -> None:
        """This manager ends, and there will be no other: nobody need look for one."""
        self._carry_out(self._core.over())

    async def news_left(self) -> None:
        """Return when what the workers were told is on its way, or they do not read it."""
        leaving = [asyncio.create_task(outbox.end()) for outbox in self._outboxes.values()]
        try:
            if leaving:
                await asyncio.wait(leaving, timeout=LAST_NEWS_S)
        finally:
            for each in leaving:
                each.cancel()

    async def _end(self) -> None:
        try:
            await self.news_left()
        finally:
            self.killed.set()

    # -- orders ----------------------------------------------------------------------------------

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, AskLink):
                self._link.ask(order.question, order.timeout_s)
            elif isinstance(order, StopAsking):
                self._link.withdraw(order.round)
            elif isinstance(order, Leave):
                log.info("leaving: %s", order.reason)
                self._tasks.start(self._link.leave(order), "leave the lighthouse")
            elif isinstance(order, TellWorkers):
                news = self._encode(order.news)
                for group_rank in order.group_ranks:
                    self._outboxes[group_rank].tell(news)
            elif isinstance(order, EndGroup):
                self._tasks.start(self._end(), "end")
            else:
                self._answer(order)
        self._timer.set(self._core.next_deadline(), time.monotonic())

    def _answer(self, order: Answer) -> None:
        reply = self._replies.pop(order.caller, None)
        if reply is not None:
            reply(order)

    def _encode(self, news: WorkerNews) -> bytes:
        if isinstance(news, OwnGroupLost):
            news = Lost(
                self._link.machine.replica_id, news.reason, self._link.machine.seen_quorum_id
            )
        if isinstance(news, ManagerOver):
            return pb.AttachNews(over=pb.AttachOver(reason=news.reason)).SerializeToString()
        return news if isinstance(news, bytes) else session_news_to_wire(news)

    def _told(self, round_: int, outcome: Quorum | TorchFTError) -> None:
        """The lighthouse has answered, or cannot be asked."""
        if not isinstance(outcome, Quorum):
            log.info("error for the workers: %s", outcome)  # who say it, or raise it
        self._carry_out(
            self._core.outcome(round_, outcome, self._link.machine.replica_id, time.monotonic())
        )

    def _tick(self) -> None:
        self._carry_out(self._core.tick(time.monotonic()))


def _settle(answer: asyncio.Future[bytes], order: Answer) -> None:
    """Answer a call, unless it is over."""
    if answer.done():
        return
    if isinstance(order, RefuseWorker):
        answer.set_exception(order.error)
    elif isinstance(order, AnswerVote):
        answer.set_result(decision_to_wire(order).SerializeToString())
    else:
        answer.set_result(worker_answer(order))
