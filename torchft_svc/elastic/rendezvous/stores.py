"""The stores of a run's worlds: each world has one of its own, in the agent of its rank 0."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from torchft_svc.core.launch.world import World
from torchft_svc.host.address import LOOPBACK

# The workers of the world before may still be at its store.
NUM_KEPT = 2
# While a node waits for another one's key, it looks this often whether that one is gone.
_LOOK_S = 0.2
_CONNECT_S, _RETRY_S = 1.0, 0.05
# A node whose store has ended is noticed to be lost by then, unless its lighthouse is away.
NOTICE_S = 30.0
# As long as torch's own stores wait.
STORE_TIMEOUT_S = 300.0

# The keys over which torch's agents exchange the numbers of their workers, and report their end.
_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_TERMINAL_STATE = "torchelastic/agent/terminal_state"


class WorldChanged(Exception):
    """The world of a store is not the newest any more: its store is not worth waiting for."""


@dataclass(slots=True)
class Watch:
    """What the agent of a `WorldStore` knows from its lighthouse, and wants to know.

    ``has_changed``: the world is over. ``is_closed``: the run is. ``on_finish`` is called when the
    workers of this agent have all ended well.
    """

    has_changed: Callable[[], bool] = lambda: False
    is_closed: Callable[[], bool] = lambda: False
    on_finish: Callable[[], None] = lambda: None


class WorldStore(TCPStore):
    """A world's store, for an agent of torch: it does not wait for a node that is gone.

    torch's agents exchange the numbers of their workers as the first thing in a world. If the world
    has changed meanwhile, what is missing is made up: the agent is about to leave that world. At
    the end they wait for one another, here only until the run is closed.
    """

    def __init__(self, host: str, port: int, *, is_master: bool = False) -> None:
        super().__init__(
            host,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            wait_for_workers=False,
        )
        self.watch = Watch()
        self._role_info = {"role": "default", "local_world_size": 1}

    def set(self, key: str, value: str) -> None:
        """Set as `TCPStore` does, also if the first node is gone."""
        if not key.startswith(_ROLE_INFO):
            super().set(key, value)
            return
        self._role_info = json.loads(value)
        try:
            super().set(key, value)
        except DistNetworkError:
            if not self._will_change():
                raise

    def add(self, key: str, amount: int) -> int:
        """Add as `TCPStore` does, also if the first node is gone."""
        if not key.startswith(_TERMINAL_STATE):
            return super().add(key, amount)
        self.watch.on_finish()
        try:
            return super().add(key, amount)
        except (
            DistNetworkError
        ):  # the first node is gone: the lighthouse reports when all have ended
            return 0

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait as `TCPStore` does; for the end of the others, see above."""
        timeout = timeout or self.timeout  # type: ignore[attr-defined]  # the stubs lack it
        if not keys[0].startswith(_TERMINAL_STATE):
            super().wait(keys, timeout)
            return
        give_up_at = time.monotonic() + timeout.total_seconds()
        while not self.watch.is_closed():
            left_s = give_up_at - time.monotonic()
            try:
                super().wait(keys, timedelta(seconds=max(0.001, min(_LOOK_S, left_s))))
            except DistNetworkError:
                time.sleep(_LOOK_S)
            except DistStoreError:
                if left_s <= 0:
                    raise
            else:
                return
            if left_s <= 0:
                raise DistStoreError("the other nodes have not finished in time")

    def get(self, key: str) -> bytes:
        """Get as `TCPStore` does; see above for the ranks that rank 0 assigns.

        Raises:
            WorldChanged: another key is missing, and the world has changed.
        """
        if self._has(key):
            return super().get(key)
        if key.startswith(_ASSIGNED_RANKS):
            num_workers = self._role_info["local_world_size"]
            return json.dumps([0, num_workers, 0, num_workers]).encode()
        raise WorldChanged

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Get as `TCPStore` does; see above for the numbers of workers."""
        return [
            super(WorldStore, self).get(key) if self._has(key) else self._made_up(key)
            for key in keys
        ]

    def _made_up(self, key: str) -> bytes:
        if not key.startswith(_ROLE_INFO):
            raise WorldChanged
        return json.dumps({**self._role_info, "rank": int(key.rpartition("/")[2])}).encode()

    def _has(self, key: str) -> bool:
        """Wait for ``key``; False if the world has changed before it came."""
        give_up_at = time.monotonic() + STORE_TIMEOUT_S
        while True:
            try:
                self.wait([key], timedelta(seconds=_LOOK_S))
            except DistStoreError:
                if self.watch.has_changed():
                    return False
                if time.monotonic() > give_up_at:
                    raise
            except DistNetworkError:
                if not self._will_change():
                    raise
                return False
            else:
                return True

    def _will_change(self) -> bool:
        """The first node is gone: whether the lighthouse has noticed that, too, soon."""
        give_up_at = time.monotonic() + NOTICE_S
        while not self.watch.has_changed():
            if time.monotonic() > give_up_at:
                return False
            time.sleep(_RETRY_S)
        return True


class AgentStores:
    """The stores that this agent hosts: one that no world uses yet, and those of the last worlds.

    To be used on one thread, but for `spare_port`.
    """

    def __init__(self) -> None:
        self._hosted: dict[int, WorldStore] = {}  # by port
        self._lock = threading.Lock()
        self._spare = self._open()

    def _open(self) -> WorldStore:
        return WorldStore(LOOPBACK, 0, is_master=True)

    @property
    def spare_port(self) -> int:
        """Port of the store that no world uses, for the lighthouse."""
        with self._lock:
            return int(self._spare.port)

    def renew(self) -> None:
        """Open another spare store: a world that was not received may use the present one."""
        self._host(self.spare_port)

    def join(self, world: World, node_id: str, watch: Watch) -> WorldStore:
        """The store of ``world``: this agent's own if it is the first node of it.

        Raises:
            WorldChanged: the world is over before the first node could be reached.
        """
        if world.nodes[0].node_id == node_id and world.master_port in self._ports():
            store = self._host(world.master_port)
        else:
            _wait_for(world.master_addr, world.master_port, watch.has_changed)
            store = WorldStore(world.master_addr, world.master_port)
        store.watch = watch
        return store

    def _ports(self) -> Sequence[int]:
        return (*self._hosted, self.spare_port)

    def _host(self, port: int) -> WorldStore:
        if port == self.spare_port:
            self._hosted[port] = self._spare
            while len(self._hosted) > NUM_KEPT:
                del self._hosted[next(iter(self._hosted))]
            spare = self._open()
            with self._lock:
                self._spare = spare
        return self._hosted[port]


def _wait_for(host: str, port: int, has_changed: Callable[[], bool]) -> None:
    """Return when somebody listens there: a store's own attempt to connect could not be ended."""
    give_up_at = time.monotonic() + STORE_TIMEOUT_S
    while True:
        if has_changed():
            raise WorldChanged
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
            return
        except OSError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(_RETRY_S)
