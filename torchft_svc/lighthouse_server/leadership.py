"""Whether this lighthouse leads: of several, the one whose lease etcd has elected (rule F6)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from torchft_svc.errors import NotLeader, TorchFTError
from torchft_svc.lighthouse_server.etcd import Etcd

log = logging.getLogger(__name__)

# The share of the lease's time by which a leader stops before the lease can end: clocks differ in
# their speed, and an answer needs time to leave.
MARGIN = 0.25
# How often the lease is renewed, and the leader asked for, in the lease's time.
RENEWALS_PER_LEASE = 5
# How long a call to a server of etcd may take. One that does not answer by then is passed over, and
# cannot hold up the end of this lighthouse.
MAX_CALL_S = 2.0
# etcd grants no shorter ones.
MIN_LEASE_S = 2
# The pause before the next attempt to be elected doubles from the first to the second: comparing a
# password costs etcd much, also one that it does not accept.
MIN_RETRY_S, MAX_RETRY_S = 0.2, 1.0


def clock() -> float:
    """Return seconds that go on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Leadership:
    """Whether this lighthouse leads; `check` before every answer. To be used on one event loop."""

    def __init__(self, etcd: Etcd, lease_ttl_s: int) -> None:
        self._etcd = etcd
        self._address = ""
        self._end_lead: Callable[[TorchFTError], None] = lambda error: None
        self._lease_ttl_s = lease_ttl_s
        self._leader = ""
        self._until = 0.0  # by then the lease may have ended
        self._leads = False
        self._watching: asyncio.TimerHandle | None = None  # the clock, while it leads
        self._subscribers: list[Callable[[], None]] = []
        self._retry_s = MIN_RETRY_S
        self._why_not: dict[str, str] = {}  # what was logged last, by etcd's address

    def check(self) -> None:
        """Raise `NotLeader` unless this lighthouse leads at this moment."""
        if not self._leads or clock() >= self._until:
            raise self._not_leader()

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` whenever this lighthouse has begun or stopped to lead."""
        self._subscribers.append(notify)

    @contextlib.asynccontextmanager
    async def stands_for_election(
        self, address: str, end_lead: Callable[[TorchFTError], None]
    ) -> AsyncIterator[None]:
        """Stand for election while the block runs; at its end another one may lead at once.

        ``end_lead`` is called when this lighthouse has stopped to lead.
        """
        self._address, self._end_lead = address, end_lead
        standing = asyncio.create_task(self._run())
        try:
            yield
        finally:
            standing.cancel()
            await asyncio.wait([standing])
            await self._etcd.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._candidacy()
            except TorchFTError as error:
                self._log_failure(str(error))
                await self._etcd.use_next_server()
            finally:
                self._set(False)
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _log_failure(self, why_not: str) -> None:
        if self._why_not.get(self._etcd.address) != why_not:
            log.warning("this lighthouse cannot be elected: %s", why_not)
            self._why_not[self._etcd.address] = why_not

    async def _candidacy(self) -> None:
        """Hold one lease, from its beginning to its end."""
        pause_s = self._lease_ttl_s / RENEWALS_PER_LEASE
        timeout_s = min(pause_s, MAX_CALL_S)
        began_at = clock()
        lease, ttl_s = await self._etcd.grant(self._lease_ttl_s, timeout_s)
        self._until = began_at + ttl_s * (1 - MARGIN)
        elected = asyncio.create_task(self._etcd.campaign(lease, self._address))
        try:
            _, self._leader = await self._etcd.leader(timeout_s)  # to be named from now on
            while clock() < self._until:
                await asyncio.wait([elected], timeout=pause_s)
                if elected.done():
                    elected.result()
                    self._set(clock() < self._until)
                    await asyncio.sleep(pause_s)
                await self._renew(lease, timeout_s, is_elected=elected.done())
            log.warning("the lease has ended, or could not be renewed in time")
        finally:
            self._set(False)
            elected.cancel()
            await asyncio.gather(elected, return_exceptions=True)
            with contextlib.suppress(TorchFTError):
                await self._etcd.revoke(lease, timeout_s)

    async def _renew(self, lease: int, timeout_s: float, *, is_elected: bool) -> None:
        """Move the end of the lease. What fails is tried again by who is elected, while there is
        time, with etcd's next server; others lose nothing by a new candidacy there."""
        began_at = clock()
        try:
            ttl_s = await self._etcd.renew(lease, timeout_s)
            leader, self._leader = await self._etcd.leader(timeout_s)
        except TorchFTError as error:
            if not is_elected:
                raise
            log.warning("the lease was not renewed: %s", error)
            await self._etcd.use_next_server()
            return
        self._why_not.clear()
        self._retry_s = MIN_RETRY_S
        lost = ttl_s <= 0 or (is_elected and leader != lease)
        self._until = 0.0 if lost else began_at + ttl_s * (1 - MARGIN)

    def _watch_the_clock(self) -> None:
        """Stop to lead when the lease may have ended, whatever else is waited for then."""
        left_s = self._until - clock()
        if left_s > 0:
            loop = asyncio.get_running_loop()
            self._watching = loop.call_later(left_s, self._watch_the_clock)
        else:
            self._set(False)

    def _set(self, leads: bool) -> None:
        if leads == self._leads:
            return
        self._leads = leads
        log.warning("this lighthouse %s", "leads now" if leads else "does not lead any more")
        if self._watching is not None:
            self._watching.cancel()
        if leads:
            self._watch_the_clock()
        else:
            self._end_lead(self._not_leader())
        for notify in self._subscribers:
            notify()

    def _not_leader(self) -> NotLeader:
        """The lighthouse that leads instead; not this one, which led when etcd answered last."""
        return NotLeader("" if self._leader == self._address else self._leader)
