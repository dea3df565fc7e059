"""One replica group's manager as one thing that starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.session_messages import Departure, Leave
from torchft_svc.errors import ConfigError
from torchft_svc.host.address import HostPort, advertised_host, parse_address
from torchft_svc.host.tasks import Tasks
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.manager_server.link import LighthouseLink
from torchft_svc.manager_server.servicer import manager_service
from torchft_svc.rpc.serving import Patience, Service, serve
from torchft_svc.telemetry.rpc_errors import RpcErrors

log = logging.getLogger(__name__)

# How many bits the number of a manager's first round has, which is drawn. The clock would not do:
# if it were set back between two managers of the same workers, votes of the first would be refused.
FIRST_ROUND_BITS = 52
# How soon a worker is noticed that is frozen while its manager is not: twice this is below the time
# after which a lighthouse considers a frozen group dead (5 s by default). It costs a small packet
# every 2 s.
WORKER_KEEPALIVE_MS = 2_000


@dataclass(frozen=True, slots=True)
class RunningManager:
    """A manager that serves.

    ``address`` is what other groups reach; ``killed`` is set when the group was killed, and its
    workers have received the news. ``describe_position`` returns its step and quorum, for the log.
    """

    address: str
    killed: asyncio.Event
    describe_position: Callable[[], Mapping[str, object]]


@contextlib.asynccontextmanager
async def run_manager(config: ManagerConfig) -> AsyncIterator[RunningManager]:
    """Serve until the block is left, then leave the lighthouse.

    Raises:
        AddressError: nothing can be bound at ``config.bind``.
    """
    tasks = Tasks()
    link = LighthouseLink(config, tasks)
    first_round = 1 + secrets.randbits(FIRST_ROUND_BITS)
    group = Group(config.group_world_size, first_round, time.monotonic())
    if config.predecessor_end:
        group.record_predecessor(config.predecessor_end, config.predecessor_ended_at)
    driver = ManagerDriver(group, link, tasks)
    host = config.advertise_host or advertised_host(*map(parse_address, config.lighthouses))

    def build(bound: HostPort) -> Service:
        link.machine.address = str(HostPort(host, bound.port))
        return manager_service(driver)

    bind = parse_address(config.bind, may_bind=True)
    patience = Patience(keepalive_ms=WORKER_KEEPALIVE_MS)
    async with contextlib.AsyncExitStack() as stack:
        errors = RpcErrors()
        await stack.enter_async_context(serve(build, bind, config.security, patience, errors))
        if config.metrics_bind is not None:
            stack.callback(_serve_metrics(config, driver, errors))
        await stack.enter_async_context(tasks)
        stack.push_async_callback(_end, driver, link, has_owner=config.owner_pid is not None)
        tasks.start(driver.watch_clock(), "watch the clock")
        if config.resumed is None:
            link.start()  # else when its workers are attached, so that they receive all news
        else:
            driver.resume_term()
        yield RunningManager(link.machine.address, driver.killed, driver.describe_position)


def _serve_metrics(
    config: ManagerConfig, driver: ManagerDriver, errors: RpcErrors
) -> Callable[[], None]:
    """Serve the metrics of a manager; returns how to end that."""
    assert config.metrics_bind is not None
    try:
        from torchft_svc.manager_server.metrics import serve_metrics
    except ImportError as error:
        reason = f"{error}: install torchft-svc[metrics]"
        raise ConfigError("--metrics-bind", config.metrics_bind, reason) from None
    bind = parse_address(config.metrics_bind, may_bind=True)
    server = serve_metrics(bind, driver, errors, config.job_id, config.replica_name)
    log.info("metrics are served at %s", server.address)
    return server.close


async def _end(driver: ManagerDriver, link: LighthouseLink, *, has_owner: bool) -> None:
    """Leave the lighthouse before the workers' streams end: the other groups go first.

    A manager with an owner stops because that does, or is dead: it will have no successor, and the
    workers need not look for one.
    """
    if has_owner:
        driver.report_stop()
    if driver.kill_reason is not None:
        await link.leave(Leave(driver.kill_reason, ends=True, departure=Departure.KILLED))
    elif has_owner:  # an owner that stops on purpose has detached before, so the group has left
        await link.leave(Leave("the process of group rank 0 is stopping or dead"))
    else:
        await link.leave(Leave("its manager stops", ends=True))
    if has_owner:
        await driver.flush_news()
