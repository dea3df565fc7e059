"""Tests crowds at a checkpoint port: memory stays flat, and a holder of the secret still heals."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from support.hostile import many_descriptors
from support.running import SCRIPTS, eventually

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.http.connections import MAX_CONNECTIONS

pytestmark = pytest.mark.processes

LONG = timedelta(seconds=30)
NUM_IDLE = 10_000
NUM_FLOATS = 1 << 20
GIGABYTE = 1 << 30
# Threads that end and others that begin at the same time, and what the allocator keeps of them.
MAX_GROWTH_MB = 32.0


class Source:
    """A worker in a process of its own, which offers a state."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        where = urlsplit(url)
        self.place = where.hostname, where.port
        self.usage = psutil.Process(pid)
        self._bytes = self.usage.memory_info().rss
        self._descriptors = self.usage.num_fds()

    def grown_mb(self) -> float:
        return float((self.usage.memory_info().rss - self._bytes) / 1e6)

    def is_as_before(self) -> bool:
        return bool(self.usage.num_fds() <= self._descriptors + 2)

    def heals(self) -> None:
        """Somebody who is behind gets the whole state."""
        with HTTPTransport[Any](LONG, num_connections=4, hostname="127.0.0.1") as receiver:
            state = receiver.recv_checkpoint(0, self.url, 1, LONG)
        assert torch.equal(state["w"], torch.arange(float(NUM_FLOATS)))


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    script = str(SCRIPTS / "checkpoint_source.py")
    with subprocess.Popen(
        [sys.executable, script, f"--floats={NUM_FLOATS}"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            made = Source(process.stdout.readline().split()[0], process.pid)
            made.heals()  # once, so that what only the first one needs is there
            yield Source(made.url, process.pid)
            assert process.poll() is None
        finally:
            process.kill()


def test_ten_thousand_idle_connections(source: Source) -> None:
    """Connections that have not shown the secret make room, long before they are given up."""
    with many_descriptors(NUM_IDLE + 500) as allowed, contextlib.ExitStack() as stack:
        for _ in range(min(NUM_IDLE, allowed - 500)):
            stack.enter_context(socket.create_connection(source.place, 10))
        source.heals()
        assert source.usage.num_threads() < 3 * MAX_CONNECTIONS
        assert source.grown_mb() < MAX_GROWTH_MB, f"{source.grown_mb():.0f} MB"
    eventually(source.is_as_before)


def test_a_head_of_a_gigabyte_is_not_held(source: Source) -> None:
    with (
        socket.create_connection(source.place, 10) as raw,
        contextlib.suppress(OSError),  # it hangs up
    ):
        raw.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(GIGABYTE // 64_000):
            raw.sendall(b"name: value\r\n" * 4_923)
        raise AssertionError("it has read all of it")
    assert source.grown_mb() < MAX_GROWTH_MB, f"{source.grown_mb():.0f} MB"
    source.heals()
    eventually(source.is_as_before)
