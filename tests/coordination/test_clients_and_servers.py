"""Tests the public clients and in-process servers: timeouts, ends, errors, threads."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from support.bounds import check, raises_in_time
from support.running import eventually, refusing, start_manager, steady_address

from tools.chaos.bounds import NEWS_S
from torchft_svc.coordination import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
    ManagerServer,
)
from torchft_svc.errors import (
    AddressError,
    ConfigError,
    DeadlineExceeded,
    PeerError,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unreachable,
    UsageError,
)

LONG = timedelta(seconds=10)
SHORT = timedelta(seconds=0.3)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=2) as server:
        yield server


@pytest.fixture
def manager(lighthouse: LighthouseServer) -> Iterator[ManagerServer]:
    with start_manager(lighthouse.address()) as server:
        yield server


@pytest.mark.usefixtures("early_reasons")
def test_every_wait_ends_with_a_timeout_error_that_says_why(
    lighthouse: LighthouseServer, manager: ManagerServer
) -> None:
    with (
        LighthouseClient(lighthouse.address(), LONG, job_id="another") as one,
        ManagerClient(manager.address(), LONG) as other,
    ):
        waits: list[Callable[[], object]] = [
            lambda: one.quorum("a:1", LONG),
            lambda: other._quorum(0, 0, "", False, LONG),
        ]
        for wait in waits:
            with raises_in_time(TimeoutError, "1 of at least 2 groups ask") as caught:
                wait()
            assert isinstance(caught.value, DeadlineExceeded)


@pytest.mark.parametrize("client", [LighthouseClient, ManagerClient])
def test_nobody_at_the_address_is_an_error_within_the_connect_timeout(client: Any) -> None:
    with refusing() as address:
        began_at = time.monotonic()
        with pytest.raises(ConnectionError) as caught:
            client(address, SHORT)
        check("nobody is there", time.monotonic() - began_at, SHORT.total_seconds())
    assert isinstance(caught.value, Unreachable)
    assert f"at {address} cannot be reached: no connection within 0.3 s" in str(caught.value)


@pytest.mark.parametrize("client", [LighthouseClient, ManagerClient])
@pytest.mark.parametrize("address", ["nonsense", "host:0", ""])
def test_an_address_that_cannot_be_parsed_is_refused(client: Any, address: str) -> None:
    with pytest.raises(AddressError):
        client(address, LONG)


def test_the_other_services_address_is_noticed_at_once(
    lighthouse: LighthouseServer, manager: ManagerServer
) -> None:
    with ManagerClient(lighthouse.address(), LONG) as client:
        with pytest.raises(RequestRefused) as caught:
            client.should_commit(0, 0, True, LONG)
        assert str(caught.value) == (
            f"the service at {lighthouse.address()} is no manager: it does not know this request"
        )
    with (
        LighthouseClient(manager.address(), LONG) as client,
        pytest.raises(RequestRefused, match="is no lighthouse"),
    ):
        client.heartbeat("a:1")


def test_a_request_of_a_megabyte_is_the_callers_mistake(lighthouse: LighthouseServer) -> None:
    with LighthouseClient(lighthouse.address(), LONG) as client:
        with pytest.raises(RequestRefused, match="is too large") as caught:
            client.heartbeat("x" * 1_000_000)
        assert len(str(caught.value)) < 300
        client.heartbeat("a:1")


@pytest.mark.parametrize("job", ["", "two\nlines", "grün", "x" * 300])
def test_a_jobs_name_is_checked_by_the_client(lighthouse: LighthouseServer, job: str) -> None:
    with pytest.raises(ConfigError, match="job_id="):
        LighthouseClient(lighthouse.address(), LONG, job_id=job)


def test_a_closed_client_says_so(lighthouse: LighthouseServer, manager: ManagerServer) -> None:
    one = LighthouseClient(lighthouse.address(), LONG)
    other = ManagerClient(manager.address(), LONG)
    calls: list[Callable[[], object]] = [
        lambda: one.heartbeat("a:1"),
        lambda: other.should_commit(0, 0, True, LONG),
    ]
    for client, call in zip((one, other), calls, strict=True):
        client.close()
        client.close()
        with pytest.raises(UsageError, match="this client is closed"):
            call()


def test_closing_a_client_ends_a_call_under_way(lighthouse: LighthouseServer) -> None:
    outcome: list[BaseException] = []
    with LighthouseClient(lighthouse.address(), LONG) as peer:
        client = LighthouseClient(lighthouse.address(), LONG)

        def wait() -> None:
            try:
                client.quorum("a:1", 6 * LONG)
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(peer.status)  # the group that asks makes the job known
        client.close()
        thread.join(2 * LONG.total_seconds())
        assert not thread.is_alive()
    (error,) = outcome
    assert isinstance(error, TorchFTError)


def test_servers_start_and_stop_many_times_without_leaking_threads() -> None:
    before = set(threading.enumerate())  # earlier tests may have left some, which end later

    def started_threads() -> list[str]:
        started = set(threading.enumerate()) - before
        return [thread.name for thread in started if thread.name.startswith("torchft")]

    for _ in range(15):
        with (
            LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse,
            start_manager(lighthouse.address()) as manager,
        ):
            assert started_threads() == ["torchft-services"], "both share one loop"
            assert manager.address().startswith("http://127.0.0.1:")
        assert started_threads() == []
    assert threading.active_count() < len(before) + 10


def test_shutting_down_twice_is_allowed_and_frees_the_port() -> None:
    server = LighthouseServer(steady_address(), min_replicas=1)
    address = server.address()
    server.shutdown()
    server.shutdown()
    with LighthouseServer(address, min_replicas=1) as again:
        assert again.address() == address


def test_a_manager_that_is_shut_down_has_left_the_lighthouse() -> None:
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse:
        with (
            start_manager(lighthouse.address()) as manager,
            ManagerClient(manager.address(), LONG) as other,
        ):
            assert other._quorum(0, 0, "", False, LONG).replica_world_size == 1
        with LighthouseClient(lighthouse.address(), LONG) as client:
            began_at = time.monotonic()
            quorum = client.quorum("b:1", LONG)
            check("nobody waits for one that has left", time.monotonic() - began_at, NEWS_S)
    assert [member.replica_id for member in quorum.participants] == ["b:1"]


def test_a_server_that_cannot_start_leaves_nothing(lighthouse: LighthouseServer) -> None:
    for start in (
        lambda: LighthouseServer(lighthouse.address(), min_replicas=1),
        lambda: start_manager(lighthouse.address(), bind=lighthouse.address()),
    ):
        with pytest.raises(AddressError, match="Address already in use"):
            start()
    with pytest.raises(ConfigError, match="min_replicas=0"):
        LighthouseServer("127.0.0.1:0", min_replicas=0)
    with pytest.raises(ConfigError, match="heartbeat_interval_s="):
        start_manager(lighthouse.address(), heartbeat_interval=timedelta(0))


def test_errors_that_were_caught_survive_pickle(
    lighthouse: LighthouseServer, manager: ManagerServer
) -> None:
    caught: list[TorchFTError] = []
    with (
        LighthouseClient(lighthouse.address(), LONG) as one,
        ManagerClient(manager.address(), LONG) as other,
    ):
        for call in (
            lambda: one.quorum("a:1", SHORT),
            lambda: one.quorum("", SHORT),
            lambda: other.should_commit(5, 0, True, SHORT),
            lambda: LighthouseClient("127.0.0.1:1", SHORT),
            lambda: LighthouseClient("nonsense", SHORT),
        ):
            with pytest.raises(TorchFTError) as info:
                call()
            caught.append(info.value)
    for error in [*caught, QuorumFailed("why")]:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
        assert (type(again), str(again)) == (type(error), str(error))
        assert isinstance(again, UsageError | PeerError)


@pytest.mark.parametrize("timeout", [timedelta(days=300_000), timedelta.max])
def test_whoever_can_wait_for_ever_is_answered(timeout: timedelta) -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse,
        start_manager(lighthouse.address()) as manager,
        LighthouseClient(lighthouse.address(), timeout, job_id="other") as client,
        ManagerClient(manager.address(), timeout) as worker,
    ):
        assert client.quorum("a:1", timeout).quorum_id
        assert worker._quorum(0, 0, "", False, timeout).quorum_id
