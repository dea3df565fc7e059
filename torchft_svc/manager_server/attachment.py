"""One worker's attachment to its manager: the stream that proves its life, and brings news."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchft_svc.core.types import MAX_ADDRESS_LENGTH, check_text
from torchft_svc.errors import RequestRefused
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.outbox import Outbox
from torchft_svc.rpc.parsing import is_of_a_newer_kind

log = logging.getLogger(__name__)

# A connection that says nothing is not a worker.
HELLO_TIMEOUT_S = 5.0


async def attach(
    driver: ManagerDriver,
    requests: AsyncIterator[pb.AttachRequest],
    context: grpc.aio.ServicerContext[Any, Any],
) -> None:
    """Serve the stream to its end; an end without a word is the worker's death.

    Raises:
        RequestRefused: the client breaks the protocol.
    """
    try:
        first = await asyncio.wait_for(anext(requests), HELLO_TIMEOUT_S)
    except (asyncio.TimeoutError, StopAsyncIteration):
        raise RequestRefused("an attachment begins with a hello; none came") from None
    if first.WhichOneof("kind") != "hello":
        raise RequestRefused("an attachment begins with a hello")
    group_rank, worker_id = first.hello.rank, first.hello.worker_id
    check_text("worker id", worker_id, MAX_ADDRESS_LENGTH)
    outbox = Outbox()
    outbox.tell(pb.AttachNews(welcome=pb.AttachWelcome()).SerializeToString())
    driver.attach(group_rank, worker_id, outbox)
    level, reason = logging.WARNING, "its process ended, or does not answer"
    hung_up = asyncio.Event()
    try:
        await outbox.exchange(_read(driver, group_rank, requests, hung_up), context)
        if not hung_up.is_set():
            level, reason = logging.INFO, "it has shut down"
    finally:
        log.log(level, "worker gone group_rank=%d: %s", group_rank, reason)
        driver.detach(group_rank, worker_id, outbox, reason)


async def _read(
    driver: ManagerDriver,
    group_rank: int,
    requests: AsyncIterator[pb.AttachRequest],
    hung_up: asyncio.Event,
) -> None:
    """Until the worker detaches; ``hung_up`` is set if it goes without a word.

    gRPC may end the requests of a connection that has broken as if they had ended in good order.
    """
    async for message in requests:
        kind = message.WhichOneof("kind")
        if kind == "detach":
            return
        if kind == "phase":
            driver.hear_phase(group_rank, message.phase)
        elif kind is not None or not is_of_a_newer_kind(message):
            raise RequestRefused(f"an attachment has no place for {kind or 'an empty message'}")
    hung_up.set()
