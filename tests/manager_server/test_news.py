"""Tests that workers receive a lighthouse's news whole, also fields that are not known here."""

from __future__ import annotations

import asyncio

import pytest

from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.host.tasks import Tasks
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.manager_server.link import LighthouseLink
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.outbox import Outbox

CONFIG = ManagerConfig(
    lighthouse_address="a:1", replica_name="g", group_world_size=1, store_address="b:1"
)
UNKNOWN_FIELD = b"\x98\x06\x01"  # number 99
NEWS = {
    "lost": (4, pb.MemberLost(replica_id="b:1", reason="it died", quorum_id=7)),
    "kill": (5, pb.Kill(reason="enough")),
    "drain": (6, pb.Drain(reason="enough")),
    "waiting": (7, pb.MemberWaiting(replica_id="c:1")),
    "term_ends": (9, pb.TermEnds(quorum_id=7, step=3, reason="b asks")),
}


class Recorder(Outbox):
    """Records the messages that a worker receives."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def add_news(self, news: bytes, more: bytes = b"") -> None:
        self.sent.append(news + more)


@pytest.mark.parametrize("kind", NEWS)
def test_news_are_forwarded_unchanged(kind: str) -> None:
    number, message = NEWS[kind]
    inner = message.SerializeToString() + UNKNOWN_FIELD
    encoded = bytes([number << 3 | 2, len(inner)]) + inner

    async def story() -> None:
        async with Tasks() as tasks:
            driver = ManagerDriver(Group(1), LighthouseLink(CONFIG, tasks), tasks)
            driver.attach_worker(0, "w", outbox := Recorder())
            driver.receive_message(pb.SessionNews.FromString(encoded))
            assert outbox.sent == [encoded]
            driver.attach_worker(0, "w", later := Recorder())
            assert later.sent == [encoded]

    asyncio.run(story())
