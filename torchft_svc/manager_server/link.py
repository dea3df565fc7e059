"""The manager's line to the lighthouse: which way it is connected, and as whom."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable

from torchft_svc.core.activity import Activity
from torchft_svc.core.group import AskLighthouse
from torchft_svc.core.types import Member, Quorum
from torchft_svc.errors import DeadlineExceeded, PeerError, QuorumFailed, Unreachable
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.line import Line, NotSupported
from torchft_svc.manager_server.session_line import SessionLine
from torchft_svc.manager_server.unary_line import UnaryLine
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import MAX_RECONNECT_MS, MIN_RECONNECT_MS, open_aio_channel
from torchft_svc.rpc.tasks import Tasks

log = logging.getLogger(__name__)


class LighthouseLink:
    """To be used on one event loop.

    ``address`` is where others reach this manager; ``on_news`` hears of members of the last quorum
    that are gone, and of orders to end; ``activity`` tells what the group does. All are set before
    `start`.
    """

    def __init__(self, config: ManagerConfig, tasks: Tasks) -> None:
        self._config = config
        self._tasks = tasks
        self.on_news: Callable[[pb.SessionNews], None] = _not_listening
        self.activity: Callable[[], Activity | None] = _not_telling
        self.address = ""
        self._seen_quorum_id = 0
        self._channel = open_aio_channel(config.lighthouse_address, config.security)
        self._holding: asyncio.Task[None] | None = None
        self._new_incarnation()

    def start(self) -> None:
        """Begin to prove that the group is alive."""
        self._holding = self._tasks.start(self._hold(), "line to the lighthouse")

    async def ask(self, question: AskLighthouse, timeout_s: float) -> Quorum:
        """The quorum that this group is a member of.

        Raises:
            PeerError: there is none within ``timeout_s``, or the lighthouse was unreachable for the
                connect timeout.
            RequestRefused: the lighthouse does not accept this group.
        """
        deadline = time.monotonic() + timeout_s
        if question.new_incarnation:
            await self._begin_again("a worker of the group was restarted")
        for attempt in range(self._config.quorum_retries + 1):
            try:
                return await self._ask_while_unreachable(question, deadline)
            except PeerError as error:
                if attempt == self._config.quorum_retries or time.monotonic() >= deadline:
                    raise
                log.warning("quorum failed, asking again: %s", error)
        raise AssertionError("the last attempt returns or raises")

    async def leave(self, reason: str) -> None:
        """Tell the lighthouse that nobody has to wait for this group any more."""
        await self._line.leave(reason)
        if self._holding is not None:
            self._holding.cancel()

    async def close(self) -> None:
        """May be called twice."""
        await self._channel.close(grace=None)

    def _new_incarnation(self) -> None:
        self.replica_id = f"{self._config.replica_name}:{uuid.uuid4()}"
        self._line: Line = SessionLine(
            self._config,
            self._channel,
            self.replica_id,
            self._tasks,
            self._pass_on,
            lambda: self.activity(),
        )

    def _pass_on(self, news: pb.SessionNews) -> None:
        self.on_news(news)

    async def _begin_again(self, reason: str) -> None:
        await self.leave(reason)
        self._new_incarnation()
        self.start()

    async def _hold(self) -> None:
        """Prefer a session; a lighthouse without them gets heartbeats."""
        try:
            await self._line.hold()
        except NotSupported:
            log.info("the lighthouse has no sessions, sending heartbeats")
            self._line = UnaryLine(self._config, self._channel, self.replica_id)
            await self._line.hold()

    async def _ask_while_unreachable(self, question: AskLighthouse, deadline: float) -> Quorum:
        """One question, repeated over a lighthouse's restart."""
        give_up_at = min(deadline, time.monotonic() + self._config.connect_timeout_s)
        pause_s = MIN_RECONNECT_MS / 1000
        while True:
            try:
                return await self._ask_once(question, deadline)
            except Unreachable:
                if time.monotonic() + pause_s >= give_up_at:
                    raise
            # Jitter: a thousand managers must not come back in the same millisecond.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            pause_s = min(2 * pause_s, MAX_RECONNECT_MS / 1000)

    async def _ask_once(self, question: AskLighthouse, deadline: float) -> Quorum:
        timeout_s = deadline - time.monotonic()
        if timeout_s <= 0:
            raise DeadlineExceeded("quorum", 0.0, "no time is left")
        member = Member(
            replica_id=self.replica_id,
            address=self.address,
            store_address=self._config.store_address,
            step=question.step,
            world_size=self._config.group_world_size,
            shrink_only=question.shrink_only,
            commit_failures=question.commit_failures,
            seen_quorum_id=self._seen_quorum_id,
            min_replicas=self._config.min_replicas,
        )
        quorum = await self._line.ask(member, timeout_s)
        if all(self.replica_id != member.replica_id for member in quorum.participants):
            raise QuorumFailed(f"quorum {quorum.quorum_id} was formed without {self.replica_id!r}")
        self._seen_quorum_id = max(self._seen_quorum_id, quorum.quorum_id)
        return quorum


def _not_listening(news: pb.SessionNews) -> None:
    """Before the manager serves there is nobody to be told."""


def _not_telling() -> Activity | None:
    """Nor to say what it does."""
