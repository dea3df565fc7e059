"""Hosts of their own on this machine, with a wide-area link between them. Takes root (Linux)."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import click

from tools.benchmarks.processes import START_TIMEOUT_S, Child, program

# The largest packets that the system makes: so one process in Python can carry the link.
MTU = 65_000
# The device of each host that leads to the others.
DEVICE = "wide"
_RANGE = "198.19.255"  # for tests of networks
# One connection may fill a link of 100 MB/s over 50 ms.
_WINDOW = "4096 1048576 33554432"


@dataclass(frozen=True, slots=True)
class WideHost:
    """A host at ``address``, which is the network namespace ``namespace``."""

    address: str
    namespace: str

    def command(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]


@contextlib.contextmanager
def wide_area(num_hosts: int, mb_per_s: float, round_trip_ms: float) -> Iterator[list[WideHost]]:
    """Hosts that each have an uplink and a downlink of ``mb_per_s``; removed at the end.

    Raises:
        click.ClickException: this is not root.
        subprocess.CalledProcessError: the system has no namespaces, or no sysctl.
    """
    if os.geteuid():
        raise click.ClickException("network namespaces take root")
    hosts = [
        WideHost(f"{_RANGE}.{number + 1}", f"wide{os.getpid()}.{number}")
        for number in range(num_hosts)
    ]
    router = program(
        "tools.benchmarks.children.wide_area",
        f"--mb-per-s={mb_per_s}",
        f"--round-trip-ms={round_trip_ms}",
        *(f"{host.address}={host.namespace}" for host in hosts),
    )
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            stack.callback(_run, "ip", "netns", "del", host.namespace)
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            for way in ("rmem", "wmem"):
                _run(*host.command("sysctl", "-qw", f"net.ipv4.tcp_{way}={_WINDOW}"))
        link = stack.enter_context(Child(router))
        link.read_line(START_TIMEOUT_S)
        yield hosts


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)
