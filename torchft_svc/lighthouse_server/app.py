"""The lighthouse as one thing that starts and stops."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchft_svc.core.launch.rendezvous import SETTLE_IN_S
from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.host.address import HostPort, parse_address, reachable_host
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.election import Election
from torchft_svc.lighthouse_server.etcd import Etcd
from torchft_svc.lighthouse_server.event_log import EventLog
from torchft_svc.lighthouse_server.http.settings import HttpSettings
from torchft_svc.lighthouse_server.leadership import Leadership
from torchft_svc.lighthouse_server.servicer import lighthouse_service
from torchft_svc.lighthouse_server.tracing import trace_changes
from torchft_svc.rpc.channel import BEATING_KEEPALIVE_MS
from torchft_svc.rpc.health import ALWAYS_READY, Readiness
from torchft_svc.rpc.security import PLAIN, Security
from torchft_svc.rpc.serving import Patience, serve

if TYPE_CHECKING:
    from torchft_svc.telemetry.otel import Telemetry

PATIENCE = Patience(keepalive_ms=BEATING_KEEPALIVE_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The addresses on which a lighthouse listens (``http`` is None: its dashboard is off)."""

    grpc: HostPort
    http: HostPort | None = None


@contextlib.asynccontextmanager
async def run_lighthouse(
    config: QuorumConfig,
    bind: HostPort,
    security: Security = PLAIN,
    election: Election | None = None,
    settle_in_s: float = SETTLE_IN_S,
    http: HttpSettings | None = None,
    event_log: str | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[Listening]:
    """Serve until the block is left; gives the addresses that were bound. ``settle_in_s``: see the
    `RendezvousRules` of launched runs. ``http``: of the dashboard (None: it is off).
    ``event_log``: the file to which incidents are written (None: none). ``telemetry``: exports the
    changes of quorums as spans.

    Raises:
        AddressError: nothing can be bound there.
        ConfigError: the event log cannot be written.
    """
    leadership = None if election is None else Leadership(Etcd(election.etcd), election.lease_ttl_s)
    readiness: Readiness = ALWAYS_READY if leadership is None else leadership
    driver = LighthouseDriver(config, readiness.check, settle_in_s)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(driver.close)
        if event_log is not None:
            records = EventLog(event_log)
            stack.callback(records.close)
            driver.on_incident = records.write
        if telemetry is not None:
            driver.counts.on_change = trace_changes(telemetry)
        bound = await stack.enter_async_context(
            serve(
                lambda _: lighthouse_service(driver, readiness),
                bind,
                security,
                PATIENCE,
                driver.rpc_errors,
            )
        )
        http_bound = None
        if http is not None:
            http_bound = await stack.enter_async_context(
                _dashboard(driver, readiness, security, http, election)
            )
        if election is not None and leadership is not None:
            address = election.advertise or str(HostPort(reachable_host(bound), bound.port))
            await stack.enter_async_context(
                leadership.stands_for_election(address, driver.end_lead)
            )
        yield Listening(grpc=bound, http=http_bound)


def _dashboard(
    driver: LighthouseDriver,
    readiness: Readiness,
    security: Security,
    http: HttpSettings,
    election: Election | None,
) -> contextlib.AbstractAsyncContextManager[HostPort]:
    # Only here: it needs the extra `dashboard`.
    from torchft_svc.lighthouse_server.http.app import run_dashboard

    names = [] if election is None or election.advertise is None else [election.advertise]
    hosts = (parse_address(name).host for name in names)
    return run_dashboard(driver, readiness, security, http, hosts)
