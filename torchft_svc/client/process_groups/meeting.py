"""Members meet at a store before they connect, in waits that can be interrupted."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from torchft_svc.client.process_groups.stores import HashStore, PrefixStore, Store, TCPStore
from torchft_svc.errors import DeadlineExceeded, QuorumFailed, Unreachable
from torchft_svc.rpc.address import parse_address

# A wait inside torch cannot be interrupted: nothing waits longer than this in one go.
SLICE_S = 0.1
_PRESENT = "1"


class StopFlag:
    """Set once, to end the waits of another thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """End them."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether they are to end."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether they are to end, within ``timeout_s`` seconds."""
        return self._event.wait(timeout_s)


def meet(store_addr: str, rank: int, world_size: int, timeout_s: float, stop: StopFlag) -> Store:
    """The store of the members at ``store_addr`` (``host:port/prefix``), once all are there.

    Backends wait for missing members in one long call. A member that died on its way here would
    keep them in it, so the waiting is done here first.

    Raises:
        DeadlineExceeded: not all came within ``timeout_s``; the sentence names who is missing.
        Unreachable: nobody answers at the address.
    """
    if world_size == 1:
        return HashStore()
    address, _, prefix = store_addr.partition("/")
    deadline = time.monotonic() + timeout_s
    store = PrefixStore(prefix, _connect(address, timeout_s))
    store.set(f"present/{rank}", _PRESENT)
    for other in range(world_size):
        while not store.check([f"present/{other}"]):
            _wait_for(store, f"present/{other}")
            if stop.is_set():
                raise QuorumFailed("the manager was shut down")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    "meeting the other groups", timeout_s, f"replica rank {other} did not come"
                )
    return store


def _connect(address: str, timeout_s: float) -> TCPStore:
    where = parse_address(address)
    try:
        return TCPStore(
            where.host,
            where.port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise Unreachable("store", address, str(error)) from error


def _wait_for(store: Store, key: str) -> None:
    with contextlib.suppress(dist.DistStoreError):
        store.wait([key], timedelta(seconds=SLICE_S))
