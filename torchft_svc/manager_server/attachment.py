"""One worker's attachment to its manager: the stream that proves its life, and brings news."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchft_svc.core.types import MAX_ADDRESS_LENGTH, check_text
from torchft_svc.errors import RequestRefused
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.outbox import Outbox, first_message
from torchft_svc.rpc.parsing import is_of_a_newer_kind

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
    reason, ends = "its process ended, or does not answer", False
    goodbyes: list[pb.AttachDetach] = []
    try:
        receive = functools.partial(_receive, driver, group_rank, goodbyes)
        await outbox.exchange(requests, receive, context)
        for goodbye in goodbyes:
            ends = not goodbye.failure
            reason = "it has shut down" if ends else f"it ends with {goodbye.failure}"
    finally:
        # An error is shown by its program.
        is_known = bool(goodbyes) or driver.is_over
        level = logging.INFO if is_known else logging.WARNING
        log.log(level, "worker gone group_rank=%d: %s", group_rank, reason)
        driver.detach(group_rank, worker_id, outbox, reason, ends=ends)


def _receive(
    driver: ManagerDriver,
    group_rank: int,
    goodbyes: list[pb.AttachDetach],
    message: pb.AttachRequest,
) -> bool:
    """Whether the attachment goes on behind ``message``: until the worker detaches, with what is
    then in ``goodbyes``, or goes without a word.

    gRPC may end the requests of a connection that has broken as if they had ended in good order.
    """
    kind = message.WhichOneof("kind")
    if kind == "detach":
        check_text("failure", message.detach.failure, MAX_FAILURE_LENGTH)
        goodbyes.append(message.detach)
        return False
    if kind == "phase":
        driver.receive_phase(group_rank, message.phase)
    elif kind is not None or not is_of_a_newer_kind(message):
        raise RequestRefused(f"an attachment does not accept {kind or 'an empty message'}")
    return True
