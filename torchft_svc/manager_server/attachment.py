"""One worker's attachment to its manager: the stream that proves its life, brings news, and takes
votes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchft_svc.core.limits import MAX_ADDRESS_LENGTH, check_text
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, RefuseWorker
from torchft_svc.core.quorum.manager.group import Answer
from torchft_svc.errors import RequestRefused
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.calls import time_to_wait_s
from torchft_svc.rpc.codec import decision_to_wire, vote_from_wire
from torchft_svc.rpc.outbox import Outbox, first_message
from torchft_svc.rpc.status import error_to_wire

log = logging.getLogger(__name__)

# An error is shown in one log line.
MAX_FAILURE_LENGTH = 500


async def attach(
    driver: ManagerDriver,
    requests: AsyncIterator[pb.AttachRequest],
    context: grpc.aio.ServicerContext[Any, Any],
) -> None:
    """Serve the stream to its end.

    An end without a goodbye is the worker's death, and one with an error is no orderly end.

    Raises:
        RequestRefused: the client breaks the protocol.
    """
    first = await first_message(requests)
    if first is None:
        raise RequestRefused("an attachment begins with a hello; none came")
    if first.WhichOneof("kind") != "hello":
        raise RequestRefused("an attachment begins with a hello")
    group_rank, worker_id = first.hello.rank, first.hello.worker_id
    check_text("worker id", worker_id, MAX_ADDRESS_LENGTH)
    outbox = Outbox()
    outbox.add_news(pb.AttachNews(welcome=pb.AttachWelcome()).SerializeToString())
    driver.attach_worker(group_rank, worker_id, outbox)
    worker = _AttachedWorker(driver, group_rank, outbox)
    reason, ends = "its process ended, or does not answer", False
    try:
        await outbox.exchange(requests, worker.receive, context)
        if worker.goodbye is not None:
            ends = not worker.goodbye.failure
            reason = "it has shut down" if ends else f"it ends with {worker.goodbye.failure}"
    finally:
        is_known = worker.goodbye is not None or driver.is_over
        level = logging.INFO if is_known else logging.WARNING  # its program shows an error
        log.log(level, "worker gone group_rank=%d: %s", group_rank, reason)
        driver.detach_worker(group_rank, worker_id, outbox, reason, ends=ends)
        worker.ballot.withdraw_vote()


class _AttachedWorker:
    """The messages of a worker on its stream; ``goodbye`` is the last one, if it sends one.

    gRPC may end the requests of a connection that has broken as if they had ended in good order.
    """

    def __init__(self, driver: ManagerDriver, group_rank: int, outbox: Outbox) -> None:
        self._driver = driver
        self._group_rank = group_rank
        self._outbox = outbox
        self.ballot = _Ballot(driver, outbox)
        self.goodbye: pb.AttachDetach | None = None

    def receive(self, message: pb.AttachRequest) -> bool:
        """Process ``message``; returns whether the stream goes on behind it, as the worker has not
        detached."""
        kind = message.WhichOneof("kind")
        if kind == "vote":
            self.ballot.cast_vote(message.vote)
        elif kind == "ping":  # behind all news that are queued
            pong = pb.AttachPong(number=message.ping.number)
            self._outbox.add_news(pb.AttachNews(pong=pong).SerializeToString())
        elif kind == "phase":
            self._driver.receive_phase(self._group_rank, message.phase)
        elif kind == "difference":
            self._driver.receive_difference(message.difference)
        elif kind == "event":
            self._driver.receive_event(message.event)
        elif kind == "withdrawal":
            self.ballot.withdraw_vote(message.withdrawal.number)
        elif kind == "detach":
            check_text("failure", message.detach.failure, MAX_FAILURE_LENGTH)
            self.goodbye = message.detach
            return False
        else:
            raise RequestRefused(f"an attachment does not accept {kind or 'an empty message'}")
        return True


class _Ballot:
    """The vote of a worker that is under way on its stream, if there is one."""

    def __init__(self, driver: ManagerDriver, outbox: Outbox) -> None:
        self._driver = driver
        self._outbox = outbox
        self._number: int | None = None  # of the vote; None: there is none
        self._caller = 0

    def cast_vote(self, message: pb.AttachVote) -> None:
        """Cast a vote; it withdraws the one before, as a worker has one under way."""
        self.withdraw_vote()
        self._number = message.number
        timeout_s = time_to_wait_s(message.timeout_ms / 1000)
        self._caller = self._driver.cast_vote(
            vote_from_wire(message.vote), timeout_s, self._send_decision
        )

    def withdraw_vote(self, number: int | None = None) -> None:
        """Stop waiting for the decision on vote ``number`` (None: on any)."""
        if self._number is not None and number in (None, self._number):
            self._number = None
            self._driver.withdraw_call(self._caller)

    def _send_decision(self, answer: Answer) -> None:
        assert self._number is not None
        decision = pb.AttachDecision(number=self._number)
        self._number = None
        if isinstance(answer, AnswerVote):
            decision.decided.CopyFrom(decision_to_wire(answer))
        else:
            assert isinstance(answer, RefuseWorker)
            decision.error, decision.reason = error_to_wire(answer.error)
        self._outbox.add_news(pb.AttachNews(decision=decision).SerializeToString())
