"""The seam between a manager's link and one lighthouse: a session, or calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from torchft_svc.core.quorum.manager.lighthouse_link import ManagerLink
from torchft_svc.core.quorum.session_messages import Beat, Hello
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.proto import torchft_pb2 as pb


@dataclass(frozen=True, slots=True)
class Contact:
    """One connection: its number, the lighthouse's address as the user wrote it, and the channel.

    ``feed`` passes an input to the machine; ``on_news`` gets the other news of a session.
    """

    number: int
    address: str
    channel: grpc.aio.Channel
    config: ManagerConfig
    feed: Callable[[Callable[[ManagerLink, float], object]], None]
    make_hello: Callable[[], Hello]
    make_beat: Callable[[], Beat]
    on_news: Callable[[int, pb.SessionNews], None]


class NotSupported(Exception):
    """The lighthouse does not know this way of being connected."""
