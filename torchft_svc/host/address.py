"""Parses and chooses addresses, and listens at them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import dataclass

from torchft_svc.errors import AddressError

LOOPBACK = "127.0.0.1"
# A host name has at most 255 characters.
_MAX_LENGTH = 300
# A list is tried in turn while training waits.
MAX_ADDRESSES = 16
_EXPECTED = "expected host:port, :port or [ipv6]:port, such as lighthouse.example:29510"


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host name or IP address (``""``: every interface) and a TCP port (0: any free one)."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def target(self) -> str:
        """The address in gRPC's spelling; every interface is ``[::]``, which accepts IPv4 too."""
        return f"[::]:{self.port}" if not self.host else str(self)


def parse_address(text: str, *, may_bind: bool = False) -> HostPort:
    """Parse ``host:port`` (a scheme such as ``http://`` and a trailing slash are taken off).

    ``may_bind``: the address is to listen on, so the host may be empty and the port 0.

    Raises:
        AddressError: the sentence says what is wrong with it.
    """
    host, port_text = _split(text)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ipv6(host):
            raise AddressError(text, f"{host!r} is not an IPv6 address; {_EXPECTED}")
    elif ":" in host:
        raise AddressError(text, f"an IPv6 address needs brackets; {_EXPECTED}")
    if not (port_text.isascii() and port_text.isdigit()):
        raise AddressError(text, f"port {port_text!r} is not a number; {_EXPECTED}")
    port = int(port_text)
    if port > 65535 or (port == 0 and not may_bind):
        raise AddressError(text, f"port {port} is outside {0 if may_bind else 1} to 65535")
    if not host and not may_bind:
        raise AddressError(text, f"has no host; {_EXPECTED}")
    if not host.isascii():
        raise AddressError(
            text, f"{host[:64]!r} is not ASCII: write its name as DNS has it (xn--...)"
        )
    if len(host) > 255 or any(c.isspace() or not c.isprintable() or c in "/@?#" for c in host):
        raise AddressError(text, f"{host[:64]!r} is not a host name; {_EXPECTED}")
    return HostPort(host, port)


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses of a list ``host:port,host:port``, each as it was written.

    Raises:
        AddressError: one of them cannot be parsed, or comes twice, or there are too many.
    """
    addresses = tuple(part.strip() for part in text.split(",", MAX_ADDRESSES + 1))
    if len(addresses) > MAX_ADDRESSES:
        raise AddressError(text[:_MAX_LENGTH], f"names more than {MAX_ADDRESSES} hosts")
    if len({parse_address(address) for address in addresses}) < len(addresses):
        raise AddressError(text, "names one host and port twice")
    return addresses


def _split(text: str) -> tuple[str, str]:
    if len(text) > _MAX_LENGTH:
        raise AddressError(f"{text[:40]}...", f"has {len(text)} characters; {_EXPECTED}")
    bare = text.strip()
    if "://" in bare:
        bare = bare.split("://", 1)[1].rstrip("/")
    host, colon, port_text = bare.rpartition(":")
    if not colon:
        raise AddressError(text, f"has no port; {_EXPECTED}")
    return host, port_text


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def listen(bind: HostPort, backlog: int) -> socket.socket:
    """Return a socket that listens at ``bind``; every interface includes IPv6, where there is any.

    Raises:
        AddressError: nothing can be bound there.
    """
    is_dual = not bind.host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        if bind.host:
            family = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(
            (bind.host, bind.port), family=family, backlog=backlog, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise AddressError(str(bind), f"cannot be bound: {error.strerror}") from error
    except OverflowError as error:  # the port
        raise AddressError(str(bind), f"cannot be bound: {error}") from error


def advertised_host(*peers: HostPort) -> str:
    """The address of this machine that ``peers`` reach: the one that the route to the first of them
    that has one leaves from.

    Nothing is sent. Falls back to the host's name where there is no route yet.
    """
    for peer in peers:
        if peer.host == "localhost":
            return LOOPBACK
        with contextlib.suppress(OSError):
            return _route_leaves_from(peer)
    return socket.gethostname()


def _route_leaves_from(peer: HostPort) -> str:
    family, kind, proto, _, where = socket.getaddrinfo(
        peer.host, peer.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(where)
        host: str = probe.getsockname()[0]
        return host


def reachable_host(bound: HostPort) -> str:
    """A host to name to others for something that listens at ``bound``."""
    return bound.host if bound.host not in ("", "::", "0.0.0.0") else socket.gethostname()


def resolvable_host() -> str:
    """This machine's name if it can be resolved, else the loopback address."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return LOOPBACK
    return name
