"""Tests that a manager learns why its session was refused, though gRPC loses the reason at times.

It does so if the refusal comes while the first message is on its way: a race inside gRPC, of which
this channel makes a certainty.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

from torchft_svc.core.link import Connect
from torchft_svc.errors import NotLeader, TorchFTError, Unreachable
from torchft_svc.host.tasks import Tasks
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.link import LighthouseLink, SessionTransport
from torchft_svc.rpc.client_stream import MAX_OPENINGS
from torchft_svc.rpc.status import ERROR_KEY, LEADER_KEY

CONFIG = ManagerConfig(
    lighthouse_address="a:1", replica_name="g", group_world_size=1, store_address="b:1"
)
LOST = "Internal error from Core"
REFUSAL = AioRpcError(
    grpc.StatusCode.UNAVAILABLE,
    Metadata(),
    Metadata((ERROR_KEY, NotLeader.__name__), (LEADER_KEY, "c:1")),
    details="another one leads",
)


class RefusingChannel:
    """A lighthouse that does not lead; of the first ``num_lost`` refusals gRPC loses the reason."""

    def __init__(self, num_lost: int) -> None:
        self.num_lost = num_lost
        self.num_opened = 0

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return self._open

    def _open(self, **_: Any) -> RefusedStream:
        self.num_opened += 1
        is_lost = self.num_opened <= self.num_lost
        internal = AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), details=LOST)
        return RefusedStream(internal if is_lost else REFUSAL)


class RefusedStream:
    def __init__(self, error: AioRpcError) -> None:
        self._error = error

    async def write(self, _: Any) -> None:
        raise self._error

    def cancel(self) -> None:
        """Ignore this: the stream has ended already."""


def failure_of(channel: Any) -> TorchFTError:
    async def run() -> TorchFTError | None:
        link = LighthouseLink(CONFIG, Tasks())
        return await SessionTransport(link, Connect(1, "a:1"), channel).run()

    error = asyncio.run(run())
    assert error is not None
    return error


def test_it_is_asked_again_why() -> None:
    channel = RefusingChannel(MAX_OPENINGS - 1)
    error = failure_of(channel)
    assert isinstance(error, NotLeader)
    assert error.leader == "c:1"
    assert channel.num_opened == MAX_OPENINGS


def test_but_not_for_ever() -> None:
    channel = RefusingChannel(1000)
    error = failure_of(channel)
    assert isinstance(error, Unreachable)
    assert error.reason == "it ended the session"
    assert channel.num_opened == MAX_OPENINGS
