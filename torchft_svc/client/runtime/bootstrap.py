"""Starts, or connects to, the store and the manager of a replica group."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from torchft_svc import coordination
from torchft_svc.client.process_groups.rendezvous import (
    StoreConnection,
    call_store,
)
from torchft_svc.client.runtime.leader import LeaderSign, LeaderWatch
from torchft_svc.coordination import ManagerLocator
from torchft_svc.core.limits import check_not_empty
from torchft_svc.core.quorum.types import Resumed
from torchft_svc.core.route import MANAGER_PATIENCE_S
from torchft_svc.env import Environment
from torchft_svc.errors import (
    AddressError,
    ConfigError,
    DeadlineExceeded,
    GivenUp,
    TorchFTError,
    Unreachable,
)
from torchft_svc.host.address import HostPort, advertised_host, parse_address, split_addresses
from torchft_svc.host.uninterruptible import nothing
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.supervisor import ManagerSupervisor
from torchft_svc.settings import GroupPlace, ServiceOptions, Timeouts

if TYPE_CHECKING:
    from torchft_svc.coordination import ManagerServer

log = logging.getLogger(__name__)

# The longest single wait inside torch, which cannot be interrupted.
_SLICE_S = 0.1
# How long one thread polls for a key of another worker, before another thread continues.
_POLL_FOR_S = 0.5
# The key with the reason why there will be no manager any more (empty: there is one).
_OVER = "manager_over"


@dataclass(frozen=True, slots=True)
class GroupStore:
    """The group's store and the address under which other groups reach it."""

    store: Store
    address: HostPort


@dataclass(frozen=True, slots=True)
class GroupServices:
    """The manager's address, the group's name, and how to stop what was started here.

    ``resume_with`` accepts a function that returns the membership of the manager's successor.
    ``manager``: the manager that was started here; None: this worker uses one that runs elsewhere.
    """

    manager_address: str
    locator: ManagerLocator
    replica_name: str
    close: Callable[[], None]
    resume_with: Callable[[Callable[[], Resumed | None]], None] = lambda _: None
    manager: ManagerServer | ManagerSupervisor | None = None


def open_store(
    place: GroupPlace,
    options: ServiceOptions,
    environment: Environment,
    timeouts: Timeouts,
    store_addr: str | None,
    store_port: int | None,
) -> GroupStore:
    """Connect to the group's store, or host it.

    The arguments name a running store. Otherwise ``MASTER_ADDR`` and ``MASTER_PORT`` name one,
    which rank 0 hosts unless the launcher does. Otherwise a group of one worker hosts its own
    store.

    Raises:
        ConfigError: the address of the store is missing or incomplete.
        Unreachable: the store does not answer within the connect timeout.
        AddressError: the port is taken.
    """
    if store_addr is not None or store_port is not None:
        where = _both("store_addr", store_addr, "store_port", store_port)
        return _join(where, timeouts.connect_s)
    if environment.master_address is not None or environment.master_port is not None:
        where = _both(
            "MASTER_ADDR", environment.master_address, "MASTER_PORT", environment.master_port
        )
        if place.leads and not environment.uses_agent_store:
            store = _host(where, timeouts.collective_s)
            # The group's own workers know it by MASTER_ADDR; the other groups need not.
            return replace(store, address=HostPort(options.hostname or where.host, where.port))
        return _join(where, timeouts.connect_s)
    if place.group_world_size > 1:
        raise ConfigError(
            "world_size",
            place.group_world_size,
            "the workers of a group need a common store: set MASTER_ADDR and MASTER_PORT, or give "
            "store_addr and store_port",
        )
    host = options.hostname or advertised_host(
        *map(parse_address, split_addresses(options.lighthouse_address))
    )
    return _host(HostPort(host, 0), timeouts.collective_s)


class StartingServices:
    """A group's manager while it starts, which takes about as long as the rest of a trainer.

    On rank 0 its process is started at once; `wait` waits until the manager serves. ``keys``: what
    the workers of the group share.
    """

    def __init__(
        self,
        place: GroupPlace,
        options: ServiceOptions,
        environment: Environment,
        timeouts: Timeouts,
        group_store: GroupStore,
    ) -> None:
        # A launcher's store outlives its workers: keys of an earlier attempt must not be read.
        # Under a soft restart policy only some workers are restarted, and all are in one world.
        attempt, world = environment.restart_count, environment.world_round
        prefix = f"torchft/services/{attempt if world is None else f'world-{world}'}"
        store = PrefixStore(prefix, group_store.store)
        self.keys = SharedKeys(store, str(group_store.address))
        self._place, self._options, self._timeouts = place, options, timeouts
        self._config = None
        self._supervisor = None
        if place.leads and options.manager_address is None:
            self._config = _manager_config(place, options, timeouts, group_store.address)
            if not options.in_process:
                self._supervisor = ManagerSupervisor(
                    self._config, timeouts.connect_s, self._publish, self._publish_over
                )

    def wait(self) -> GroupServices:
        """Publish the manager's address on rank 0; wait for it on the others.

        Raises:
            DeadlineExceeded: rank 0 did not publish it within the connect timeout.
            Unreachable: the manager ended at once; see its output on stderr.
            GivenUp: rank 0 could not start it.
        """
        if not self._place.leads:
            timeout_s = self._timeouts.connect_s
            deadline = time.monotonic() + timeout_s
            address = self.keys.wait_for("manager_address", deadline, timeout_s)
            name = self.keys.wait_for("replica_name", deadline, timeout_s)
            leader = _Leader(self.keys)
            locator = ManagerLocator(leader.find_manager, MANAGER_PATIENCE_S)
            return GroupServices(address, locator, name, leader.close)
        with contextlib.ExitStack() as stack:
            try:
                services = self._own_manager()
            except TorchFTError as error:
                self._publish_over(f"it did not start: {error}")
                raise
            stack.callback(services.close)
            if self._place.group_world_size > 1:
                sign = LeaderSign()
                stack.callback(sign.close)
                host = parse_address(services.manager_address).host
                self.keys.write("leader_address", str(HostPort(host, sign.port)))
            self.keys.write(_OVER, "")
            self.keys.write("replica_name", self._options.replica_name)
            self._publish(services.manager_address)
            return replace(services, close=stack.pop_all().close)

    def close(self) -> None:
        """End the process that was started here; may be called twice."""
        if self._supervisor is not None:
            self._supervisor.close()

    def _publish(self, address: str) -> None:
        self.keys.write("manager_address", address)

    def _publish_over(self, reason: str) -> None:
        with contextlib.suppress(Unreachable):  # then nobody could read it
            self.keys.write(_OVER, reason)

    def _own_manager(self) -> GroupServices:
        name = self._options.replica_name
        if self._options.manager_address is not None:
            address = str(parse_address(self._options.manager_address))
            steady = ManagerLocator(lambda: address, self._timeouts.connect_s)
            return GroupServices(address, steady, name, nothing)
        supervisor = self._supervisor
        if supervisor is None:
            assert self._config is not None
            server = coordination.ManagerServer.configured(self._config)
            address = str(parse_address(server.address()))
            here = ManagerLocator(lambda: address, MANAGER_PATIENCE_S)
            return GroupServices(address, here, name, server.shutdown, manager=server)
        first = supervisor.await_ready()
        log.debug("manager of %s at %s, process %d", name, first, supervisor.pid)
        kept = ManagerLocator(supervisor.find, MANAGER_PATIENCE_S)
        return GroupServices(
            first, kept, name, supervisor.close, supervisor.resume_with, manager=supervisor
        )


def _manager_config(
    place: GroupPlace, options: ServiceOptions, timeouts: Timeouts, store: HostPort
) -> ManagerConfig:
    return ManagerConfig(
        lighthouse_address=options.lighthouse_address,
        replica_name=options.replica_name,
        group_world_size=place.group_world_size,
        store_address=str(store),
        bind=f":{options.port}",
        advertise_host=options.hostname,
        heartbeat_interval_s=timeouts.heartbeat_interval_s,
        connect_timeout_s=timeouts.connect_s,
        quorum_retries=options.quorum_retries,
        job_id=options.job_id,
        min_replicas=options.min_replicas,
        is_spare=options.is_spare,
        security=options.security,
    )


def _both(addr_name: str, addr: str | None, port_name: str, port: int | None) -> HostPort:
    if addr is None or port is None:
        missing, given = (addr_name, port_name) if addr is None else (port_name, addr_name)
        raise ConfigError(missing, None, f"{given} is set, so this is needed too")
    check_not_empty(addr_name, addr)
    return HostPort(addr, port)


def _host(where: HostPort, timeout_s: float) -> GroupStore:
    """``where.port`` 0: any free port."""
    try:
        store = TCPStore(
            # The server listens on every interface; its own client uses the loopback one.
            "localhost",
            where.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise AddressError(
            str(where), f"the group's store cannot listen at this address: {error}"
        ) from error
    return GroupStore(store, HostPort(where.host, store.port))


def _join(where: HostPort, timeout_s: float) -> GroupStore:
    """Connect as a client; the host may start later."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return GroupStore(StoreConnection(str(where), timeout_s).store, where)
        except Unreachable as error:
            if time.monotonic() + _SLICE_S > deadline:
                reason = f"{error.reason} (tried for {timeout_s:g} s)"
                raise Unreachable("store", str(where), reason) from None
        time.sleep(_SLICE_S)


class SharedKeys:
    """Keys that the workers of a group share in their ``store``, which is at ``where``."""

    def __init__(self, store: Store, where: str) -> None:
        self._store = store
        self._where = where

    def write(self, key: str, text: str) -> None:
        """Write a key; every method raises `Unreachable` if the store does not answer."""
        call_store(lambda: self._store.set(key, text), self._where)

    def read(self, key: str) -> str:
        """The value of a key that exists."""
        return call_store(lambda: str(self._store.get(key).decode()), self._where)

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to a count, which begins at 0, and return it."""
        return call_store(lambda: int(self._store.add(key, amount)), self._where)

    def wait_for(self, key: str, deadline: float, timeout_s: float) -> str:
        """Wait for a key of rank 0, and return its value.

        Raises:
            DeadlineExceeded: the key is missing at ``deadline``, ``timeout_s`` after the start.
            GivenUp: rank 0 has written why there is no manager.
        """
        while not call_store(lambda: self._arrives(key, deadline), self._where):
            if why_over := call_store(self._why_over, self._where):
                raise GivenUp("manager", "group rank 0", why_over)
            if time.monotonic() > deadline:
                reason = (
                    "the worker with rank 0 has not published the address of the group's manager"
                )
                raise DeadlineExceeded("joining the replica group", timeout_s, reason)
        return self.read(key)

    def _why_over(self) -> str:
        return str(self._store.get(_OVER).decode()) if self._store.check([_OVER]) else ""

    def _arrives(self, key: str, deadline: float) -> bool:
        until = min(deadline, time.monotonic() + _POLL_FOR_S)
        while not self._store.check([key]):
            if time.monotonic() > until:
                return False
            time.sleep(_SLICE_S / 5)
        return True


class _Leader:
    """The view that another worker has of rank 0, which a launcher may restart."""

    def __init__(self, keys: SharedKeys) -> None:
        self._keys = keys
        self._address = keys.read("leader_address")
        self._manager = keys.read("manager_address")  # as it was known last
        self._watch = LeaderWatch(parse_address(self._address))
        self._lock = threading.Lock()

    def find_manager(self) -> str:
        """The address of the present manager.

        Raises:
            GivenUp: rank 0 starts no other.
            Unreachable: rank 0 is gone, and the manager with it.
        """
        try:
            leader = self._keys.read("leader_address")
            manager = self._manager = self._keys.read("manager_address")
            why_over = self._keys.read(_OVER)
        except Unreachable as error:
            reason = f"the group's store, which has its address, is gone, too ({error.reason})"
            raise Unreachable("manager", self._manager, reason) from None
        with self._lock:
            if leader != self._address:
                self._watch.close()
                self._address, self._watch = leader, LeaderWatch(parse_address(leader))
            is_dead = self._watch.is_dead()
        if is_dead:
            reason = "the process of group rank 0, which had started it, is dead"
            raise Unreachable("manager", manager, reason)
        if why_over:
            raise GivenUp("manager", manager, why_over)
        return manager

    def close(self) -> None:
        with self._lock:
            self._watch.close()
