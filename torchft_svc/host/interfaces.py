"""The network interfaces of this machine: their addresses, state and speed."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchft_svc.env import INTERFACE_VARIABLE, Environment
from torchft_svc.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_DEVICES = Path("/sys/class/net")
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_REQUEST = struct.Struct("256s")
_ADDRESS = slice(20, 24)  # in the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface; ``addresses``: what others may reach it at, the IPv4 address first.

    ``speed_bps``: bits per second as its driver reports them (None: it does not).
    """

    name: str
    addresses: tuple[Address, ...]
    is_up: bool
    speed_bps: float | None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return any(address.is_loopback for address in self.addresses)


def list_interfaces() -> list[Interface]:
    """Return the interfaces of this network namespace, in the system's order."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return [
            Interface(
                name=name,
                addresses=(*_ipv4_addresses(asking, name), *_ipv6_addresses(name)),
                # Loopback and tunnels report "unknown" although they work.
                is_up=_read(name, "operstate") not in ("down", "lowerlayerdown", "notpresent"),
                speed_bps=_speed_bps(name),
            )
            for _, name in socket.if_nameindex()
        ]


def interface_of(address: str) -> Interface | None:
    """Return the interface that has this IP address; None: no interface, or no IP address."""
    with contextlib.suppress(ValueError):
        wanted = ipaddress.ip_address(address)
        for interface in list_interfaces():
            if wanted in interface.addresses:
                return interface
    return None


def address_of(name: str) -> str:
    """Return the address of the interface ``name``: its IPv4 address, else a global IPv6 one.

    Raises:
        ConfigError: there is no such interface, or it has no address; names those that have one.
    """
    interfaces = {each.name: each for each in list_interfaces()}
    usable = ", ".join(key for key, each in interfaces.items() if each.addresses) or "none"
    if name not in interfaces:
        reason = f"this machine has no such network interface; those with an address: {usable}"
        raise ConfigError(INTERFACE_VARIABLE, name, reason)
    if not interfaces[name].addresses:
        reason = f"this network interface has no address; those with one: {usable}"
        raise ConfigError(INTERFACE_VARIABLE, name, reason)
    return str(interfaces[name].addresses[0])


def chosen_host(environment: Environment) -> str | None:
    """Return the address of the interface that ``TORCHFT_INTERFACE`` names; None: it is not set.

    Raises:
        ConfigError: see `address_of`.
    """
    return None if environment.interface is None else address_of(environment.interface)


def _ipv4_addresses(asking: socket.socket, name: str) -> Iterator[Address]:
    """The first IPv4 address of an interface, if it has one."""
    try:
        answer = fcntl.ioctl(asking, _GET_ADDRESS, _REQUEST.pack(name.encode()))
    except OSError:
        return
    yield ipaddress.IPv4Address(answer[_ADDRESS])


def _ipv6_addresses(name: str) -> Iterator[Address]:
    """The IPv6 addresses that others can use without knowing which of their links leads here."""
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, device = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if device == name and not address.is_link_local:
                yield address


def _speed_bps(name: str) -> float | None:
    """A virtual interface has no speed, or -1."""
    try:
        megabits = int(_read(name, "speed"))
    except ValueError:
        return None
    return megabits * 1e6 if megabits > 0 else None


def _read(name: str, attribute: str) -> str:
    try:
        return (_DEVICES / name / attribute).read_text().strip()
    except OSError:  # no such attribute, or the driver has no value now
        return ""
