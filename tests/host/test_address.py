"""Tests how addresses are read, and the sentence for each that cannot be."""

from __future__ import annotations

import socket

import pytest

from torchft_svc.errors import AddressError
from torchft_svc.host.address import (
    HostPort,
    advertised_host,
    listen,
    parse_address,
    reachable_host,
    split_addresses,
)

EXPECTED = "expected host:port, :port or [ipv6]:port, such as lighthouse.example:29510"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host:1", "host", 1),
        ("host.example:29510", "host.example", 29510),
        ("127.0.0.1:65535", "127.0.0.1", 65535),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("http://host:29510", "host", 29510),
        ("http://host:29510/", "host", 29510),
        ("  host:1\n", "host", 1),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == HostPort(host, port)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        (":29510", "", 29510, "[::]:29510"),
        (":0", "", 0, "[::]:0"),
        ("[::]:29510", "::", 29510, "[::]:29510"),
        ("127.0.0.1:0", "127.0.0.1", 0, "127.0.0.1:0"),
        ("0.0.0.0:5", "0.0.0.0", 5, "0.0.0.0:5"),
    ],
)
def test_an_address_to_bind_is_read(text: str, host: str, port: int, target: str) -> None:
    address = parse_address(text, may_bind=True)
    assert (address, address.target) == (HostPort(host, port), target)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", f"has no port; {EXPECTED}"),
        ("host", f"has no port; {EXPECTED}"),
        ("http://host", f"has no port; {EXPECTED}"),
        (":1", f"has no host; {EXPECTED}"),
        ("host:", f"port '' is not a number; {EXPECTED}"),
        ("host:abc", f"port 'abc' is not a number; {EXPECTED}"),
        ("host:-1", f"port '-1' is not a number; {EXPECTED}"),
        ("host:1.5", f"port '1.5' is not a number; {EXPECTED}"),
        ("host:²", f"port '²' is not a number; {EXPECTED}"),
        ("host:0", "port 0 is outside 1 to 65535"),
        ("host:65536", "port 65536 is outside 1 to 65535"),
        ("::1:80", f"an IPv6 address needs brackets; {EXPECTED}"),
        ("[nonsense]:80", f"'nonsense' is not an IPv6 address; {EXPECTED}"),
        ("ho st:80", f"'ho st' is not a host name; {EXPECTED}"),
        ("ho\nst:80", f"'ho\\nst' is not a host name; {EXPECTED}"),
        ("user@host:80", f"'user@host' is not a host name; {EXPECTED}"),
        ("http://host/path:80", f"'host/path' is not a host name; {EXPECTED}"),
        ("x" * 260 + ":80", f"'{'x' * 64}' is not a host name; {EXPECTED}"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_why(text: str, reason: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert str(caught.value) == f"address {text!r}: {reason}"


@pytest.mark.parametrize("text", [":65536", ":-1", "[::1]", "::1:0"])
def test_what_cannot_be_bound_is_refused_too(text: str) -> None:
    with pytest.raises(AddressError):
        parse_address(text, may_bind=True)


@pytest.mark.parametrize("text", ["9" * 1_000_000, "host:" + "9" * 5000, "x:" * 500_000])
def test_a_monstrous_address_is_not_repeated_in_full(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_to_a_peer_on_this_machine_the_loopback_is_advertised(host: str) -> None:
    assert advertised_host(HostPort(host, 29510)) == "127.0.0.1"


def test_without_a_route_the_hosts_name_is_advertised() -> None:
    assert advertised_host(HostPort("nowhere.invalid", 29510)) == socket.gethostname()


@pytest.mark.parametrize("host", ["", "::", "0.0.0.0"])
def test_every_interface_is_reached_by_the_hosts_name(host: str) -> None:
    assert reachable_host(HostPort(host, 1)) == socket.gethostname()
    assert reachable_host(HostPort("10.0.0.1", 1)) == "10.0.0.1"


def test_a_list_is_split_as_it_was_written() -> None:
    assert split_addresses("host:1") == ("host:1",)
    assert split_addresses(" http://a:1, [::1]:2 ") == ("http://a:1", "[::1]:2")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a:1,", "has no port"),
        ("a:1,,b:1", "has no port"),
        ("a:1;b:1", "an IPv6 address needs brackets"),
        ("a:1,http://a:1", "names one host and port twice"),
        (",".join(f"a:{port}" for port in range(1, 18)), "names more than 16 hosts"),
    ],
)
def test_a_list_that_cannot_be_meant(text: str, reason: str) -> None:
    with pytest.raises(AddressError, match=reason):
        split_addresses(text)


def test_the_advertised_host_is_that_of_the_first_lighthouse_with_a_route() -> None:
    nowhere, here = HostPort("no-such-host.invalid", 1), HostPort("127.0.0.1", 1)
    assert advertised_host(nowhere, here) == "127.0.0.1"
    assert advertised_host(nowhere) == socket.gethostname()


@pytest.mark.parametrize("host", ["", "127.0.0.1", "localhost"])
def test_a_listener_is_reached_where_it_was_asked_to_listen(host: str) -> None:
    with listen(HostPort(host, 0), 1) as listener:
        port = listener.getsockname()[1]
        socket.create_connection((host or "127.0.0.1", port), 5.0).close()
        with pytest.raises(
            AddressError, match=f"'{host}:{port}': cannot be bound: Address already"
        ):
            listen(HostPort(host, port), 1)


@pytest.mark.parametrize(
    ("bind", "reason"),
    [
        (HostPort("192.0.2.1", 0), "Cannot assign requested address"),
        (HostPort("", 70_000), "port must be 0-65535"),
    ],
)
def test_an_address_at_which_nothing_can_listen(bind: HostPort, reason: str) -> None:
    with pytest.raises(AddressError, match=f"cannot be bound: .*{reason}"):
        listen(bind, 1)
