"""Tests managers with several lighthouses, of which some do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import grpc
import pytest
from support.bounds import Late, check
from support.running import (
    attach,
    eventually,
    grpc_server,
    lighthouse_process,
    manager_process,
    refusing,
    silent,
    steady_address,
)

from torchft_svc.coordination import LighthouseClient, ManagerClient
from torchft_svc.core.route import LOOK_BACK_S
from torchft_svc.manager_server.app import run_manager
from torchft_svc.manager_server.config import ManagerConfig

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


@pytest.mark.processes
def test_groups_go_back_in_the_middle_of_a_step_and_nobody_trains_alone() -> None:
    first = steady_address()
    losses: list[str] = []
    with contextlib.ExitStack() as stack:
        second = stack.enter_context(lighthouse_process("--min-replicas=2"))
        both = f"{first},{second.address}"
        a, b = (
            stack.enter_context(ManagerClient(manager.address, LONG))
            for manager in [stack.enter_context(manager_process(both, name=name)) for name in "ab"]
        )
        pool = stack.enter_context(ThreadPoolExecutor())
        attach(a, 0, on_loss=lambda replica_id, *_: losses.append(replica_id))
        asked = pool.submit(b._quorum, 0, 0, "", False, LONG)
        assert a._quorum(0, 0, "", False, LONG).replica_world_size == 2
        asked.result()

        stack.enter_context(lighthouse_process("--min-replicas=1", bind=first))
        looking = stack.enter_context(LighthouseClient(first, LONG))

        def num_groups(*, asking: bool) -> int:
            return sum(group.asking >= asking for job in looking.status() for group in job.groups)

        eventually(lambda: num_groups(asking=False) == 2)
        asked = pool.submit(a._quorum, 0, 1, "", False, LONG)
        eventually(lambda: num_groups(asking=True) == 1)
        assert b._quorum(0, 1, "", False, LONG).replica_world_size == 2
        assert asked.result().replica_world_size == 2
        if losses:  # either the product's fault, or a stall cut a session
            raise Late(f"somebody had to give up a step: {losses}")


@pytest.mark.processes
def test_a_group_goes_back_when_the_first_lighthouse_has_room_for_it_and_not_before() -> None:
    with (
        lighthouse_process("--max-jobs=1", "--heartbeat-timeout-ms=60000") as first,
        lighthouse_process() as second,
        LighthouseClient(first.address, LONG, job_id="other") as other,
    ):
        other.heartbeat("a:1")
        with (
            manager_process(f"{first.address},{second.address}") as manager,
            ManagerClient(manager.address, LONG) as client,
        ):
            before = client._quorum(0, 0, "", False, LONG).replica_ids
            eventually(lambda: "HasRoom" in first.errors())  # refused, which is logged
            assert client._quorum(0, 1, "", False, LONG).replica_ids == before
            other.leave("a:1")
            eventually(lambda: [job.job for job in other.status()] == ["default"])
            assert client._quorum(0, 2, "", False, LONG).replica_ids != before


@contextlib.contextmanager
def undecided(asked: queue.SimpleQueue[float]) -> Iterator[str]:
    """A lighthouse that accepts no group, and does not answer when it is asked for room."""
    over = threading.Event()

    def has_room(*_: object) -> bytes:
        asked.put(time.monotonic())
        over.wait()
        return b""

    handler = grpc.unary_unary_rpc_method_handler(has_room)
    service = grpc.method_handlers_generic_handler(
        "torchft.LighthouseService", {"HasRoom": handler}
    )
    with grpc_server(service, over.set) as address:
        yield address


@pytest.mark.processes
def test_earlier_lighthouses_that_are_silent_are_not_looked_at_more_rarely() -> None:
    """All groups of a job have to be back within that time."""
    asked: queue.SimpleQueue[float] = queue.SimpleQueue()
    with (
        undecided(asked) as first,
        undecided(queue.SimpleQueue()) as second,
        lighthouse_process() as third,
        manager_process(f"{first},{second},{third.address}"),
    ):
        before, after = (asked.get(timeout=LONG.total_seconds()) for _ in range(2))
        # One after the other, and a pause behind them, would be more than that.
        check("the next look", after - before, 2 * LOOK_BACK_S)


@pytest.mark.processes
def test_a_lighthouse_that_was_given_up_is_not_connected_to_any_more() -> None:
    """gRPC goes on connecting a closed channel of which a call is kept, as a traceback does."""

    def done_calls() -> list[Any]:
        objects = gc.get_objects()
        return [it for it in objects if isinstance(it, grpc.aio.StreamStreamCall) and it.done()]

    async def story(lighthouses: str) -> list[Any]:
        config = ManagerConfig(
            lighthouse_address=lighthouses,
            replica_name="group",
            group_world_size=1,
            store_address="127.0.0.1:1",
            bind="127.0.0.1:0",
        )
        async with run_manager(config) as manager:
            with ManagerClient(manager.address, LONG) as client:
                await asyncio.to_thread(client._quorum, 0, 0, "", False, LONG)
            return done_calls()

    gc.collect()
    of_others = done_calls()
    gc.disable()
    try:
        with refusing() as nowhere, lighthouse_process() as lighthouse:
            kept = asyncio.run(story(f"{nowhere},{lighthouse.address}"))
    finally:
        gc.enable()
    assert len(kept) <= len(of_others)
