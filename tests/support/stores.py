"""Stores in processes of their own, which can be frozen."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

from support.running import SCRIPTS, environment
from support.warm import Warm


@contextlib.contextmanager
def store_process() -> Iterator[tuple[Warm, int]]:
    """A store in a process of its own, and its port."""
    command = [sys.executable, str(SCRIPTS / "store_host.py")]
    with Warm(command, stdin=subprocess.PIPE, env=environment(), text=True) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
