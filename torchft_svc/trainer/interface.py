"""Finds the network interface over which the other workers reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from torchft_svc import env

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_REQUEST = struct.Struct("256s")
_ADDRESS = slice(20, 24)  # in the answer


def use_interface_of(host: str) -> None:
    """Make gloo use the interface with the IPv4 address ``host``, unless the user has chosen one.

    By itself it asks for the address of the host's name, which many systems answer with 127.0.0.1:
    workers on two machines then never meet.
    """
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        return
    name = None if address.is_loopback else interface_of(address)
    if name is not None:
        env.set_default("GLOO_SOCKET_IFNAME", name)


def interface_of(address: ipaddress.IPv4Address) -> str | None:
    """The interface whose first address this is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _GET_ADDRESS, _REQUEST.pack(name.encode()))
            except OSError:  # it has none
                continue
            if answer[_ADDRESS] == address.packed:
                return name
    return None
