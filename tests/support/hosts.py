"""Hosts of their own on a network of this machine, where packets can be lost unnoticed."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

# The ranges 198.18.0 to 198.19.255, for tests of networks: no network of the machine has them.
NUM_RANGES = 512
# Nobody has it: what is sent there is dropped, and nothing is reported to who sent it.
NOWHERE = "02:00:00:00:00:99"


@dataclass(frozen=True, slots=True)
class Host:
    """A host at ``address``, which is the network namespace of that name (None: that of the
    test)."""

    address: str
    device: str
    namespace: str | None = None

    def ip(self, *what: str) -> None:
        within = ("-n", self.namespace) if self.namespace else ()
        subprocess.run(["ip", *within, *what], check=True, capture_output=True, timeout=10)  # noqa: S607


class Network:
    """This host, and ``others`` with a wire to it each.

    Its addresses are its own: tests lay networks at the same time, and the system would send all
    packets for a shared range to the hosts of the first one.
    """

    def __init__(self, num_others: int) -> None:
        taken = {name for _, name in socket.if_nameindex()}
        number = random.choice([n for n in range(NUM_RANGES) if f"tft{n}" not in taken])
        prefix = f"198.{18 + number // 256}.{number % 256}"
        self.here = Host(f"{prefix}.1", f"tft{number}")
        self.others = [
            Host(f"{prefix}.{index + 2}", f"tft{number}f", f"torchft{os.getpid()}.{number}.{index}")
            for index in range(num_others)
        ]

    def lay(self) -> None:
        here = self.here
        here.ip("link", "add", here.device, "type", "bridge")
        here.ip("addr", "add", f"{here.address}/24", "dev", here.device)
        here.ip("link", "set", here.device, "up")
        for index, far in enumerate(self.others):
            assert far.namespace is not None
            near = self._near_end(index)
            peer = ("peer", "name", far.device, "netns", far.namespace)
            here.ip("netns", "add", far.namespace)
            here.ip("link", "add", near, "type", "veth", *peer)
            here.ip("link", "set", near, "master", here.device, "up")
            far.ip("addr", "add", f"{far.address}/24", "dev", far.device)
            far.ip("link", "set", far.device, "up")
            far.ip("link", "set", "lo", "up")

    def cut(self, one: Host, other: Host) -> None:
        """Every packet between them is lost from now on, both ways, and no connection is closed by
        that."""
        for here, there in ((one, other), (other, one)):
            misled = "lladdr", NOWHERE, "nud", "permanent"
            here.ip("neigh", "replace", there.address, "dev", here.device, *misled)

    def cut_off(self, host: Host) -> None:
        """Cut the lines between ``host`` and all others."""
        for other in (self.here, *self.others):
            if other is not host:
                self.cut(host, other)

    def mend(self) -> None:
        """No packets are lost any more."""
        for host in (self.here, *self.others):
            host.ip("neigh", "flush", "dev", host.device, "nud", "permanent")

    def remove(self) -> None:
        for index, far in enumerate(self.others):
            self._remove("link", self._near_end(index))
            self._remove("netns", far.namespace or "")
        self._remove("link", self.here.device)

    def _remove(self, kind: str, name: str) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.here.ip(kind, "del", name)

    def _near_end(self, index: int) -> str:
        return f"{self.here.device}n{index}"


@contextlib.contextmanager
def network(num_others: int) -> Iterator[Network]:
    """Skips the test where no namespace can be made: it takes root and iproute2."""
    if os.geteuid():
        pytest.skip("a network namespace takes root")
    made = Network(num_others)
    try:
        try:
            made.lay()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespace here: {error}")
        yield made
    finally:
        made.remove()
