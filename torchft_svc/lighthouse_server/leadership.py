"""Whether this lighthouse leads: of several, the one whose lease etcd has elected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc

from torchft_svc.errors import NotLeader, TorchFTError
from torchft_svc.lighthouse_server.etcd import Etcd

log = logging.getLogger(__name__)

# A leader stops so much of the lease's time before the lease can end: clocks differ in their speed,
# and an answer takes its time to leave.
MARGIN = 0.25
# So often the lease is renewed, and the leader asked for, in the lease's time.
RENEWALS_PER_LEASE = 5
# etcd grants no shorter ones.
MIN_LEASE_S = 2


def clock() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Leadership:
    """``check`` before every answer; to be used on one event loop."""

    def __init__(self, etcd: Etcd, lease_ttl_s: int) -> None:
        self._etcd = etcd
        self._address = ""
        self._end_term: Callable[[TorchFTError], None] = lambda error: None
        self._lease_ttl_s = lease_ttl_s
        self._leader = ""
        self._until = 0.0  # by then the lease may have ended
        self._leads = False

    def check(self) -> None:
        """Raise `NotLeader` unless this lighthouse leads at this moment."""
        if not self._leads or clock() >= self._until:
            raise NotLeader(self._leader)

    @contextlib.asynccontextmanager
    async def stands_for_election(
        self, address: str, end_term: Callable[[TorchFTError], None]
    ) -> AsyncIterator[None]:
        """While the block runs, under ``address``; at its end another one may lead at once.

        ``end_term`` is called when this lighthouse has stopped to lead.
        """
        self._address, self._end_term = address, end_term
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
            except grpc.aio.AioRpcError as error:
                log.warning("no election: etcd says %s: %s", error.code().name, error.details())
                await self._etcd.go_on()
            finally:
                self._set(False)
            await asyncio.sleep(1 / RENEWALS_PER_LEASE)

    async def _candidacy(self) -> None:
        """One lease, from its beginning to its end."""
        pause_s = self._lease_ttl_s / RENEWALS_PER_LEASE
        began_at = clock()
        lease, ttl_s = await self._etcd.grant(self._lease_ttl_s, pause_s)
        self._until = began_at + ttl_s * (1 - MARGIN)
        elected = asyncio.create_task(self._etcd.campaign(lease, self._address))
        try:
            while clock() < self._until:
                await asyncio.wait([elected], timeout=None if self._leads else pause_s)
                if elected.done():
                    elected.result()
                    self._set(True)
                    await asyncio.sleep(pause_s)
                await self._renew(lease, pause_s)
            log.warning("the lease could not be renewed in time")
        finally:
            self._set(False)
            elected.cancel()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._etcd.revoke(lease, pause_s)

    async def _renew(self, lease: int, timeout_s: float) -> None:
        """Move the end of the lease; what fails is tried again while there is time."""
        began_at = clock()
        try:
            ttl_s = await self._etcd.renew(lease, timeout_s)
            leader, self._leader = await self._etcd.leader(timeout_s)
        except grpc.aio.AioRpcError as error:
            log.warning("the lease was not renewed: %s", error.details())
            return
        lost = ttl_s <= 0 or (self._leads and leader != lease)
        self._until = 0.0 if lost else began_at + ttl_s * (1 - MARGIN)

    def _set(self, leads: bool) -> None:
        if leads != self._leads:
            self._leads = leads
            log.warning("this lighthouse %s", "leads now" if leads else "does not lead any more")
            if not leads:
                self._end_term(NotLeader(self._leader))
