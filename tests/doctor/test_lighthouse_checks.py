"""Tests the checks of lighthouses with each wrong thing at real ones."""

from __future__ import annotations

import datetime
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from support.etcd_server import etcd_server, needs_etcd
from support.examined import examine, levels, named, only
from support.papers import TOKEN, Papers, papers, variables
from support.running import (
    FreshProcess,
    eventually,
    lighthouse_process,
    line_to,
    refusing,
    silent,
    steady_address,
)

from torchft_svc.coordination import LighthouseServer
from torchft_svc.doctor.findings import CHECK_DEADLINE_S, Level
from torchft_svc.rpc.security import Security
from torchft_svc.version import VERSION

OTHER_TOKEN = "another-token-of-somebody"  # noqa: S105 - of these tests
LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
# Two rounds of checks, and what a busy machine adds.
LONGEST_S = 2 * CHECK_DEADLINE_S + 3.0


@pytest.fixture
def address() -> Iterator[str]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as server:
        yield server.address().removeprefix("http://")


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return papers(tmp_path_factory.mktemp("papers"))


def test_a_lighthouse_that_fits_has_no_finding_to_act_on(address: str) -> None:
    found = examine(TORCHFT_LIGHTHOUSE=address, REPLICA_GROUP_ID="a", TORCHFT_JOB_ID="job")
    for check in ("port", "leader", "token", "tls", "clock", "job", "group"):
        assert levels(found, check) == [Level.OK], named(found, check)
    assert "job is new to the lighthouse" in only(found, "job").found


def test_a_port_where_nobody_listens() -> None:
    with refusing() as address:
        found = examine(TORCHFT_LIGHTHOUSE=address)
    assert only(found, "port").level is Level.PROBLEM
    assert only(found, "port").found == f"{address} cannot be reached: Connection refused"
    assert only(found, "leader").level is Level.PROBLEM
    assert only(found, "token").level is Level.UNCHECKED


def test_a_service_that_never_answers_costs_no_more_than_the_deadline() -> None:
    began_at = time.monotonic()
    with silent() as address:
        found = examine(TORCHFT_LIGHTHOUSE=address)
    assert time.monotonic() - began_at < LONGEST_S
    assert only(found, "lighthouse").level is Level.PROBLEM
    assert "does not answer" in only(found, "lighthouse").found


def test_a_service_that_is_no_lighthouse() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        found = examine(TORCHFT_LIGHTHOUSE=address)
        listener.shutdown(socket.SHUT_RDWR)
        answering.join()
    assert only(found, "leader").level is Level.PROBLEM
    assert only(found, "lighthouse").level is Level.PROBLEM


def test_a_lighthouse_of_another_version(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_svc.doctor.lighthouse.VERSION", "0.0.1")
    found = only(examine(TORCHFT_LIGHTHOUSE=address), "lighthouse")
    assert found.level is Level.WARNING
    assert found.found == f"{address} has version {VERSION}, this is 0.0.1"


def test_a_service_without_the_calls_of_this_version() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        found = examine(TORCHFT_LIGHTHOUSE=address)
    finally:
        server.stop(None)
    assert only(found, "lighthouse").level is Level.WARNING
    assert "does not report its settings" in only(found, "lighthouse").found


def test_a_name_that_does_not_resolve() -> None:
    found = examine(TORCHFT_LIGHTHOUSE="no-such-host.invalid:29510")
    assert only(found, "name").level is Level.PROBLEM
    assert "no-such-host.invalid cannot be resolved" in only(found, "name").found


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    true_lookup = socket.getaddrinfo

    def lookup(host: str, *args: object, **kwargs: object) -> object:
        if host == "slow.example":
            over.wait(60)
            raise socket.gaierror("too late")
        return true_lookup(host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    began_at = time.monotonic()
    found = examine(TORCHFT_LIGHTHOUSE="slow.example:1")
    took_s = time.monotonic() - began_at
    over.set()
    assert took_s < LONGEST_S
    assert only(found, "reported host").level is Level.UNCHECKED
    assert only(found, "name").level is Level.PROBLEM
    assert "the name server does not answer" in only(found, "name").found


def test_the_token() -> None:
    with LighthouseServer("127.0.0.1:0", 1, security=Security(token=TOKEN)) as server:
        address = server.address().removeprefix("http://")
        right = examine(TORCHFT_LIGHTHOUSE=address, TORCHFT_TOKEN=TOKEN)
        missing = examine(TORCHFT_LIGHTHOUSE=address)
        wrong = examine(TORCHFT_LIGHTHOUSE=address, TORCHFT_TOKEN=OTHER_TOKEN)
    assert only(right, "token").found == "the lighthouse accepts it, and nobody without it"
    assert only(right, "tls").level is Level.WARNING, "a token without TLS can be read"
    assert only(missing, "token").level is Level.PROBLEM
    assert "this service requires a token" in only(missing, "token").found
    assert only(wrong, "token").level is Level.PROBLEM
    assert "the token differs from that of this service" in only(wrong, "token").found
    for found in (missing, wrong):
        assert only(found, "leader").level is Level.PROBLEM
        assert TOKEN not in repr(found)


def test_a_token_that_the_lighthouse_does_not_ask_for(address: str) -> None:
    found = examine(TORCHFT_LIGHTHOUSE=address, TORCHFT_TOKEN=TOKEN)
    assert only(found, "token").level is Level.WARNING
    assert "answers without one" in only(found, "token").found


def test_tls(some: Papers) -> None:
    with LighthouseServer("127.0.0.1:0", 1, security=some.local) as server:
        where = {"TORCHFT_LIGHTHOUSE": server.address().removeprefix("http://")}
        both = examine(**where, **variables(some.local))
        plain = examine(**where)
        stranger = examine(**where, **variables(some.theirs.issue("127.0.0.1")))
    assert only(both, "tls").level is Level.OK
    assert "both sides trust each other" in only(both, "tls").found
    assert only(both, "own certificate").level is Level.OK
    assert only(plain, "leader").level is Level.PROBLEM
    assert "it may require TLS" in only(plain, "lighthouse").found
    assert only(stranger, "tls").level is Level.PROBLEM
    assert "is not signed by a CA that is trusted here" in only(stranger, "tls").found


def test_a_lighthouse_without_tls(address: str, some: Papers) -> None:
    found = examine(TORCHFT_LIGHTHOUSE=address, **variables(some.local))
    assert only(found, "tls").level is Level.PROBLEM
    assert "does not use TLS, but TLS is set here" in only(found, "tls").found


def test_certificates_that_end_soon_or_are_for_another_host(some: Papers) -> None:
    soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=3)
    ending = some.ours.issue("127.0.0.1", not_after=soon)
    with LighthouseServer("127.0.0.1:0", 1, security=ending) as server:
        where = {"TORCHFT_LIGHTHOUSE": server.address().removeprefix("http://")}
        found = examine(**where, **variables(ending))
        elsewhere = examine(**where, **variables(some.ours.issue("node9.example")))
        no_own = examine(**where, TORCHFT_TLS_CA=some.ours.ca_file)
    assert only(found, "tls").level is Level.WARNING
    assert only(found, "own certificate").level is Level.WARNING
    assert only(elsewhere, "own certificate").level is Level.PROBLEM
    assert "other groups refuse it under 127.0.0.1" in only(elsewhere, "own certificate").found
    assert (
        "a server needs TORCHFT_TLS_CERT and TORCHFT_TLS_KEY"
        in only(no_own, "own certificate").found
    )


@pytest.mark.parametrize(("ahead_s", "shown"), [(3600, "behind"), (-60, "ahead of")])
def test_a_clock_that_is_off(
    address: str, ahead_s: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer = "torchft_svc.lighthouse_server.servicer.time"

    class Shifted:
        time = staticmethod(lambda: time.time() + ahead_s)

    monkeypatch.setattr(servicer, Shifted)
    clock = only(examine(TORCHFT_LIGHTHOUSE=address), "clock")
    assert clock.level is Level.WARNING
    found = re.match(r"this clock is ([\d.]+) s", clock.found)
    assert found, clock
    assert abs(float(found[1]) - abs(ahead_s)) < 1
    assert shown in clock.found


@pytest.mark.processes
@pytest.mark.skipif(LIBRARY is None, reason="needs libfaketime (Debian: apt-get install faketime)")
def test_the_clock_of_another_machine() -> None:
    shifted = {"LD_PRELOAD": str(LIBRARY), "FAKETIME": "+2h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    with FreshProcess("lighthouse_server", "--bind=127.0.0.1:0", **shifted) as process:
        clock = only(examine(TORCHFT_LIGHTHOUSE=process.address), "clock")
    assert clock.level is Level.WARNING
    assert "this clock is 7" in clock.found
    assert f"behind that of {process.address}" in clock.found


def test_the_job_and_the_group_that_are_there_already(address: str) -> None:
    with line_to(address) as line:
        line.quorum("a:1", step=7, job="nightly").result()
        there = examine(TORCHFT_LIGHTHOUSE=address, TORCHFT_JOB_ID="nightly", REPLICA_GROUP_ID="a")
        alike = examine(TORCHFT_LIGHTHOUSE=address, TORCHFT_JOB_ID="nigthly")
    assert only(there, "job").found == "nightly: 1 groups, committed step 7"
    assert only(there, "group").level is Level.WARNING
    assert "a:1 lives" in only(there, "group").found
    assert only(alike, "job").level is Level.WARNING
    assert only(alike, "job").advice == "set TORCHFT_JOB_ID=nightly if that is meant"
    assert only(alike, "group").level is Level.WARNING, "it has no name"


def test_a_job_whose_groups_have_ended(address: str) -> None:
    with line_to(address) as line:
        line.quorum("a:1", step=7, job="nightly").result()
        line.leave("a:1", job="nightly")
        ended = examine(TORCHFT_LIGHTHOUSE=address, TORCHFT_JOB_ID="nightly", REPLICA_GROUP_ID="a")
    assert only(ended, "job").level is Level.OK
    assert only(ended, "job").found.startswith("nightly: its last group is gone for ")
    assert only(ended, "group").level is Level.OK


@pytest.mark.parametrize("job", ["x" * 300, "a\tb", "jöb"])
def test_a_job_name_that_cannot_travel(address: str, job: str) -> None:
    found = examine(TORCHFT_LIGHTHOUSE=address, TORCHFT_JOB_ID=job)
    assert only(found, "job").level is Level.PROBLEM
    assert "TORCHFT_JOB_ID" in only(found, "job").found
    assert only(found, "leader").level is Level.OK, "the lighthouse is checked nevertheless"
    assert not named(found, "lighthouse")


def test_a_list_without_an_election(address: str) -> None:
    with LighthouseServer("127.0.0.1:0", 1) as other, refusing() as closed:
        second = other.address().removeprefix("http://")
        found = examine(TORCHFT_LIGHTHOUSE=f"{closed},{address},{second}")
    assert levels(found, "port") == [Level.PROBLEM, Level.OK, Level.OK]
    assert only(found, "leader").level is Level.OK
    assert only(found, "leader").found.startswith(f"{address} answers; {second} answer, too")


@pytest.mark.processes
@needs_etcd
def test_the_elected_lighthouse_of_a_list(address: str, tmp_path: Path) -> None:
    lone = address
    with etcd_server(tmp_path) as etcd:
        elect = f"--leader-election=etcd://{etcd.address}/torchft"
        where = steady_address()
        with lighthouse_process(elect, bind=where) as first:
            alone = {"TORCHFT_LIGHTHOUSE": first.address}
            eventually(lambda: levels(examine(**alone), "leader") == [Level.OK])
            with lighthouse_process(elect) as second:
                both = examine(TORCHFT_LIGHTHOUSE=f"{second.address},{first.address}")
                leader = only(both, "leader")
                assert leader.level is Level.OK
                assert leader.found == (
                    f"{first.address} leads by election; {second.address} would replace it"
                )
                other = only(examine(TORCHFT_LIGHTHOUSE=second.address), "leader")
                assert other.level is Level.PROBLEM
                assert f"the leader is {first.address}, which is not in the list" in other.found
                mixed = only(examine(TORCHFT_LIGHTHOUSE=f"{second.address},{lone}"), "leader")
                assert mixed.level is Level.WARNING
                assert f"{lone} answers without an election, and {second.address}" in mixed.found
