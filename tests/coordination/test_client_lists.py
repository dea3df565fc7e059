"""Tests a client that was given several lighthouses, of which some do not answer."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.running import eventually, refusing, silent, steady_address

from torchft_svc.coordination import LighthouseClient, LighthouseServer
from torchft_svc.errors import AddressError, DeadlineExceeded, Unreachable
from torchft_svc.rpc.security import Security

LONG = timedelta(seconds=20)


def names(client: LighthouseClient) -> list[str]:
    return [group.replica_id for job in client.status() for group in job.groups]


@pytest.mark.parametrize("trouble", [refusing, silent])
def test_a_first_address_where_nobody_answers(
    trouble: contextlib.AbstractContextManager[str],
) -> None:
    with (
        trouble() as nowhere,  # type: ignore[operator]
        LighthouseServer("127.0.0.1:0", 1) as server,
        LighthouseClient(f"{nowhere},{server.address()}", LONG) as client,
    ):
        client.heartbeat("a:1", LONG)
        assert names(client) == ["a:1"]


def test_who_waits_goes_on_when_the_first_stops_and_the_next_quorum_goes_back() -> None:
    first, second = steady_address(), steady_address()
    with (
        LighthouseServer(second, 1),
        LighthouseClient(f"{first},{second}", LONG) as client,
        ThreadPoolExecutor() as pool,
    ):
        assert client._addr == second, "nobody listens at the first one yet"
        with LighthouseServer(first, 2, heartbeat_timeout_ms=60_000):
            eventually(lambda: client._look_back() or client._addr == first)
            waiting = pool.submit(client.quorum, "a:1", LONG)
            with LighthouseClient(first, LONG) as looking:
                eventually(lambda: names(looking) == ["a:1"])
        assert waiting.result().participants[0].replica_id == "a:1"
        assert client._addr == second
        assert names(client) == ["a:1"]
        with LighthouseServer(first, 1), LighthouseClient(first, LONG) as looking:
            eventually(lambda: client.quorum("a:1", LONG) and names(looking) == ["a:1"])


def test_the_next_quorum_does_not_go_back_to_one_that_refuses_it() -> None:
    known, wrong = Security(token="a-token-of-this-job"), Security(token="a-token-of-others")  # noqa: S106
    first, second = steady_address(), steady_address()
    with (
        LighthouseServer(second, 1, security=known),
        LighthouseClient(f"{first},{second}", LONG, security=known) as client,
        LighthouseServer(first, 1, security=wrong),
    ):
        assert client.quorum("a:1", LONG).participants[0].replica_id == "a:1"
        assert client._addr == second


def test_each_call_goes_to_whoever_answers_then() -> None:
    first, second = steady_address(), steady_address()
    with contextlib.ExitStack() as ending:
        with LighthouseServer(first, 1):
            client = ending.enter_context(LighthouseClient(f"{first},{second}", LONG))
            client.heartbeat("a:1", LONG)
        for address in (second, first, second):
            with LighthouseServer(address, 1):
                client.heartbeat("a:1", LONG)
                assert names(client) == ["a:1"]


def test_a_deadline_is_that_of_the_call_however_many_are_asked() -> None:
    with (
        silent() as one,
        silent() as two,
        LighthouseServer("127.0.0.1:0", 2) as server,
        LighthouseClient(f"{one},{two},{server.address()}", LONG) as client,
        pytest.raises((DeadlineExceeded, Unreachable)),
    ):
        client.quorum("a:1", timedelta(seconds=0.2))


def test_a_list_in_which_nobody_answers() -> None:
    with refusing() as one, refusing() as two, pytest.raises(Unreachable, match="no connection"):
        LighthouseClient(f"{one},{two}", timedelta(seconds=0.2))


def test_a_list_that_cannot_be() -> None:
    with pytest.raises(AddressError, match="names one host and port twice"):
        LighthouseClient("a:1,a:1", LONG)
