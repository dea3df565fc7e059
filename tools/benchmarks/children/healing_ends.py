"""The two ends of the healing benchmark, whichever transport they use: the state and the talk.

An end receives commands line by line on standard input, and answers line by line.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, Protocol

import torch

# Matrices and vectors of a transformer; most bytes are in the matrices.
MATRIX_BYTES = 64 << 20
_NUM_VECTORS = 500
# A plain copy over one connection: into one small buffer again and again, or into fresh memory.
PLAIN_KINDS = ("plain", "kept")

State = dict[str, Any]


class Sender(Protocol):
    """``kind`` names the way of transport; ``offer`` returns where to fetch from."""

    def offer(self, kind: str, step: int) -> str: ...
    def end(self, kind: str) -> None: ...


class Receiver(Protocol):
    """``prepare`` does what a way may do before it knows where from; not a part of the transfer.

    ``fetch`` returns the state, or None where the way has none.
    """

    def prepare(self, kind: str) -> None: ...
    def fetch(self, kind: str, address: str, step: int) -> State | None: ...


def make_state(num_matrices: int) -> State:
    """Each matrix is filled with its number."""
    side = int((MATRIX_BYTES // 4) ** 0.5)
    return {
        "matrices": [torch.full((side, side), float(n)) for n in range(num_matrices)],
        "vectors": [torch.full((side,), 1.0) for _ in range(_NUM_VECTORS)],
        "step": 1,
    }


def flags() -> argparse.Namespace:
    """``role`` and ``matrices`` from the command line."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["send", "receive"])
    parser.add_argument("--matrices", type=int, required=True)
    return parser.parse_args()


def run_sender(sender: Sender) -> None:
    """Serve until the input ends: ``offer KIND STEP`` and ``end KIND`` are answered when done."""
    print("ready", flush=True)
    for line in sys.stdin:
        command, kind, *step = line.split()
        if command == "offer":
            began_at = time.perf_counter()
            address = sender.offer(kind, int(step[0]))
            print(time.perf_counter() - began_at, address, flush=True)
        else:
            sender.end(kind)
            print("ended", flush=True)


def run_receiver(receiver: Receiver) -> None:
    """Fetch until the input ends.

    ``prepare KIND`` is answered with wall seconds, ``KIND ADDRESS STEP`` with wall and CPU seconds.
    """
    print("ready", flush=True)
    for line in sys.stdin:
        began_at, before = time.perf_counter(), os.times()
        if line.startswith("prepare "):
            receiver.prepare(line.split()[1])
            print(time.perf_counter() - began_at, flush=True)
            continue
        kind, address, step = line.split()
        state = receiver.fetch(kind, address, int(step))
        wall_s, after = time.perf_counter() - began_at, os.times()
        if state is not None:
            _check(state)
        state = None
        cpu_s = after.user + after.system - before.user - before.system
        print(wall_s, cpu_s, flush=True)


def _check(state: State) -> None:
    for number, matrix in enumerate(state["matrices"]):
        assert matrix[0, 0] == number == matrix[-1, -1], f"matrix {number} is damaged"
