"""The lighthouse as one thing that starts and stops."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from torchft_svc.core.launch.rendezvous import SETTLE_IN_S
from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.host.address import HostPort, reachable_host
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.election import Election
from torchft_svc.lighthouse_server.etcd import Etcd
from torchft_svc.lighthouse_server.leadership import Leadership
from torchft_svc.lighthouse_server.servicer import lighthouse_service
from torchft_svc.rpc.channel import BEATING_KEEPALIVE_MS
from torchft_svc.rpc.health import ALWAYS_READY, Readiness
from torchft_svc.rpc.security import PLAIN, Security
from torchft_svc.rpc.serving import Patience, serve

PATIENCE = Patience(keepalive_ms=BEATING_KEEPALIVE_MS)


@contextlib.asynccontextmanager
async def run_lighthouse(
    config: QuorumConfig,
    bind: HostPort,
    security: Security = PLAIN,
    election: Election | None = None,
    settle_in_s: float = SETTLE_IN_S,
) -> AsyncIterator[HostPort]:
    """Serve until the block is left; gives the address that was bound. ``settle_in_s``: see the
    `RendezvousRules` of launched runs.

    Raises:
        AddressError: nothing can be bound there.
    """
    leadership = None if election is None else Leadership(Etcd(election.etcd), election.lease_ttl_s)
    readiness: Readiness = ALWAYS_READY if leadership is None else leadership
    driver = LighthouseDriver(config, readiness.check, settle_in_s)
    try:
        async with serve(
            lambda _: lighthouse_service(driver, readiness),
            bind,
            security,
            PATIENCE,
            driver.rpc_errors,
        ) as bound:
            if election is None or leadership is None:
                yield bound
                return
            address = election.advertise or str(HostPort(reachable_host(bound), bound.port))
            async with leadership.stands_for_election(address, driver.end_lead):
                yield bound
    finally:
        driver.close()
