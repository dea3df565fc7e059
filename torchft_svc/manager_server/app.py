"""One replica group's manager as one thing that starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.host.address import HostPort, advertised_host, parse_address
from torchft_svc.host.tasks import Tasks
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.manager_server.link import LighthouseLink
from torchft_svc.manager_server.servicer import manager_service
from torchft_svc.rpc.serving import Patience, Service, serve

# Managers of the same workers draw the number of their first round from so many bits. The clock
# would not do: set back between two of them, it would let votes of the first be refused.
FIRST_ROUND_BITS = 52
# A worker that is frozen while its manager is not: twice this is below the time after which a
# lighthouse takes a frozen group for dead (5 s by default). It costs a small packet every 2 s.
WORKER_KEEPALIVE_MS = 2_000


@dataclass(frozen=True, slots=True)
class RunningManager:
    """``address`` is what other groups reach, ``killed`` by an order to end at once."""

    address: str
    killed: asyncio.Event


@contextlib.asynccontextmanager
async def run_manager(config: ManagerConfig) -> AsyncIterator[RunningManager]:
    """Serve until the block is left, then leave the lighthouse.

    Raises:
        AddressError: nothing can be bound at ``config.bind``.
    """
    tasks = Tasks()
    link = LighthouseLink(config, tasks)
    first_round = 1 + secrets.randbits(FIRST_ROUND_BITS)
    group = Group(config.group_world_size, first_round)
    driver = ManagerDriver(group, link, tasks)
    host = config.advertise_host or advertised_host(*map(parse_address, config.lighthouses))

    def build(bound: HostPort) -> Service:
        link.machine.address = str(HostPort(host, bound.port))
        return manager_service(driver)

    bind = parse_address(config.bind, may_bind=True)
    patience = Patience(keepalive_ms=WORKER_KEEPALIVE_MS)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serve(build, bind, config.security, patience))
        await stack.enter_async_context(tasks)
        stack.push_async_callback(_end, driver, link, has_owner=config.owner_pid is not None)
        tasks.start(driver.keep_looking(), "looks at the clock")
        if config.resumed is None:
            link.start()  # else when its workers are here, which must not miss any news
        else:
            driver.hold()
        yield RunningManager(link.machine.address, driver.killed)


async def _end(driver: ManagerDriver, link: LighthouseLink, *, has_owner: bool) -> None:
    """The other groups hear of it first. Who has an owner stops because that does, or is dead: it
    will have no successor, and the workers need not look for one."""
    if has_owner:
        driver.tell_over()
    if driver.kill_reason is not None:
        await link.leave(Leave(driver.kill_reason, ends=True))
    elif has_owner:  # who stops on purpose has detached before, so that the group has left
        await link.leave(Leave("the process of group rank 0 is stopping or dead"))
    else:
        await link.leave(Leave("its manager stops", ends=True))
    if has_owner:
        await driver.news_left()
