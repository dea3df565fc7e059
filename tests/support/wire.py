"""A host of its own at the other end of a wire, which can be cut without anybody being told."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator

import pytest

# Nobody has it: what is sent there is dropped, and nothing is reported to who sent it.
NOWHERE = "02:00:00:00:00:99"


class Wire:
    """``namespace`` is the far host, a network namespace; ``near``, ``far`` are the addresses."""

    def __init__(self, number: int) -> None:
        self.namespace = f"torchft{number}"
        self._devices = f"tft{number}n", f"tft{number}f"
        # A range for documentation: no network of the machine has it.
        self.near, self.far = "198.51.100.1", "198.51.100.2"

    def lay(self) -> None:
        near, far = self._devices
        _ip("netns", "add", self.namespace)
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.namespace)
        _ip("addr", "add", f"{self.near}/24", "dev", near)
        _ip("link", "set", near, "up")
        for what in (
            ("addr", "add", f"{self.far}/24", "dev", far),
            ("link", "set", far, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self.namespace, *what)

    def cut(self) -> None:
        """Every packet is lost from now on, both ways, and no connection is closed by that."""
        near, far = self._devices
        misled = "lladdr", NOWHERE, "nud", "permanent"
        _ip("neigh", "replace", self.far, "dev", near, *misled)
        _ip("-n", self.namespace, "neigh", "replace", self.near, "dev", far, *misled)

    def remove(self) -> None:
        for what in (("link", "del", self._devices[0]), ("netns", "del", self.namespace)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*what)


def _ip(*what: str) -> None:
    subprocess.run(["ip", *what], check=True, capture_output=True, timeout=10)  # noqa: S607


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    """Skips the test where no namespace can be made: it takes root and iproute2."""
    laid = Wire(random.randrange(10_000))
    try:
        if os.geteuid():
            pytest.skip("a network namespace takes root")
        try:
            laid.lay()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespace here: {error}")
        yield laid
    finally:
        if not os.geteuid():
            laid.remove()
