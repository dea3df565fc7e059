"""Members that meet at a store, on command: processes that are forked from this one.

For a JSON line on standard input, ``{"at": ..., "late_at": ..., "quorum": ..., "connect": ...}``,
all members meet at the instant ``at`` (seconds, monotonic), the last one at ``late_at``, and with
``connect`` they connect over gloo then. The answer is a JSON list with two instants for each
member: when it had met, and when it was connected.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import click
import torch.distributed as dist

from tools.demo.orphans import die_with_parent
from torchft_svc.client.process_groups.rendezvous import LastStore, meet

_TIMEOUT_S = 120.0

Instants = tuple[float, float]


class Member:
    """One member of ``world_size``; keeps its connection to the store, as a trainer does."""

    def __init__(self, store: str, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._last_store = LastStore()
        self._group: object = None

    def meet(self, asked: dict[str, Any]) -> Instants:
        at = asked["late_at" if self._rank == self._world_size - 1 else "at"]
        time.sleep(max(0.0, at - time.monotonic()))
        place = f"{self._store}/torchft/{asked['quorum']}/0"
        store = meet(
            self._last_store, place, self._rank, self._world_size, _TIMEOUT_S, lambda: None
        )
        met_at = time.monotonic()
        if asked["connect"]:
            timeout = timedelta(seconds=_TIMEOUT_S)
            # Kept: members that are still connecting would fail if this one left.
            self._group = dist.ProcessGroupGloo(store, self._rank, self._world_size, timeout)
        return met_at, time.monotonic()


class ForkedMember:
    """A member in a process of its own."""

    def __init__(self, member: Member) -> None:
        from_parent, self._to_child = os.pipe()
        self._from_child, to_parent = os.pipe()
        if os.fork() == 0:
            die_with_parent()
            os.close(self._to_child)
            with os.fdopen(from_parent) as asks, os.fdopen(to_parent, "w") as answers:
                for line in asks:
                    answers.write(json.dumps(member.meet(json.loads(line))) + "\n")
                    answers.flush()
            os._exit(0)
        os.close(from_parent)
        os.close(to_parent)
        self._answers = os.fdopen(self._from_child)

    def ask(self, line: str) -> None:
        os.write(self._to_child, line.encode())

    def answer(self) -> Instants:
        met_at, connected_at = json.loads(self._answers.readline())
        return met_at, connected_at


@click.command()
@click.option("--store", required=True, help="Where they meet, host:port.")
@click.option("--first", type=int, required=True, help="Rank of the first member.")
@click.option("--count", type=int, required=True, help="How many members this process has.")
@click.option("--world-size", type=int, required=True, help="How many there are in all.")
def main(store: str, first: int, count: int, world_size: int) -> None:
    """Meet at a store, with ``count`` members."""
    members = [ForkedMember(Member(store, first + each, world_size)) for each in range(count)]
    print("ready", flush=True)
    for line in sys.stdin:
        for member in members:
            member.ask(line)
        print(json.dumps([member.answer() for member in members]), flush=True)


if __name__ == "__main__":
    main()
