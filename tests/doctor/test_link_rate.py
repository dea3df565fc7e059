"""Tests how two doctors measure the link between them, and what they refuse."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.examined import examine, only
from support.hosts import Host, network
from support.papers import TOKEN, Papers, papers
from support.running import environment, eventually, refusing, silent

from torchft_svc.doctor import link_rate
from torchft_svc.doctor.examination import DoctorOptions
from torchft_svc.doctor.findings import Level
from torchft_svc.doctor.link_rate import CONNECT_S, LinkError, measure_link, serving
from torchft_svc.errors import AddressError
from torchft_svc.host.address import HostPort, parse_address
from torchft_svc.rpc.security import PLAIN, Security

HERE = HostPort("127.0.0.1", 0)
# What a measurement may take beside its connections: a busy machine sends late.
LONGEST_S = 2 * CONNECT_S + 4.0


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rate, "MEASURE_S", 0.2)


@contextlib.contextmanager
def serve(security: Security = PLAIN) -> Iterator[tuple[HostPort, list[str]]]:
    """The address of a doctor that serves, and what it reports."""
    lines: list[str] = []
    with serving(HERE, security, lines.append) as server:
        yield server.address, lines


def test_both_directions_are_measured() -> None:
    with serve() as (peer, lines):
        link = measure_link(peer, "127.0.0.1", PLAIN)
        again = measure_link(peer, "127.0.0.1", PLAIN)
    for each in (link, again):
        assert each.to_peer is not None
        assert each.to_peer > 10e6, "a loopback link"
        assert each.from_peer > 10e6
        assert each.slower == min(each.to_peer, each.from_peer)
        assert 0 < each.round_trip_s < 1
    eventually(lambda: len(lines) == 2)
    assert "-> here" in lines[0]


def test_an_advertised_address_that_the_peer_cannot_reach() -> None:
    began_at = time.monotonic()
    with serve() as (peer, lines):
        link = measure_link(peer, "192.0.2.99", PLAIN)
    assert time.monotonic() - began_at < LONGEST_S
    assert link.to_peer is None
    assert link.why_not.startswith("192.0.2.99:")
    assert "cannot be reached from the peer" in link.why_not
    assert link.from_peer > 10e6
    eventually(lambda: any("cannot be reached" in line for line in lines))


def test_the_token_is_asked_for() -> None:
    right, wrong = Security(token=TOKEN), Security(token=TOKEN[::-1])
    with serve(right) as (peer, lines):
        assert measure_link(peer, "127.0.0.1", right).to_peer is not None
        with pytest.raises(LinkError, match="refuses: the token differs from that of"):
            measure_link(peer, "127.0.0.1", wrong)
        with pytest.raises(LinkError, match="refuses: this service requires a token"):
            measure_link(peer, "127.0.0.1", PLAIN)
    assert not any(TOKEN in line for line in lines)


def test_tls_protects_both_connections(some: Papers) -> None:
    with serve(some.local) as (peer, _):
        link = measure_link(peer, "127.0.0.1", some.local)
        assert link.to_peer is not None
        assert link.to_peer > 1e6
        elsewhere = replace(some.ours.issue("node9.example"), token=None)
        refused = measure_link(peer, "127.0.0.1", elsewhere)
        assert refused.to_peer is None
        assert "its certificate is not trusted here" in refused.why_not
        with pytest.raises(LinkError):
            measure_link(peer, "127.0.0.1", PLAIN)
        with pytest.raises(LinkError, match="not trusted"):
            measure_link(peer, "127.0.0.1", some.theirs.issue("127.0.0.1"))


def test_who_does_not_serve() -> None:
    with refusing() as closed, pytest.raises(LinkError, match="Connection refused"):
        measure_link(parse_address(closed), "127.0.0.1", PLAIN)
    with pytest.raises(LinkError, match="its host name cannot be resolved"):
        measure_link(HostPort("no-such-host.invalid", 1), "127.0.0.1", PLAIN)


def test_who_never_answers_costs_no_more_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_rate, "MAX_SERVED_S", 1.0)
    began_at = time.monotonic()
    with silent() as address, pytest.raises(LinkError, match="no answer within"):
        measure_link(parse_address(address), "127.0.0.1", PLAIN)
    assert time.monotonic() - began_at < LONGEST_S


@pytest.mark.parametrize(
    "sent",
    [b"", b"\n", b"{}\n", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\xff\xfe\n", b"x" * 5000,
     b'{"torchft-doctor": 7}\n', b'{"torchft-doctor": "n"}\n',
     b'{"torchft-doctor": "n", "host": "127.0.0.1", "port": "no"}\n',
     b'{"torchft-doctor": "n", "host": "127.0.0.1", "port": 99999999}\n'],
)  # fmt: skip
def test_garbage_disturbs_nobody(sent: bytes) -> None:
    with serve() as (peer, lines):
        with socket.create_connection((peer.host, peer.port), timeout=10) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                answer = stranger.recv(1000)
                if answer:
                    json.loads(answer.split(b"\n")[0])
        assert measure_link(peer, "127.0.0.1", PLAIN).to_peer is not None
    assert len(lines) >= 1


def test_one_measurement_at_a_time() -> None:
    refusals: list[str] = []

    def measure() -> None:
        try:
            measure_link(peer, "127.0.0.1", PLAIN)
        except LinkError as error:
            refusals.append(str(error))

    with serve() as (peer, _):
        both = [threading.Thread(target=measure) for _ in range(3)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    assert len(refusals) < 3
    assert all("another measurement is under way" in each for each in refusals)


def test_a_second_measurement_is_refused_until_the_first_has_ended() -> None:
    with (
        serve() as (peer, _),
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection((peer.host, peer.port), timeout=10) as first,
    ):
        listener.settimeout(10)
        back_to = {"host": "127.0.0.1", "port": listener.getsockname()[1]}
        first.sendall(json.dumps({"torchft-doctor": "n", **back_to}).encode() + b"\n")
        back, _ = listener.accept()  # the first one is under way
        with back, pytest.raises(LinkError, match="refuses: another measurement is under way"):
            measure_link(peer, "127.0.0.1", PLAIN)
        while first.recv(1 << 20):
            pass
        assert measure_link(peer, "127.0.0.1", PLAIN).to_peer is not None


def test_a_connection_too_many_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rate, "CONNECT_S", 20.0)  # the others stay open
    with serve() as (peer, _), contextlib.ExitStack() as stack:
        *_, last, one_more = [
            stack.enter_context(socket.create_connection((peer.host, peer.port), timeout=5))
            for _ in range(link_rate.MAX_CONNECTIONS + 1)
        ]
        assert one_more.recv(1) == b""
        last.settimeout(0.1)
        with pytest.raises(TimeoutError):
            last.recv(1)


def test_many_connections_that_say_nothing_end() -> None:
    with serve() as (peer, _), contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((peer.host, peer.port), timeout=10))
            for _ in range(link_rate.MAX_CONNECTIONS + 4)
        ]
        for each in idle:
            each.settimeout(LONGEST_S)
            with contextlib.suppress(ConnectionError):
                assert each.recv(1) == b"", "closed at once, or after a while"
        assert measure_link(peer, "127.0.0.1", PLAIN).to_peer is not None


def test_an_address_that_cannot_be_bound() -> None:
    with (
        refusing() as taken,
        pytest.raises(AddressError, match="cannot be bound"),
        serving(parse_address(taken), PLAIN, print),
    ):
        pass


@contextlib.contextmanager
def serving_on(host: Host) -> Iterator[str]:
    """A doctor as a process on another host."""
    assert host.namespace is not None
    command = [sys.executable, "-m", "torchft_svc.lighthouse_server", "doctor", "--serve"]
    with subprocess.Popen(
        ["ip", "netns", "exec", host.namespace, *command, "--bind", f"{host.address}:0"],  # noqa: S607
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED="1"),
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rpartition(" ")[2].strip()
        finally:
            process.terminate()


@pytest.mark.processes
def test_a_slow_network_card_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rate, "MEASURE_S", 1.0)
    with network(1) as hosts:
        (far,) = hosts.others
        limited = subprocess.run(
            ["ip", "netns", "exec", str(far.namespace), "tc", "qdisc", "add", "dev", far.device,  # noqa: S607
             "root", "tbf", "rate", "80mbit", "burst", "64kb", "latency", "50ms"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if limited.returncode:
            pytest.skip(f"tc cannot limit a rate here: {limited.stderr}")
        with serving_on(far) as peer:
            options = DoctorOptions(peer=parse_address(peer), step_s=1.0, state_bytes=40e9)
            found = examine(
                options,
                TORCHFT_LIGHTHOUSE="127.0.0.1:1",
                TORCHFT_INTERFACE=hosts.here.device,
            )
    link = only(found, "link")
    assert link.level in (Level.OK, Level.WARNING)
    # What the far end sends passes its slow card: 80 Mbit/s are 10 MB/s.
    back = float(link.found.partition(", back ")[2].split(" MB/s")[0])
    assert 5 < back < 12, link.found
