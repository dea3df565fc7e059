"""Forms the process group of a world, and breaks it as soon as another world replaces it.

``init_process_group`` blocks in C++, on the store and then on connections to other workers, and so
does every collective of a group whose peer is frozen. What ends such a wait from another thread is
to shut down the sockets. So `WorldGroup` notes which ones belong to the group.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import register_rendezvous_handler

from torchft_svc.elastic.world_waits import WorldOperations
from torchft_svc.errors import DeadlineExceeded, Unreachable, WorldSuperseded
from torchft_svc.host.process_sockets import cut, is_between_machines, open_sockets, peer, socket_at
from torchft_svc.host.store_ping import check_store_answers

logger = logging.getLogger(__name__)

SCHEME = "torchft-world"
# An agent's store runs before the world is announced; this covers a lost packet, and shows a
# firewall that is in the way.
_CONNECT_TIMEOUT_S = 60.0
# For one attempt. torch's client would not notice meanwhile that the world is another one by now.
_TRY_S, _PAUSE_S = 2.0, 0.05
_TRY = timedelta(seconds=_TRY_S)
# While all workers are awaited, look whether they have come: first after, and later every. (A wait
# inside of torch could not be interrupted.) A store answers 100,000 times a second.
_FIRST_LOOK_S, _LOOK_S, _LOOK_S_PER_WORKER = 0.002, 0.1, 1e-4
# A thread may open the next socket just after the last ones were shut down.
_CUT_AGAIN_S = 0.02
# Until then operations of a group that was cut have ended by themselves, but for a few (rule L37).
_LEAVE_WAITS_S = 0.5
# All workers have arrived when gloo connects them. It takes up to six times this long, and only if
# one dies in that moment.
FORMING_TIMEOUT_S = 5.0


class WorldGroup:
    """The default process group of the world of ``round``, from the first connection on.

    Made by the thread that calls ``init_process_group``; `supersede` may be called by any other.
    """

    def __init__(self, round_: int) -> None:
        self.round = round_
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._before = open_sockets()
        self._sockets: dict[int, int] | None = None  # of the group, once it is formed
        self._superseded = ""
        self._cut_at = math.inf
        self._operations = WorldOperations(self.why_left)

    def meet(self, host: str, port: int, world_size: int, timeout_s: float) -> Store:
        """Wait for all workers of this world at its store, and return that.

        Raises:
            WorldSuperseded: another world has replaced this one.
            Unreachable: nobody answers at the store.
            DeadlineExceeded: somebody is missing after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        store = self._connect(host, port, timeout_s)
        longest_s = max(_LOOK_S, world_size * _LOOK_S_PER_WORKER)
        pause_s = _FIRST_LOOK_S
        try:
            if store.add("arrived", 1) == world_size:
                store.set("complete", "")
            while not store.check(["complete"]):
                self._check()
                if time.monotonic() > deadline:
                    reason = f"{store.add('arrived', 0)} of {world_size} have arrived"
                    raise DeadlineExceeded("waiting for all workers", timeout_s, reason)
                time.sleep(pause_s)
                pause_s = min(1.3 * pause_s, longest_s)
        except RuntimeError:  # of torch: the connection is gone, perhaps because it was cut
            self._check()
            raise
        self._check()
        return store

    def end_forming(self) -> None:
        """Record the sockets of the group, as ``init_process_group`` has returned."""
        with self._lock:
            if self._sockets is None:
                self._sockets = self._opened() if dist.is_initialized() else {}
                if dist.is_initialized():
                    self._operations.follow_group()

    def is_over(self) -> bool:
        """Whether the group was destroyed, or never formed; asked by the thread that forms it."""
        is_forming = self._sockets is None and threading.get_ident() != self._thread
        return not is_forming and not dist.is_initialized()

    def supersede(self, reason: str, *, is_broken: bool) -> None:
        """Make waits in this group fail, as another world replaces this one.

        A group that is being formed fails, because some of its workers will never come. A formed
        one fails if ``is_broken``: its lost workers may be frozen, and others wait for them.
        """
        with self._lock:
            self._superseded = reason
            is_forming = self._sockets is None
        if is_forming:
            threading.Thread(target=self._stop_forming, name="torchft-world", daemon=True).start()
        elif is_broken:
            self.cut()

    def cut(self) -> None:
        """Make all operations of the formed group fail."""
        sockets = self._sockets or {}
        self._cut_at = min(self._cut_at, time.monotonic())
        cut({fd: inode for fd, inode in sockets.items() if peer(fd) is not None})
        for group in _nccl_groups():
            group.abort()
        if sockets:
            timer = threading.Timer(_LEAVE_WAITS_S, self._leave_cpp_waits)
            timer.daemon = True
            timer.start()

    def why_left(self) -> str:
        """Why operations of this group are not waited for any more; empty: they are."""
        is_late = time.monotonic() >= self._cut_at + _LEAVE_WAITS_S
        return self._why_broken() if is_late else ""

    def _leave_cpp_waits(self) -> None:
        self._operations.leave_cpp_waits(self._why_broken())

    def _why_broken(self) -> str:
        reason = self._superseded or "it was left"
        return f"world {self.round} is broken ({reason}), and gloo has not ended an operation"

    def _stop_forming(self) -> None:
        while self._cut_forming():
            time.sleep(_CUT_AGAIN_S)

    def _cut_forming(self) -> bool:
        """Cut what has been opened for the group so far; False: it is not being formed any more.

        The lock keeps connections of the next group apart from those of this one.
        """
        with self._lock:
            if not self._is_inside_init():
                return False
            opened = self._opened()
            cut({fd: inode for fd, inode in opened.items() if peer(fd) is not None})
            return True

    def _is_inside_init(self) -> bool:
        frame = sys._current_frames().get(self._thread)
        wanted = _undecorated(dist.init_process_group).__code__
        while frame is not None and frame.f_code is not wanted:
            frame = frame.f_back
        return frame is not None and self._sockets is None

    def _check(self) -> None:
        if self._superseded:
            raise WorldSuperseded(self.round, self._superseded)

    def _connect(self, host: str, port: int, timeout_s: float) -> Store:
        give_up_at = time.monotonic() + min(timeout_s, _CONNECT_TIMEOUT_S)
        while True:
            self._check()
            try:
                check_store_answers(host, port, _TRY_S, _TRY_S)
                store = TCPStore(host, port, is_master=False, timeout=_TRY, wait_for_workers=False)
                break
            except (OSError, RuntimeError) as error:
                self._check()
                if time.monotonic() > give_up_at:
                    raise Unreachable("store", f"{host}:{port}", str(error)) from error
            time.sleep(_PAUSE_S)
        store.set_timeout(timedelta(seconds=timeout_s))
        return PrefixStore(f"torchft/{self.round}", store)

    def _opened(self) -> dict[int, int]:
        return {
            fd: inode
            for fd, inode in open_sockets().items()
            if self._before.get(fd) != inode and is_between_machines(fd) and socket_at(fd) == inode
        }


def url(host: str, port: int, round_: int) -> str:
    """The ``init_method`` of ``init_process_group`` for the world of a round; see `handle`."""
    shown = f"[{host}]" if ":" in host else host
    return f"{SCHEME}://{shown}:{port}/{round_}"


def handle(begin: Callable[[int], WorldGroup]) -> None:
    """Make ``init_process_group`` form the groups of worlds; ``begin`` makes the one of a round.

    Called before each: torch numbers its groups, and counts one that failed. Its name is part of
    the keys in the store, so a survivor and a newcomer would wait for each other's.
    """
    _register(begin)
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0


@functools.lru_cache(maxsize=1)
def _register(begin: Callable[[int], WorldGroup]) -> None:
    def handler(
        address: str, timeout: timedelta = distributed_c10d.default_pg_timeout, **_: Any
    ) -> Iterator[tuple[Store, int, int]]:
        split = urlsplit(address)
        query = {name: int(values[0]) for name, values in parse_qs(split.query).items()}
        rank, world_size = query["rank"], query["world_size"]
        assert split.hostname is not None
        assert split.port is not None
        group = begin(int(split.path.strip("/")))
        timeout_s = timeout.total_seconds()
        try:
            yield group.meet(split.hostname, split.port, world_size, timeout_s), rank, world_size
        finally:  # `init_process_group` has returned: it drops this generator only then
            group.end_forming()

    register: Any = register_rendezvous_handler
    register(SCHEME, handler)


def leave() -> None:
    """Destroy the default process group, if there is one, also while it cannot be used.

    NCCL has to be aborted first: destroying it waits for operations that may never end.
    """
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0  # see `handle`; destroying does so, too
        return
    for group in _nccl_groups():
        group.abort()
    dist.destroy_process_group()


def form(
    backend: str | None, parameters: dict[str, Any], timeout_s: float, options: dict[str, Any]
) -> None:
    """Call ``init_process_group`` for the world of ``parameters``."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout, **parameters, **options)


def set_timeout(timeout_s: float) -> None:
    """Set how long an operation of the default process group may take from now on."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def _nccl_groups() -> list[Any]:
    """NCCL groups of this process, the newest first: they may have been made from one another."""
    if not dist.is_nccl_available() or not dist.is_initialized():
        return []
    names = distributed_c10d._world.pg_names
    groups = sorted(names, key=lambda group: names[group], reverse=True)
    return [group for group in groups if "nccl" in dist.get_backend(group)]


def _undecorated(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
