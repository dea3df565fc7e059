"""Drives a group's manager: feeds it with the calls of its workers, and executes its orders."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable

from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, RefuseWorker
from torchft_svc.core.quorum.manager.group import (
    Answer,
    AnswerWorker,
    Group,
    ManagerOver,
    Orders,
    SentNews,
)
from torchft_svc.core.quorum.manager.shell import GroupShell
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Drain,
    Kill,
    Leave,
    LighthouseNews,
    Lost,
)
from torchft_svc.core.quorum.types import GroupRequest, Quorum, Vote, WorkerRequest
from torchft_svc.errors import TorchFTError
from torchft_svc.host.tasks import Tasks, call_later
from torchft_svc.manager_server.counts import ManagerCounts
from torchft_svc.manager_server.link import LighthouseLink
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import (
    decision_to_wire,
    difference_from_wire,
    events_from_wire,
    report_from_wire,
    tally_from_wire,
    worker_answer,
)
from torchft_svc.rpc.codec_session import session_news_from_wire, session_news_to_wire
from torchft_svc.rpc.outbox import Outbox

log = logging.getLogger(__name__)

# How long workers that do not read the last news, such as a kill, may hold up the end.
LAST_NEWS_S = 0.5


class ManagerDriver(GroupShell):
    """Drives ``group``; to be used on one event loop, inside the block of ``tasks``."""

    def __init__(self, group: Group, link: LighthouseLink, tasks: Tasks) -> None:
        super().__init__(group, link.machine, time.monotonic, call_later)
        self._link = link
        link.on_news, link.on_term = self.receive_message, self.receive_news
        link.on_outcome, link.on_change = self.receive_outcome, self.change_link
        link.beat, link.reached = self.make_beat, group.reached
        self._tasks = tasks
        self.counts = ManagerCounts()
        self._replies: dict[int, Callable[[Answer], None]] = {}  # by caller
        self._outboxes: dict[int, Outbox] = {}  # by group rank
        self.killed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether this manager ends, and so do its workers' streams."""
        return self.group.is_over

    @property
    def kill_reason(self) -> str | None:
        """Why this group ends, if it was killed."""
        return self.group.kill_reason

    def describe_position(self) -> dict[str, object]:
        """The step that all workers have reached, and the last quorum, for the log."""
        quorum = self.group.last_quorum
        quorum_id = {} if quorum is None else {"quorum_id": quorum.quorum_id}
        return {"step": self.group.reached(), **quorum_id}

    @property
    def num_attached(self) -> int:
        """How many workers have an open stream."""
        return len(self._outboxes)

    # -- calls -----------------------------------------------------------------------------------

    async def request_quorum(self, request: WorkerRequest, timeout_s: float) -> bytes:
        """Wait until all workers have asked and the lighthouse has answered; the encoded answer."""
        self._link.start()
        return await self._wait(
            lambda caller, now: self.group.quorum_requested(request, caller, timeout_s, now)
        )

    async def request_decision(self, vote: Vote, timeout_s: float) -> bytes:
        """Vote, and wait for the group's decision; the encoded answer."""
        return await self._wait(
            lambda caller, now: self.group.vote_received(vote, caller, timeout_s, now)
        )

    def cast_vote(self, vote: Vote, timeout_s: float, reply: Callable[[Answer], None]) -> int:
        """Vote without waiting: ``reply`` receives the decision, maybe before this returns the
        number of the caller, for `withdraw_call`."""
        caller = next(self._callers)
        self._replies[caller] = reply
        self._execute(self.group.vote_received(vote, caller, timeout_s, time.monotonic()))
        return caller

    def withdraw_call(self, caller: int) -> None:
        """Stop waiting for the answer; ignored if the caller has it."""
        self._replies.pop(caller, None)
        self._execute(self.group.call_withdrawn(caller))

    def checkpoint_address(self, group_rank: int) -> str:
        """The address at which worker ``group_rank`` serves its state."""
        return self.group.checkpoint_address(group_rank)

    async def list_members(self, timeout_s: float) -> pb.JobMembersResponse:
        """The members of the job's last quorum, as the lighthouse knows them.

        Raises:
            PeerError: it cannot be asked within ``timeout_s``.
        """
        self._link.start()
        self._link.feed(lambda machine, now: machine.return_for_worker(now))
        return await self._link.list_members(timeout_s)

    async def _wait(self, ask: Callable[[int, float], Orders]) -> bytes:
        caller = next(self._callers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies[caller] = functools.partial(_set_answer, answer)
        try:
            self._execute(ask(caller, time.monotonic()))
            return await answer
        finally:
            self.withdraw_call(caller)

    # -- workers ---------------------------------------------------------------------------------

    def attach_worker(self, group_rank: int, worker_id: str, outbox: Outbox) -> None:
        """Send the worker its news over ``outbox`` from now on.

        Raises:
            RequestRefused: the rank does not exist, or belongs to another worker.
        """
        orders = self.group.worker_attached(group_rank, worker_id)
        self._outboxes[group_rank] = outbox
        self._execute(orders)

    def detach_worker(
        self, group_rank: int, worker_id: str, outbox: Outbox, reason: str, *, ends: bool
    ) -> None:
        """End the worker's stream, unless it has opened another one since.

        ``ends``: its program ends on purpose.
        """
        if self._outboxes.get(group_rank) is outbox:
            del self._outboxes[group_rank]
            now = time.monotonic()
            self._execute(self.group.worker_detached(group_rank, worker_id, reason, now, ends=ends))

    def receive_phase(self, group_rank: int, message: pb.AttachPhase) -> None:
        """Record that an attached worker does something else now.

        Raises:
            RequestRefused: a field is out of bounds.
        """
        report = report_from_wire(message)
        if message.HasField("tally"):
            tally = tally_from_wire(message.tally)
            self.group.tally_reported(group_rank, tally, time.monotonic())
        if report is not None:
            self._execute(self.group.phase_reported(group_rank, report, time.monotonic()))
        if self.group.is_whole:
            self._link.start()

    def receive_difference(self, message: pb.StateDifference) -> None:
        """Report to the lighthouse that the groups' states differ, as an attached worker has found.

        Raises:
            RequestRefused: a field is out of bounds.
        """
        self.group.difference_reported(difference_from_wire(message))
        self._link.feed(lambda machine, now: machine.beat_at_once(now))

    def receive_event(self, message: pb.GroupEvent) -> None:
        """Report to the lighthouse what has happened to the group, as an attached worker reports.

        Raises:
            RequestRefused: a field is out of bounds.
        """
        for event in events_from_wire((message,)):
            self.group.event_reported(event, time.monotonic())
            self._link.feed(lambda machine, now: machine.beat_at_once(now))

    def make_beat(self) -> Beat:
        """A sign of life, with what the group does."""
        return self.group.make_beat(time.monotonic())

    async def watch_clock(self) -> None:
        """Look at the clock so often that a pause of this process is noticed, and counts as no time
        in which the group stood still. A worker that waits for a quorum receives the reason."""
        while True:
            await asyncio.sleep(self.group.look_s)
            why = self._link.machine.why_no_quorum
            self._execute(self.group.explain_wait(why, time.monotonic()))

    # -- the lighthouse --------------------------------------------------------------------------

    def receive_message(self, message: pb.SessionNews) -> None:
        """Act on news from the lighthouse, and forward them to the workers."""
        news = session_news_from_wire(message)
        if isinstance(news, LighthouseNews):  # others are for the link alone
            self.receive_news(news, message.SerializeToString())

    def receive_news(self, news: LighthouseNews, encoded: bytes | None = None) -> None:
        """News of the lighthouse, or a command; workers receive them as ``encoded``."""
        _log_news(news, self._link.machine.replica_id)
        super().receive_news(news, encoded)

    def change_link(self, is_open: bool) -> None:
        """Record that the connection to a lighthouse is open, or lost."""
        self.counts.is_connected = is_open
        super().change_link(is_open)

    def receive_outcome(self, round_: int, outcome: Quorum | TorchFTError) -> None:
        """The lighthouse has answered the request of ``round_``, or cannot be asked."""
        self.counts.record_outcome(time.monotonic(), is_formed=isinstance(outcome, Quorum))
        if not isinstance(outcome, Quorum):
            log.info("error for the workers: %s", outcome)  # which log it, or raise it
        super().receive_outcome(round_, outcome)

    # -- the end ---------------------------------------------------------------------------------

    def kill_group(self, reason: str) -> None:
        """End the group at once: ``killed`` is set when every worker has its news."""
        self.receive_news(Kill(reason))

    def drain_group(self, command: Drain) -> None:
        """Let the group finish its step and end."""
        self.receive_news(command)

    def report_stop(self) -> None:
        """Send the workers the news that this manager ends, and that there will be no other."""
        self._execute(self.group.manager_stops())

    async def flush_news(self) -> None:
        """Return when all news are on their way, or the workers do not read them."""
        leaving = [asyncio.create_task(outbox.end()) for outbox in self._outboxes.values()]
        try:
            if leaving:
                await asyncio.wait(leaving, timeout=LAST_NEWS_S)
        finally:
            for each in leaving:
                each.cancel()

    async def _end(self) -> None:
        try:
            await self.flush_news()
        finally:
            self.killed.set()

    # -- orders ----------------------------------------------------------------------------------

    def _ask_lighthouse(self, request: GroupRequest, timeout_s: float) -> None:
        self.counts.record_question(time.monotonic())
        self._link.feed_soon(lambda machine, now: machine.ask_quorum(request, timeout_s, now))

    def _withdraw_request(self, round_: int) -> None:
        self.counts.drop_question()
        self._link.feed_soon(lambda machine, now: machine.withdraw_round(round_, now))

    def _leave_lighthouse(self, leave: Leave) -> None:
        log.info("leaving: %s", leave.reason)
        self._tasks.start(self._link.leave(leave), "leave the lighthouse")

    def _answer_call(self, answer: Answer) -> None:
        reply = self._replies.pop(answer.caller, None)
        if reply is not None:
            reply(answer)

    def _send_news(self, group_ranks: tuple[int, ...], news: SentNews) -> None:
        encoded = _news_to_wire(news)
        for group_rank in group_ranks:
            self._outboxes[group_rank].add_news(encoded)

    def _end_group(self) -> None:
        self._tasks.start(self._end(), "end")


def _set_answer(future: asyncio.Future[bytes], answer: Answer) -> None:
    """Answer a call, unless it is over."""
    if future.done():
        return
    match answer:
        case RefuseWorker():
            future.set_exception(answer.error)
        case AnswerVote():
            future.set_result(decision_to_wire(answer).SerializeToString())
        case AnswerWorker():
            future.set_result(worker_answer(answer))


def _news_to_wire(news: SentNews) -> bytes:
    if isinstance(news, ManagerOver):
        return pb.AttachNews(over=pb.AttachOver(reason=news.reason)).SerializeToString()
    return news if isinstance(news, bytes) else session_news_to_wire(news)


def _log_news(news: LighthouseNews, replica_id: str) -> None:
    match news:
        case Kill():
            log.warning("killed by request: %r", news.reason)
        case Drain():
            log.warning("draining: %r", news.reason)
        case Lost() if news.replica_id == replica_id:
            log.warning("the others continue without this group: %s", news.reason)
        case Lost():
            log.info("group lost replica=%s: %s", news.replica_id, news.reason)
