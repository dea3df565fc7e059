"""One worker's attachment to its manager: the stream that proves its life, brings news, and takes
votes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchft_svc.core.limits import MAX_ADDRESS_LENGTH, check_text
from torchft_svc.core.quorum.manager.group_orders import AnswerVote, RefuseWorker
from torchft_svc.errors import RequestRefused
from torchft_svc.manager_server.driver import Answer, ManagerDriver
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import decision_to_wire, vote_from_wire
from torchft_svc.rpc.deadline import time_to_wait_s
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
    """Serve the stream to its end; an end without a word is the worker's death, and one with an
    error is no orderly end.

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
    outbox.tell(pb.AttachNews(welcome=pb.AttachWelcome()).SerializeToString())
    driver.attach(group_rank, worker_id, outbox)
    said = _Said(driver, group_rank, outbox)
    reason, ends = "its process ended, or does not answer", False
    try:
        await outbox.exchange(requests, said.receive, context)
        if said.goodbye is not None:
            ends = not said.goodbye.failure
            reason = "it has shut down" if ends else f"it ends with {said.goodbye.failure}"
    finally:
        # An error is shown by its program.
        is_known = said.goodbye is not None or driver.is_over
        level = logging.INFO if is_known else logging.WARNING
        log.log(level, "worker gone group_rank=%d: %s", group_rank, reason)
        driver.detach(group_rank, worker_id, outbox, reason, ends=ends)
        said.ballot.withdraw()


class _Said:
    """What a worker says on its stream; ``goodbye`` is its last word, if it has one.

    gRPC may end the requests of a connection that has broken as if they had ended in good order.
    """

    def __init__(self, driver: ManagerDriver, group_rank: int, outbox: Outbox) -> None:
        self._driver = driver
        self._group_rank = group_rank
        self._outbox = outbox
        self.ballot = _Ballot(driver, outbox)
        self.goodbye: pb.AttachDetach | None = None

    def receive(self, message: pb.AttachRequest) -> bool:
        """Whether the attachment goes on behind ``message``: until the worker detaches, or goes
        without a word."""
        kind = message.WhichOneof("kind")
        if kind == "vote":
            self.ballot.cast(message.vote)
        elif kind == "ping":  # behind all news that are queued
            pong = pb.AttachPong(number=message.ping.number)
            self._outbox.tell(pb.AttachNews(pong=pong).SerializeToString())
        elif kind == "phase":
            self._driver.receive_phase(self._group_rank, message.phase)
        elif kind == "difference":
            self._driver.receive_difference(message.difference)
        elif kind == "withdrawal":
            self.ballot.withdraw(message.withdrawal.number)
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

    def cast(self, message: pb.AttachVote) -> None:
        """A worker has one vote under way: this one withdraws the one before."""
        self.withdraw()
        self._number = message.number
        timeout_s = time_to_wait_s(message.timeout_ms / 1000)
        self._caller = self._driver.cast(vote_from_wire(message.vote), timeout_s, self._reply)

    def withdraw(self, number: int | None = None) -> None:
        """The worker waits no longer for the decision on vote ``number`` (None: on any)."""
        if self._number is not None and number in (None, self._number):
            self._number = None
            self._driver.withdraw(self._caller)

    def _reply(self, order: Answer) -> None:
        assert self._number is not None
        decision = pb.AttachDecision(number=self._number)
        self._number = None
        if isinstance(order, AnswerVote):
            decision.decided.CopyFrom(decision_to_wire(order))
        else:
            assert isinstance(order, RefuseWorker)
            decision.error, decision.reason = error_to_wire(order.error)
        self._outbox.tell(pb.AttachNews(decision=decision).SerializeToString())
