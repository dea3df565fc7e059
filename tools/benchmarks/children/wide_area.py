"""A wide-area link between hosts of this machine, as a process: it delays and limits every packet.

Each host is a network namespace (see `tools.benchmarks.wide_area`). Its device hands its packets to
this process, which passes them on as an uplink and a downlink of ``--mb-per-s`` each would, with
half of ``--round-trip-ms`` in between. Prints ``ready``; ends with its standard input.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

from tools.benchmarks.wide_area import DEVICE, MTU

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
# What a router keeps for a full link before it drops packets.
_QUEUE_S = 0.1
_TO = slice(16, 20)  # the destination in a packet's header


@dataclass(slots=True)
class Host:
    """A host's device, and until when its links are busy with the packets that were accepted."""

    descriptor: int
    up_until: float = 0.0
    down_until: float = 0.0


class Router:
    """Passes packets on between hosts, by their addresses."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._hosts: dict[bytes, Host] = {}
        self._waiting: list[tuple[float, int, bytes, Host]] = []
        self._num_packets = 0

    def add(self, address: str, namespace: str) -> None:
        """Give the host in ``namespace`` a device with ``address``."""
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", f"{DEVICE}%d".encode(), _IFF_TUN | _IFF_NO_PI)
        device = fcntl.ioctl(descriptor, _TUNSETIFF, request)[:16].rstrip(b"\0").decode()
        _ip("link", "set", device, "netns", namespace)
        inside = ("-n", namespace)
        _ip(*inside, "link", "set", device, "name", DEVICE, "mtu", str(MTU), "up")
        _ip(*inside, "addr", "add", f"{address}/24", "dev", DEVICE)
        self._hosts[socket.inet_aton(address)] = Host(descriptor)

    def run(self) -> None:
        """Pass packets on until the standard input ends."""
        sources = {host.descriptor: host for host in self._hosts.values()}
        poll = select.epoll()
        for descriptor in (*sources, sys.stdin.fileno()):
            poll.register(descriptor, select.EPOLLIN)
        while True:
            due_s = self._waiting[0][0] - time.monotonic() if self._waiting else 1.0
            for descriptor, _ in poll.poll(max(0.0, due_s)):
                if descriptor not in sources:
                    return
                self._accept(sources[descriptor])
            self._deliver()

    def _accept(self, source: Host) -> None:
        """Put a packet of ``source`` on its way, or drop it."""
        packet = os.read(source.descriptor, MTU)
        now = time.monotonic()
        target = self._hosts.get(packet[_TO])
        if target is None or source.up_until > now + _QUEUE_S:
            return
        takes_s = len(packet) / self._bytes_per_s
        source.up_until = max(source.up_until, now) + takes_s
        arrives_at = source.up_until + self._delay_s
        if target.down_until > arrives_at + _QUEUE_S:
            return
        target.down_until = max(target.down_until, arrives_at - takes_s) + takes_s
        self._num_packets += 1
        heapq.heappush(self._waiting, (target.down_until, self._num_packets, packet, target))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, packet, target = heapq.heappop(self._waiting)
            os.write(target.descriptor, packet)


def _ip(*what: str) -> None:
    subprocess.run(["ip", *what], check=True, timeout=10)  # noqa: S607


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb-per-s", type=float, required=True)
    parser.add_argument("--round-trip-ms", type=float, required=True)
    parser.add_argument("hosts", nargs="+", help="ADDRESS=NAMESPACE")
    options = parser.parse_args()
    router = Router(options.mb_per_s * 1e6, options.round_trip_ms / 2000)
    for host in options.hosts:
        router.add(*host.split("="))
    print("ready", flush=True)
    router.run()


if __name__ == "__main__":
    main()
