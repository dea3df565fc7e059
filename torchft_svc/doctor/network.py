"""Checks what a group reports to the other groups, and over which network they reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.doctor.findings import (
    Diagnosis,
    Running,
    found_nothing,
    found_ok,
    found_problem,
    found_warning,
)
from torchft_svc.doctor.link_rate import CONNECT_S, LinkError, LinkRate, measure_link, reason_of
from torchft_svc.env import INTERFACE_VARIABLE, Environment
from torchft_svc.errors import AddressError, ConfigError
from torchft_svc.host.address import HostPort, advertised_host, parse_address
from torchft_svc.host.interfaces import Interface, chosen_host, interface_of, list_interfaces
from torchft_svc.host.quantities import show_rate
from torchft_svc.rpc.security import Security

# Of a job with a thousand groups, the first ones show whether they can be reached.
MAX_PEERS = 8
# Another interface is worth a line if it is so many times as fast.
_FASTER = 2.0
# A link that reaches less of its interface's speed is not what it seems.
_SLOW_SHARE = 0.2
# Renewing certificates takes people a while.
CERTIFICATE_WARNING_S = 14 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedHost:
    """The host that a group reports to the other groups, and the setting that it comes from."""

    host: str
    source: str

    @property
    def interface(self) -> Interface | None:
        """The interface that has this address, if it is an address of this machine."""
        return interface_of(self.host)


def reported_host(environment: Environment, lighthouses: Sequence[str]) -> ReportedHost:
    """Return what a trainer in this environment reports, as its manager and store do.

    Raises:
        ConfigError: the interface that was chosen is not there, or has no address.
    """
    chosen = chosen_host(environment)
    if chosen is not None:
        return ReportedHost(host=chosen, source=f"{INTERFACE_VARIABLE}={environment.interface}")
    host = advertised_host(*map(parse_address, lighthouses))
    return ReportedHost(host=host, source="the route to the lighthouse")


def check_reported(reported: ReportedHost, lighthouses: Sequence[str]) -> Iterator[Diagnosis]:
    """Check that other machines can use the host, and that no faster interface is left unused."""
    host, interface = reported.host, reported.interface
    shown = f"{host} ({reported.source})"
    if interface is not None:
        shown = f"{host} on {interface.name}{_speed(interface)} ({reported.source})"
    loopback = _is_loopback(host)
    if loopback and not all(_is_loopback(parse_address(each).host) for each in lighthouses):
        yield found_problem(
            "reported host",
            f"{shown}: no other machine reaches that",
            f"set {INTERFACE_VARIABLE} to an interface that the other groups reach",
        )
        return
    if interface is None and not loopback and not _is_local(host):
        yield found_warning(
            "reported host",
            f"{shown}: it is no address of this machine",
            f"fine behind address translation; otherwise set {INTERFACE_VARIABLE}",
        )
        return
    if interface is not None and not interface.is_up:
        yield found_problem(
            "reported host", f"{shown}: the interface is down", f"ip link set {interface.name} up"
        )
        return
    yield found_ok("reported host", shown + (", for groups on this machine only" * loopback))
    if interface is not None and not loopback:
        yield from _faster_ones(interface)


def _faster_ones(used: Interface) -> Iterator[Diagnosis]:
    faster = [
        each
        for each in list_interfaces()
        if each.is_up
        and each.addresses
        and not each.is_loopback
        and each.name != used.name
        and (each.speed_bps or 0.0) >= _FASTER * (used.speed_bps or float("inf"))
    ]
    if faster:
        best = max(faster, key=lambda each: each.speed_bps or 0.0)
        yield found_warning(
            "interface",
            f"{used.name} has {_speed(used).strip()}, {best.name} has {_speed(best).strip()}: "
            f"heals run over {used.name}",
            f"if all groups reach {best.addresses[0]}, set {INTERFACE_VARIABLE}={best.name}",
        )


def _speed(interface: Interface) -> str:
    if interface.speed_bps is None:
        return ""
    bits = interface.speed_bps / 1e6
    return f" {bits / 1000:g} Gbit/s" if bits >= 1000 else f" {bits:g} Mbit/s"


def check_certificate(security: Security, host: str) -> Iterator[Diagnosis]:
    """Check that other groups would accept this group's certificate under the host it reports.

    Both ends of the handshake are in this process: what counts are the files.
    """
    try:
        server, client = security.server_context(), security.client_context()
    except ConfigError as error:
        yield found_problem("own certificate", str(error), "a trainer is a server, too: set both")
        return
    if server is None or client is None:
        return
    try:
        ends = _own_handshake(server, client, host)
    except ssl.SSLCertVerificationError as error:
        yield found_problem(
            "own certificate",
            f"other groups refuse it under {host}: {error.verify_message}",
            f"it needs {host} among its subject alternative names (SAN), and a CA that all trust",
        )
        return
    except ssl.SSLError as error:
        yield found_problem("own certificate", f"it cannot be used: {error}", "check the TLS files")
        return
    left_s = ends - time.time()
    found = f"other groups accept it under {host}; it ends in {left_s / 86_400:.0f} days"
    if left_s < CERTIFICATE_WARNING_S:
        yield found_warning(
            "own certificate", found, "renew it, and restart the trainers one by one"
        )
    else:
        yield found_ok("own certificate", found)


def _own_handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> float:
    """Return when the certificate ends; raise what a client would."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(10):  # messages of a handshake
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    not_after = (ends[0].getpeercert() or {}).get("notAfter")
    assert isinstance(not_after, str), "the client has checked it"
    return ssl.cert_time_to_seconds(not_after)


def check_services(environment: Environment, reported: ReportedHost) -> Iterator[Diagnosis]:
    """Check the hosts and ports of the group's own store, manager and checkpoint server."""
    store, port = environment.master_address, environment.master_port
    if store is not None:
        yield from _check_store(environment, store, port, reported)
    if environment.checkpoint_host is not None:
        yield from _check_name("TORCHFT_CHECKPOINT_HOST", environment.checkpoint_host, reported)
    manager = environment.manager_address
    if manager is not None:
        try:
            where = parse_address(manager)
            Running("manager", _local_end, where).wait(CONNECT_S)
        except (AddressError, OSError) as error:
            yield found_problem(
                "manager",
                f"TORCHFT_MANAGER_ADDR={manager}: {reason_of(error)}",
                "start torchft-manager there, or remove it: rank 0 starts one itself",
            )
        else:
            yield found_ok("manager", f"TORCHFT_MANAGER_ADDR={manager} is reached")
    elif environment.manager_port and environment.group_rank in (None, 0):
        yield from _check_free("TORCHFT_MANAGER_PORT", environment.manager_port)


def _check_store(
    environment: Environment, host: str, port: int | None, reported: ReportedHost
) -> Iterator[Diagnosis]:
    if port is None:
        yield found_problem(
            "store", f"MASTER_ADDR={host}, but MASTER_PORT is not set", "set both, or neither"
        )
        return
    yield from _check_name("MASTER_ADDR", host, reported)
    if environment.uses_agent_store or environment.group_rank:
        try:
            Running("store", _local_end, HostPort(host, port)).wait(CONNECT_S)
        except OSError as error:
            yield found_warning(
                "store",
                f"MASTER_ADDR={host}, MASTER_PORT={port}: {reason_of(error)}",
                "fine before the launcher or rank 0 has started; otherwise correct it",
            )
    else:
        yield from _check_free("MASTER_PORT", port)


def _check_name(variable: str, host: str, reported: ReportedHost) -> Iterator[Diagnosis]:
    """Check that other groups can use a host that replaces the one which is reported."""
    try:
        found = Running(host, socket.getaddrinfo, host, None).wait(CONNECT_S)
    except OSError as error:
        yield found_problem("store", f"{variable}={host}: {reason_of(error)}", "correct the name")
        return
    address = str(found[0][4][0])
    if _is_loopback(address) and not _is_loopback(reported.host):
        yield found_problem(
            "store",
            f"{variable}={host} is {address}: groups on other machines cannot connect",
            f"set it to a name of this machine, such as {reported.host}",
        )


def _check_free(variable: str, port: int) -> Iterator[Diagnosis]:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        yield found_problem(
            "ports",
            f"{variable}={port} cannot be used: {reason_of(error)}",
            "end what uses it, or choose another port",
        )
    else:
        yield found_ok("ports", f"{variable}={port} is free")


def check_peers(
    job: JobStatus | None, group: str | None, reported: ReportedHost
) -> Iterator[Diagnosis]:
    """Check that the managers of the other groups are reached, and from which address."""
    others = [
        each.address
        for each in (job.groups if job else ())
        if each.address and stable_name(each.replica_id) != group
    ]
    if not others:
        yield found_nothing("other groups", "none is known to the lighthouse yet")
        return
    asked = others[:MAX_PEERS]
    failures, running = [], []
    for text in asked:
        try:
            address = parse_address(text)
        except AddressError as error:
            failures.append(str(error))
        else:
            running.append((address, Running(text, _local_end, address)))
    local_ends = set()
    deadline = time.monotonic() + 1.5 * CONNECT_S
    for address, thread in running:
        try:
            local_ends.add(thread.wait(deadline - time.monotonic()))
        except OSError as error:
            failures.append(f"{address}: {reason_of(error)}")
    if failures:
        level = found_problem if len(failures) == len(asked) else found_warning
        yield level(
            "other groups",
            f"{len(failures)} of {len(asked)} cannot be reached: {'; '.join(failures[:3])}",
            "open the ports between the machines of all groups, or correct the hosts they report",
        )
        return
    elsewhere = sorted(local_ends - {reported.host})
    is_ip = _is_ip(reported.host)
    if elsewhere and is_ip and not _is_loopback(elsewhere[0]):
        yield found_warning(
            "other groups",
            f"this machine reaches them from {', '.join(elsewhere)}, but reports {reported.host}",
            f"set {INTERFACE_VARIABLE} to the interface with {elsewhere[0]}, if all reach it",
        )
        return
    count = f"{len(asked)} of {len(others)}" if len(others) > len(asked) else f"{len(others)}"
    yield found_ok("other groups", f"{count} reached, from {', '.join(sorted(local_ends))}")


def _local_end(where: HostPort) -> str:
    with socket.create_connection((where.host, where.port), timeout=CONNECT_S) as connection:
        local: str = connection.getsockname()[0]
        return local


def check_link(
    peer: HostPort, reported: ReportedHost, security: Security, measured: list[LinkRate]
) -> Iterator[Diagnosis]:
    """Measure the link to another doctor, and append the result to ``measured``."""
    try:
        link = measure_link(peer, reported.host, security)
    except LinkError as error:
        yield found_problem(
            "link", str(error), "start `lighthouse doctor --serve` there, with the same token"
        )
        return
    measured.append(link)
    if link.to_peer is None:
        yield found_problem(
            "link",
            f"{link.why_not}; from the peer {show_rate(link.from_peer)}",
            f"other groups cannot heal from this one: set {INTERFACE_VARIABLE}, or open the ports",
        )
        return
    shown = (
        f"{reported.host} to {peer} {show_rate(link.to_peer)}, back {show_rate(link.from_peer)}, "
        f"round trip {1000 * link.round_trip_s:.1f} ms"
    )
    interface = reported.interface
    if (
        interface is not None
        and interface.speed_bps is not None
        and 8 * link.slower < _SLOW_SHARE * interface.speed_bps
    ):
        yield found_warning(
            "link",
            f"{shown}: far below the {_speed(interface).strip()} of {interface.name}",
            "look for another network between the two, or for other traffic",
        )
        return
    yield found_ok("link", shown)


def check_no_peer(reported: ReportedHost) -> Iterator[Diagnosis]:
    """Report what is known of the link without a measurement."""
    interface = reported.interface
    known = (
        f"not measured; the driver of {interface.name} reports{_speed(interface)}"
        if interface is not None and interface.speed_bps is not None
        else "not measured"
    )
    advice = "run `lighthouse doctor --serve` on the machine of another group, and use --peer here"
    yield found_nothing("link", known, advice)


def check_backends(environment: Environment, reported: ReportedHost) -> Iterator[Diagnosis]:
    """Check the variables that gloo and NCCL read against what the group reports."""
    interface = reported.interface
    yield from _check_gloo(environment, reported, interface)
    chosen = environment.other("NCCL_SOCKET_IFNAME")
    if chosen is not None and interface is not None and not _nccl_uses(chosen, interface.name):
        yield found_warning(
            "nccl",
            f"NCCL_SOCKET_IFNAME={chosen}, but this group reports {reported.host} on "
            f"{interface.name}",
            f"use one network for both, or check that all groups reach {reported.host}",
        )
    elif chosen is not None:
        yield found_ok("nccl", f"NCCL_SOCKET_IFNAME={chosen}")
    for old in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"):
        if environment.other(old) is not None:
            yield found_warning(
                "nccl",
                f"{old}={environment.other(old)} has another name in this torch",
                f"set TORCH_{old} instead, or remove it",
            )
    if environment.other("TORCH_NCCL_BLOCKING_WAIT") == "1":
        yield found_warning(
            "nccl",
            "TORCH_NCCL_BLOCKING_WAIT=1 makes all waits of your program's own groups block the CPU",
            "remove it: ProcessGroupNCCL sets it by itself, for the moment it needs it",
        )


def _nccl_uses(setting: str, name: str) -> bool:
    """Whether NCCL's list of interfaces allows one: prefixes, ``=`` exact names, ``^`` all but."""
    excludes = setting.startswith("^")
    exact = setting.lstrip("^").startswith("=")
    words = [word.strip() for word in setting.lstrip("^=").split(",") if word.strip()]
    named = any(name == word if exact else name.startswith(word) for word in words)
    return named != excludes


def _check_gloo(
    environment: Environment, reported: ReportedHost, interface: Interface | None
) -> Iterator[Diagnosis]:
    chosen = environment.other("GLOO_SOCKET_IFNAME")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        there = {each.name for each in list_interfaces()}
        missing = [name for name in names if name not in there]
        if missing:
            yield found_problem(
                "gloo",
                f"GLOO_SOCKET_IFNAME={chosen}: there is no interface {', '.join(missing)}",
                f"use one of {', '.join(sorted(there))}",
            )
        elif interface is not None and interface.name not in names:
            yield found_warning(
                "gloo",
                f"GLOO_SOCKET_IFNAME={chosen}, but this group reports {reported.host} on "
                f"{interface.name}",
                f"use one network for both: {INTERFACE_VARIABLE}={names[0]}",
            )
        else:
            yield found_ok("gloo", f"GLOO_SOCKET_IFNAME={chosen}")
        return
    name = socket.gethostname()
    try:
        own = Running(name, socket.gethostbyname, name).wait(CONNECT_S)
    except OSError:
        yield found_warning(
            "gloo",
            f"the name of this machine, {name}, cannot be resolved, so gloo "
            "uses the loopback interface",
            "set GLOO_SOCKET_IFNAME, or add the name to the name server",
        )
        return
    if _is_loopback(own) and not _is_loopback(reported.host):
        yield found_problem(
            "gloo",
            f"without GLOO_SOCKET_IFNAME gloo uses the address of the name of this machine, {own}: "
            "groups on other machines cannot connect",
            f"set GLOO_SOCKET_IFNAME={interface.name if interface else 'the interface to use'}",
        )
    elif own != reported.host and _is_ip(reported.host) and not _is_loopback(reported.host):
        yield found_warning(
            "gloo",
            f"gloo uses {own}, the address of {name}, but this group reports {reported.host}",
            f"set GLOO_SOCKET_IFNAME={interface.name if interface else 'the interface to use'}",
        )
    else:
        yield found_ok("gloo", f"uses {own}, the address of {name}")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def _is_local(host: str) -> bool:
    """Whether this machine can listen at ``host``."""
    with contextlib.suppress(OSError):
        family, kind, proto, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(where)
            return True
    return False
