"""The seam between a manager's link and one lighthouse: a session, or calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from torchft_svc.core.quorum.manager.lighthouse_link import LinkMachine
from torchft_svc.core.quorum.manager.link_types import Message
from torchft_svc.core.quorum.session_messages import Beat
from torchft_svc.errors import TorchFTError
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.proto import torchft_pb2 as pb


@dataclass(frozen=True, slots=True)
class Contact:
    """One connection: its number, the lighthouse's address as the user wrote it, and the channel.

    ``tell`` passes an input to the machine; ``on_news`` gets the other news of a session, and
    ``beat`` makes a session's next beat.
    """

    number: int
    address: str
    channel: grpc.aio.Channel
    config: ManagerConfig
    tell: Callable[[Callable[[LinkMachine, float], object]], None]
    on_news: Callable[[int, pb.SessionNews], None]
    beat: Callable[[], Beat]


class Transport(Protocol):
    """How messages get to one lighthouse."""

    async def run(self) -> TorchFTError:
        """Receive until the connection is over, and return why.

        Raises:
            NotSupported: the lighthouse does not know this way.
        """

    def send(self, message: Message) -> None:
        """Send ``message`` soon; what is lost with the connection, `run` returns."""


class NotSupported(Exception):
    """The lighthouse does not know this way of being connected."""
