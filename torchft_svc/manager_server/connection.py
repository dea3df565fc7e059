"""Keeps one incarnation of a group connected: to one lighthouse of the list after the other."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from torchft_svc.core.types import Member, Quorum
from torchft_svc.errors import NotLeader, TorchFTError, Unauthorized, Unreachable
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.line import Contact, Line, NotSupported
from torchft_svc.manager_server.unary_line import UnaryLine
from torchft_svc.rpc.backoff import Backoff
from torchft_svc.rpc.channel import (
    IMPATIENT_KEEPALIVE_MS,
    KEEPALIVE_MS,
    open_aio_channel,
)
from torchft_svc.rpc.probing import would_take
from torchft_svc.rpc.route import LOOK_BACK_S, Route

log = logging.getLogger(__name__)

# Who looks at a trainer that waits has to see why, without looking back.
TELL_AGAIN_S = 5.0


class Connection:
    """To be used on one event loop; ``open_session`` makes the preferred kind of line.

    ``on_better`` is called once an earlier lighthouse of the list would take the group: `better`.
    """

    def __init__(
        self,
        config: ManagerConfig,
        route: Route,
        replica_id: str,
        open_session: Callable[[Contact], Line],
        on_better: Callable[[], None],
        backoff: Backoff,
    ) -> None:
        self._config = config
        self._route = route
        self._replica_id = replica_id
        self._open_session = open_session
        self._on_better = on_better
        self._backoff = backoff
        self._line: Line | None = None
        self._opened = asyncio.Event()
        self._was_open = False  # ever
        self._settled = asyncio.Event()  # whoever waits for a connection can ask, or be told
        self._why_not: TorchFTError = self._unreachable("there is no connection yet")
        self.better = ""  # an earlier one of the list, which would take the group: go there
        self._num_asking = 0
        self._left = False

    async def run(self) -> None:
        """Be connected, until cancelled or left."""
        failing_since: float | None = None
        told_at = 0.0
        while not self._left:
            error = await self._hold(self._route.current)
            if self._opened.is_set():
                self._backoff.tried(failed=False)
                failing_since = None
            self._line = None
            self._opened.clear()
            if not self._left:
                self._settled.clear()
            if error is not None:
                now = time.monotonic()
                if failing_since is None:
                    failing_since = told_at = now
                    if not self._left:
                        log.warning("%s: %s", self._what_failed(), error)
                elif now - told_at >= TELL_AGAIN_S:
                    told_at = now
                    log.warning("no lighthouse for %.0f s: %s", now - failing_since, error)
                leader = error.leader if isinstance(error, NotLeader) else ""
                all_failed = not self._route.go_on(leader)
                trusted = not (all_failed and isinstance(error, Unauthorized))
                self._why_not = self._unreachable(_reason(error)) if trusted else error
                if not trusted:
                    self._settled.set()
                if all_failed:
                    self._backoff.tried(failed=True)
            await asyncio.sleep(self._backoff.pause_s())

    async def ask(self, member: Member, timeout_s: float) -> Quorum:
        """See `Line.ask`; `Unreachable` at once while there is no connection, or it was left."""
        if self._line is None or self._left or not self._opened.is_set():
            raise self._why_not
        self._num_asking += 1
        try:
            return await self._line.ask(member, timeout_s)
        finally:
            self._num_asking -= 1

    @property
    def trouble(self) -> str:
        """Why nothing can be asked now; empty if something can."""
        return "" if self._opened.is_set() else str(self._why_not)

    @property
    def is_asking(self) -> bool:
        """Whether a question waits for its answer."""
        return self._num_asking > 0

    async def opened(self, timeout_s: float) -> None:
        """Wait until `ask` may do more than to say that there is no connection: it is there, or it
        was left, or no lighthouse trusts this group.

        Raises:
            TorchFTError: none within ``timeout_s``, and why not.
        """
        if self._left:
            return
        try:
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        except asyncio.TimeoutError:
            raise self._why_not from None

    async def leave(self, reason: str, *, between_steps: bool = False, ends: bool = False) -> None:
        """See `Line.leave`."""
        self._left = True
        if self._line is not None:
            await self._line.leave(reason, between_steps=between_steps, ends=ends)
        self._settled.set()

    async def _hold(self, address: str) -> TorchFTError | None:
        """One connection to its end: why it broke, None if it was left."""
        is_only_one = len(self._config.lighthouses) == 1
        patience_ms = KEEPALIVE_MS if is_only_one else IMPATIENT_KEEPALIVE_MS
        channel = open_aio_channel(address, self._config.security, patience_ms)
        contact = Contact(address, channel)
        looking_back = asyncio.create_task(self._look_back())
        try:
            self._line = self._open_session(contact)
            try:
                await self._line.hold(self._is_open)
            except NotSupported:
                log.info("the lighthouse has no sessions, sending heartbeats")
                self._line = UnaryLine(self._config, contact, self._replica_id)
                await self._line.hold(self._is_open)
        except TorchFTError as error:
            return error
        finally:
            looking_back.cancel()
            await channel.close(grace=None)
        return None

    def _is_open(self) -> None:
        if not self._opened.is_set():
            self._route.worked()
            self._was_open = True
            self._opened.set()
            self._settled.set()

    async def _look_back(self) -> None:
        """All managers of a job have to meet: at the first of the list that takes them."""
        await self._opened.wait()
        took_s = 0.0
        while self._route.preferred and not self.better:
            pause_s = LOOK_BACK_S * random.uniform(0.5, 1.0)  # noqa: S311
            await asyncio.sleep(max(0.0, pause_s - took_s))  # a silent one makes no look rarer
            began_at = time.monotonic()
            self.better = await self._first_to_take()
            took_s = time.monotonic() - began_at
        if self.better:
            self._on_better()

    async def _first_to_take(self) -> str:
        """The first of the earlier lighthouses that would take this group; empty: none."""
        config, preferred = self._config, self._route.preferred
        looks = (would_take(at, config.job_id, config.security, LOOK_BACK_S) for at in preferred)
        takes = await asyncio.gather(*looks)
        return next((at for at, is_taken in zip(preferred, takes, strict=True) if is_taken), "")

    def _what_failed(self) -> str:
        return "lost the lighthouse" if self._was_open else "there is no lighthouse"

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable("lighthouse", self._config.lighthouse_address, reason)


def _reason(error: TorchFTError) -> str:
    return error.reason if isinstance(error, Unreachable) else str(error)
