"""Tests managers with several lighthouses, of which some do not answer."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from bounds import check
from running import lighthouse_process, manager_process

from torchft_svc.coordination import ManagerClient

LONG = timedelta(seconds=10)


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """An address whose system drops what comes: as a host that is gone."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        where = listener.getsockname()
        for _ in range(8):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            assert knocking.connect_ex(where) == errno.EINPROGRESS
        yield f"127.0.0.1:{where[1]}"


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("trouble", "bound_s"), [(refusing, 0.5), (full_backlog, 2.0), (silent, 2.0)]
)
def test_a_first_address_where_nobody_answers(
    trouble: contextlib.AbstractContextManager[str], bound_s: float
) -> None:
    with (
        trouble() as nowhere,  # type: ignore[operator]
        lighthouse_process() as lighthouse,
        manager_process(f"{nowhere},{lighthouse.address}") as manager,
        ManagerClient(manager.address, LONG) as client,
    ):
        began_at = time.monotonic()
        assert client._quorum(0, 0, "", False, LONG).replica_world_size == 1
        check("the other lighthouse is found", time.monotonic() - began_at, bound_s)
        assert client._quorum(0, 1, "", False, LONG).replica_world_size == 1
