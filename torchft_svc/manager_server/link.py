"""The manager's link to the lighthouses: as whom it is connected, and what it asks."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable

from torchft_svc.core.group_orders import AskLighthouse
from torchft_svc.core.types import NO_QUORUM, LastQuorum, Member, Quorum, one_line
from torchft_svc.errors import (
    DeadlineExceeded,
    NotLeader,
    PeerError,
    QuorumFailed,
    Unauthorized,
    Unreachable,
)
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.connection import Connection
from torchft_svc.manager_server.line import Contact
from torchft_svc.manager_server.session_line import SessionLine
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.backoff import Backoff
from torchft_svc.rpc.channel import MIN_RECONNECT_MS
from torchft_svc.rpc.route import Route
from torchft_svc.rpc.tasks import Tasks

log = logging.getLogger(__name__)

# A group that has trained goes on trying when its lighthouse does not trust it any more, and its
# workers begin another step as soon as they are told: they would compute, and log, for nothing.
DISTRUST_PAUSE_S = 0.5


class LighthouseLink:
    """To be used on one event loop.

    ``address`` is where others reach this manager; ``on_news`` hears of members of the last quorum
    that are gone, and of orders to end; ``beat`` tells what the group does. All are set before
    `start`. ``draw`` is for pauses, see `Backoff`.
    """

    def __init__(
        self, config: ManagerConfig, tasks: Tasks, draw: Callable[[], float] = random.random
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._draw = draw
        self.on_news: Callable[[pb.SessionNews], None] = _not_listening
        self.beat: Callable[[], pb.SessionBeat] = pb.SessionBeat
        self.address = ""
        self._seen_quorum_id = 0
        self._last_num_groups = 0
        self._last = NO_QUORUM  # that the group was in with the workers that it has now
        self._route = Route(config.lighthouses)
        self._told_why = ""  # there is no quorum yet; by the lighthouse, about the last question
        self._holding: asyncio.Task[None] | None = None
        self._moving = asyncio.Lock()  # one incarnation ends before the next one begins
        self._new_incarnation()

    @property
    def seen_quorum_id(self) -> int:
        """Of the newest quorum that the group was told (0: none)."""
        return self._seen_quorum_id

    @property
    def why_no_quorum(self) -> str:
        """What the question under way waits for; empty: the lighthouse does not say."""
        return self._connection.trouble or self._told_why

    def start(self) -> None:
        """Begin to prove that the group is alive."""
        self._holding = self._tasks.start(self._connection.run(), "line to the lighthouse")

    async def ask(self, question: AskLighthouse, timeout_s: float) -> Quorum:
        """The quorum that this group is a member of.

        Raises:
            PeerError: there is none within ``timeout_s``, or the lighthouse was unreachable for the
                connect timeout.
            RequestRefused: the lighthouse does not accept this group.
        """
        deadline = time.monotonic() + timeout_s
        if question.new_incarnation:
            self._last = NO_QUORUM
            self._is_outdated = True
        if self._is_outdated:  # maybe since an earlier question, whose asker gave up
            async with self._moving:
                await self._begin_again("a worker of the group was restarted")
        for attempt in range(self._config.quorum_retries + 1):
            try:
                return await self._ask_while_unreachable(question, deadline)
            except PeerError as error:
                if attempt == self._config.quorum_retries or time.monotonic() >= deadline:
                    raise
                log.warning("quorum failed, asking again: %s", error)
        raise AssertionError("the last attempt returns or raises")

    async def leave(self, reason: str, *, between_steps: bool = False, ends: bool = False) -> None:
        """Tell the lighthouse that nobody has to wait for this group any more.

        ``between_steps``: nor has anybody to give up the step that it is in. ``ends``: its program
        ends on purpose.
        """
        async with self._moving:
            await self._leave(reason, between_steps=between_steps, ends=ends)

    async def _leave(self, reason: str, *, between_steps: bool, ends: bool = False) -> None:
        self._left = True
        # The lighthouse refuses a longer one, and takes a session that breaks for a loss.
        told = one_line(reason)
        await self._connection.leave(told, between_steps=between_steps, ends=ends)
        if self._holding is not None:
            self._holding.cancel()

    def _new_incarnation(self) -> None:
        self._left = False
        self._is_outdated = False  # a worker was restarted since
        self.replica_id = f"{self._config.replica_name}:{uuid.uuid4()}"
        self._connection = Connection(
            self._config,
            self._route,
            self.replica_id,
            self._open_session,
            self._hear_better,
            Backoff(self._draw),
        )

    def _open_session(self, contact: Contact) -> SessionLine:
        hello = pb.SessionHello(
            replica_id=self.replica_id,
            last_quorum_id=self._last.quorum_id,
            last_max_step=self._last.max_step,
        )
        return SessionLine(
            self._config,
            contact,
            hello,
            self._tasks,
            self._pass_on,
            lambda: self.beat(),
        )

    def _pass_on(self, news: pb.SessionNews) -> None:
        if news.WhichOneof("kind") == "no_quorum_yet":
            self._told_why = news.no_quorum_yet.reason
        self.on_news(news)

    async def _begin_again(self, reason: str, *, between_steps: bool = False) -> None:
        try:
            await self._leave(reason, between_steps=between_steps)
        finally:  # also if nobody waits for the answer any more: the line that was left stays mute
            self._new_incarnation()
            self.start()

    def _hear_better(self) -> None:
        self._tasks.start(self._go_back(in_a_step=True), "way back to an earlier lighthouse")

    async def _go_back(self, *, in_a_step: bool) -> None:
        """Go to the earlier lighthouse that would take the group, if there is one.

        As a new incarnation: the old one has left. At once, also ``in_a_step``, so that whoever
        asks there waits for this group instead of training alone; its fellows are not told then,
        for they would give the step up.
        """
        async with self._moving:
            address = self._connection.better
            if not address or self._left:
                return
            reason = f"it goes back to lighthouse {address}"
            if self._connection.is_asking:  # which ends the question: its asker comes here again
                await self._connection.leave(reason)
                return
            log.info("lighthouse %s takes this group again, going back to it", address)
            self._route.go_back(address)
            await self._begin_again(reason, between_steps=in_a_step)

    async def _ask_while_unreachable(self, question: AskLighthouse, deadline: float) -> Quorum:
        """One question, repeated over a lighthouse's restart."""
        give_up_at = min(deadline, time.monotonic() + self._config.connect_timeout_s)
        while True:
            await self._go_back(in_a_step=False)
            try:
                return await self._ask_once(question, deadline)
            except (Unreachable, NotLeader) as error:
                log.info("the lighthouse could not be asked: %s", error)
            except Unauthorized:
                if self._seen_quorum_id:
                    left_s = max(0.0, deadline - time.monotonic())
                    await asyncio.sleep(min(DISTRUST_PAUSE_S, left_s))
                raise
            except QuorumFailed:
                if not self._connection.better:
                    raise  # else it was withdrawn here, in order to ask a better one
            if self._left:
                raise QuorumFailed("this group has left the lighthouse")
            await asyncio.sleep(MIN_RECONNECT_MS / 1000)  # a line that breaks is open for a moment
            if not self._connection.better:
                await self._connection.opened(give_up_at - time.monotonic())

    async def _ask_once(self, question: AskLighthouse, deadline: float) -> Quorum:
        timeout_s = deadline - time.monotonic()
        if timeout_s <= 0:
            raise DeadlineExceeded("quorum", 0.0, "no time is left")
        self._told_why = ""
        self._seen_quorum_id = max(self._seen_quorum_id, question.seen_quorum_id)
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
            last_num_groups=self._last_num_groups,
            unhealed=question.unhealed,
            has_history=question.has_history,
            layout=question.layout,
            step_quorum_id=question.step_quorum_id,
        )
        quorum = await self._connection.ask(member, timeout_s)
        self._seen_quorum_id = max(self._seen_quorum_id, quorum.quorum_id)
        self._last_num_groups = len(quorum.participants)
        self._last = LastQuorum(quorum.quorum_id, quorum.max_step)
        return quorum


def _not_listening(news: pb.SessionNews) -> None:
    """Before the manager serves there is nobody to be told."""
