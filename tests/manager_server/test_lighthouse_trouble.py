"""Tests a manager whose lighthouse is gone, comes back, is frozen, or never answers."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import grpc
import pytest
from support.bounds import Late, check, raises_in_time
from support.running import (
    Line,
    Process,
    attach,
    eventually,
    failure,
    grpc_server,
    lighthouse_process,
    line_to,
    manager_process,
    members,
    refusing,
    silent,
    start_manager,
    steady_address,
)

from tools.chaos.bounds import NEWS_S
from torchft_svc.coordination import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
)
from torchft_svc.core.quorum.manager import group as group_machine
from torchft_svc.errors import GroupLeft, Unreachable
from torchft_svc.testing.proxy import Proxy

LONG = timedelta(seconds=10)
CONNECT_S = 0.5
CONNECT = timedelta(seconds=CONNECT_S)
# How long an answer may take from process to process while everything runs at once.
BUSY_S = 5.0
# From the moment that a lighthouse is back to the quorum that waited for it.
BACK_S = 1.0


@pytest.fixture
def nowhere() -> Iterator[str]:
    with refusing() as address:
        yield address


@pytest.fixture
def black_hole() -> Iterator[str]:
    with silent() as address:
        yield address


@pytest.mark.parametrize("trouble", ["nowhere", "black_hole"])
def test_every_worker_receives_the_error_of_a_failed_quorum_at_once(
    trouble: str, request: pytest.FixtureRequest
) -> None:
    lighthouse: str = request.getfixturevalue(trouble)
    with (
        start_manager(lighthouse, world_size=2, connect_timeout=CONNECT) as manager,
        line_to(manager.address()) as line,
    ):
        began_at = time.monotonic()
        asked = [line.ask_manager(rank=rank, worker_id=f"w{rank}") for rank in (0, 1)]
        failures = [failure(each) for each in asked]
        took_s = time.monotonic() - began_at
    assert failures[0] == failures[1]
    code, reason = failures[0]
    assert code is grpc.StatusCode.UNAVAILABLE
    assert reason.startswith(f"lighthouse at {lighthouse} cannot be reached: "), reason
    check("the error of a failed quorum, with 10 s left,", took_s, CONNECT_S + 1.0)


def test_the_lighthouses_refusal_reaches_every_worker_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lighthouse has to refuse before the manager's own deadline; here, long before that."""
    monkeypatch.setattr(group_machine, "ANSWER_MARGIN_S", BUSY_S)
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=3) as lighthouse,
        start_manager(lighthouse.address(), world_size=2) as manager,
        line_to(manager.address()) as line,
    ):
        asked = [
            line.ask_manager(rank=rank, worker_id=f"w{rank}", timeout_s=BUSY_S + 0.5)
            for rank in (0, 1)
        ]
        for code, reason in map(failure, asked):
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            if "1 of at least 3 groups ask" not in reason:
                raise Late(f"it was asked too late: {reason}")


@pytest.mark.processes
def test_the_next_quorum_waits_for_a_lighthouse_that_restarts() -> None:
    """Trap: reconnecting after a blip backs off longer than the heartbeat timeout."""
    with (
        lighthouse_process(bind=steady_address()) as first,
        manager_process(first.address, "--connect-timeout-ms=20000") as manager,
        ManagerClient(manager.address, LONG) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        before = client._quorum(0, 0, "", False, LONG)
        first.kill()
        asked = thread.submit(client._quorum, 0, 1, "", False, 2 * LONG)
        time.sleep(2)  # a blip that is long enough for a backoff to have grown
        assert not asked.done()
        with lighthouse_process(bind=first.address):
            began_at = time.monotonic()
            after = asked.result()
            check("the next quorum", time.monotonic() - began_at, BACK_S)
        assert after.quorum_id > before.quorum_id
        assert after.replica_ids == before.replica_ids, "the group is the same one"


@pytest.mark.processes
def test_a_question_keeps_its_place_when_the_connection_is_cut() -> None:
    """The group is out at once, and back before the others have asked, unnoticed by its worker."""
    with (
        lighthouse_process("--min-replicas=2") as lighthouse,
        Proxy(lighthouse.address) as proxy,
        manager_process(proxy.address, name="a") as manager_a,
        manager_process(lighthouse.address, name="b") as manager_b,
        ManagerClient(manager_a.address, LONG) as a,
        ManagerClient(manager_b.address, LONG) as b,
        LighthouseClient(lighthouse.address, LONG) as looking,
        ThreadPoolExecutor(1) as thread,
    ):

        def asks(replica_id: str) -> bool:
            groups = [group for job in looking.status() for group in job.groups]
            return any(group.asking and group.replica_id == replica_id for group in groups)

        first = thread.submit(a._quorum, 0, 0, "", False, LONG)
        before = b._quorum(0, 0, "", False, LONG)
        assert first.result().replica_ids == before.replica_ids
        asked = thread.submit(a._quorum, 0, 1, "", False, 3 * LONG)
        eventually(lambda: asks(before.replica_ids[0]))
        proxy.cut()
        eventually(lambda: "its session ended" in lighthouse.errors())
        eventually(lambda: asks(before.replica_ids[0]))
        assert not asked.done()
        after = b._quorum(0, 1, "", False, LONG)
        assert asked.result().replica_ids == after.replica_ids == before.replica_ids


@pytest.mark.processes
def test_a_lighthouse_that_restarts_does_not_begin_anew_with_newcomers() -> None:
    """The group that it had forgotten is in a long step, which its session reports."""
    with (
        lighthouse_process(bind=steady_address()) as first,
        manager_process(first.address) as manager,
        line_to(manager.address) as group,
    ):
        group.ask_manager(step=7, worker_id="w").result()
        first.kill()
        with (
            lighthouse_process("--join-timeout-ms=1", bind=first.address) as second,
            LighthouseClient(second.address, LONG) as client,
            line_to(second.address) as line,
        ):
            eventually(lambda: [job.committed_step for job in client.status()] == [7])
            asked = line.quorum("newcomer:1", step=3)
            eventually(lambda: "waiting for group:" in client.status()[0].waiting_for)
            group.ask_manager(step=8, worker_id="w").result()
            assert [each.step for each in asked.result().quorum.participants] == [8, 3]


@pytest.mark.processes
@pytest.mark.usefixtures("early_news")
def test_a_worker_that_was_restarted_is_not_held_to_what_its_group_knew() -> None:
    """The manager lives on beside the worker, but the state of that step is lost."""
    with (
        lighthouse_process(bind=steady_address()) as first,
        start_manager(first.address, connect_timeout=2 * LONG) as manager,
        line_to(manager.address()) as group,
    ):
        group.ask_manager(step=7, worker_id="w").result()
        first.kill()
        with lighthouse_process(bind=first.address):
            answer = group.ask_manager(step=3, worker_id="another").result()
            assert answer.max_step == 3


@pytest.mark.processes
def test_a_restarted_worker_that_gives_up_too_early_asks_again() -> None:
    """The manager still leaves for the worker before, at a lighthouse that does not answer."""
    with (
        lighthouse_process() as lighthouse,
        manager_process(lighthouse.address) as manager,
        line_to(manager.address) as group,
    ):
        with ManagerClient(manager.address, LONG) as before:
            attach(before, 0)
            before._quorum(0, 3, "", False, LONG)
            lighthouse.send(signal.SIGSTOP)
        eventually(lambda: "leaving: group rank 0 is gone" in manager.errors())
        failure(group.ask_manager(step=3, worker_id="another", timeout_s=0.3))
        lighthouse.send(signal.SIGCONT)
        assert group.ask_manager(step=3, worker_id="another").result().max_step == 3


def test_retries_ask_again_after_a_failed_quorum(nowhere: str) -> None:
    with (
        start_manager(nowhere, connect_timeout=CONNECT, quorum_retries=2) as manager,
        ManagerClient(manager.address(), LONG) as client,
    ):
        began_at = time.monotonic()
        with pytest.raises(Unreachable):
            client._quorum(0, 0, "", False, LONG)
        assert time.monotonic() - began_at > 1.2 * CONNECT_S


@pytest.mark.processes
def test_a_group_whose_lighthouse_never_answers_leaves_within_its_deadline(
    black_hole: str,
) -> None:
    """Trap: a heartbeat call without a deadline would hold up the manager's end for ever."""
    began_at = time.monotonic()
    with manager_process(black_hole) as manager:
        assert manager.end()[0] == 0
        assert "Traceback" not in manager.errors()
    check("a manager starts and ends", time.monotonic() - began_at, 5)


@pytest.mark.processes
def test_a_group_that_has_to_end_does_not_wait_for_a_lighthouse_that_is_gone(nowhere: str) -> None:
    with (
        manager_process(nowhere, "--connect-timeout-ms=60000") as manager,
        ManagerClient(manager.address, LONG) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(client._quorum, 0, 0, "", False, 6 * LONG)
        eventually(lambda: "there is no lighthouse" in manager.errors())
        client.drain("the node is needed")
        with pytest.raises(GroupLeft, match="the node is needed"):
            asked.result(LONG.total_seconds())


@pytest.mark.processes
def test_a_frozen_lighthouse_is_noticed_and_back_when_it_thaws() -> None:
    with (
        lighthouse_process() as lighthouse,
        manager_process(lighthouse.address, "--connect-timeout-ms=300") as manager,
        ManagerClient(manager.address, LONG) as client,
    ):
        ask_soon(client, 0)
        lighthouse.send(signal.SIGSTOP)
        began_at = time.monotonic()
        with raises_in_time(TimeoutError, "the lighthouse has not answered yet"):
            client._quorum(0, 1, "", False, timedelta(seconds=0.6))
        check("the lighthouse is frozen", time.monotonic() - began_at, 1.0)
        lighthouse.send(signal.SIGCONT)
        began_at = time.monotonic()
        ask_soon(client, 1)
        check("the lighthouse thaws", time.monotonic() - began_at, BACK_S)


def ask_soon(client: ManagerClient, step: int) -> None:
    """A quorum may take long, but the connection to the lighthouse must be there soon."""
    try:
        client._quorum(0, step, "", False, LONG)
    except Unreachable as error:
        raise Late(str(error)) from error


def test_a_lighthouse_far_away_is_reached() -> None:
    """The reconnect backoff, which is short, must not be the time that a connection may take."""
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse,
        Proxy(lighthouse.address(), delay_s=0.3) as proxy,
        line_to(proxy.address) as line,
    ):
        assert line.quorum("a:1", timeout_s=10).result().quorum.quorum_id


def seen_alone(line: Line, began_at: float) -> float:
    """How many seconds after ``began_at`` the group ``zzz:1`` has a quorum of its own."""
    answer = line.quorum("zzz:1").result()
    took_s = time.monotonic() - began_at
    assert members(answer) == ["zzz:1"]
    return took_s


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_others_go_on_at_once_after_a_managers_death(number: signal.Signals) -> None:
    with lighthouse_process() as lighthouse, line_to(lighthouse.address) as line:
        with manager_process(lighthouse.address) as manager:
            join_both(line, manager)
            began_at = time.monotonic()
            manager.send(number)
            took_s = seen_alone(line, began_at)
            assert manager.wait() == (0 if number is signal.SIGTERM else -signal.SIGKILL)
        check("a manager ends", took_s, NEWS_S)


def join_both(line: Line, manager: Process) -> None:
    """Wait until ``zzz:1`` and the manager's group are members of one quorum."""
    with line_to(manager.address) as worker:
        line.beat("zzz:1")
        asked = worker.ask_manager(worker_id="w")
        eventually(lambda: len(members(line.quorum("zzz:1").result())) == 2)
        assert asked.result().replica_world_size == 2


@contextlib.contextmanager
def undecided() -> Iterator[str]:
    """A lighthouse without sessions, as the public release's, which never has a quorum."""
    over = threading.Event()

    def wait(*_: object) -> bytes:
        over.wait()
        return b""

    handlers = {"Quorum": wait, "Heartbeat": lambda *_: b""}
    service = grpc.method_handlers_generic_handler(
        "torchft.LighthouseService",
        {name: grpc.unary_unary_rpc_method_handler(each) for name, each in handlers.items()},
    )
    with grpc_server(service, over.set) as address:
        yield address


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.usefixtures("early_news")
def test_a_worker_that_waits_receives_what_is_known_of_the_lighthouse(
    nowhere: str, *, is_there: bool
) -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        undecided() if is_there else contextlib.nullcontext(nowhere) as address,
        start_manager(address) as manager,
        ManagerClient(manager.address(), LONG) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        attach(client, 0, on_no_quorum=reasons.put)
        asked = thread.submit(client._quorum, 0, 0, "", False, 3 * LONG)
        why = reasons.get(timeout=LONG.seconds)
        client.close()
        assert asked.exception() is not None
    missing = f"lighthouse at {nowhere} cannot be reached: "
    assert why == "" if is_there else why.startswith(missing)
