"""Tests of the wide-area link, and of what the benchmark of slow links makes of its lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.benchmarks.slow_links import Course, Step, curve, fastest_pace, row_of
from tools.benchmarks.wide_area import wide_area

_SEND = """
import socket, sys, time
address, num_bytes = sys.argv[1], int(sys.argv[2])
began_at = time.monotonic()
with socket.create_connection((address, 5000), 10) as sock:
    print(time.monotonic() - began_at)
    sock.sendall(bytes(num_bytes))
    sock.recv(1)
print(time.monotonic() - began_at)
"""
_RECEIVE = """
import socket, sys
address, num_bytes = sys.argv[1], int(sys.argv[2])
with socket.create_server((address, 5000)) as server:
    print("listening", flush=True)
    sock, _ = server.accept()
    while num_bytes > 0:
        num_bytes -= len(sock.recv(1 << 20))
    sock.sendall(b"x")
"""


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace takes root")
def test_the_link_delays_and_limits_what_passes() -> None:
    num_bytes, mb_per_s, round_trip_ms = 8_000_000, 20.0, 60.0
    with wide_area(2, mb_per_s, round_trip_ms) as (here, there):
        arguments = (there.address, str(num_bytes))
        receiver = subprocess.Popen(
            there.command(sys.executable, "-c", _RECEIVE, *arguments), stdout=subprocess.PIPE
        )
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"listening\n"
        sent = subprocess.run(
            here.command(sys.executable, "-c", _SEND, *arguments),
            capture_output=True,
            check=True,
            timeout=30,
        )
        receiver.communicate(timeout=30)
        connected_s, ended_s = map(float, sent.stdout.split())
        assert connected_s >= round_trip_ms / 1000
        assert ended_s >= num_bytes / (mb_per_s * 1e6)
    assert not Path("/run/netns", here.namespace).exists()


def course(*at_s: float) -> Course:
    return Course([Step(at, 10, 4.0 - at) for at in at_s], unseen_loss=2.5)


def test_a_row_counts_what_was_trained_in_time() -> None:
    courses = [course(0.5, 1.0, 2.0, 2.5), course(0.5, 1.0)]
    row = row_of("ddp", courses, 2.0, alone=2.0)
    assert row["tokens_per_s"] == 5 * 10 / 2.0
    assert row["share"] == 5 / (2 * 2 * 2.0)
    assert row["loss"] == 2.5


def test_the_curve_is_the_mean_of_each_second() -> None:
    assert curve([course(0.25, 0.75), course(1.5)]) == [(0.5, 3.5), (1.5, 2.5)]


def test_the_pace_without_waits_is_that_of_most_steps() -> None:
    assert fastest_pace([course(0.0, 0.5, 1.0, 1.5, 9.0)]) == 2.0
