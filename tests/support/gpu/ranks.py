"""Several NCCL ranks on one GPU: each is a process that believes to be on another host."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from support.running import ROOT
from tools.benchmarks.processes import Child

HERE = Path(__file__).parent
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
ANSWER_S = 60.0
START_S = 90.0


def variables(name: str) -> dict[str, str]:
    """NCCL refuses two ranks on one device of one host, so each names a host of its own."""
    return {
        "NCCL_HOSTID": f"host-{name}",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONPATH": ":".join([str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }


class Rank:
    """A member process (see member.py)."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-W", "ignore", str(HERE / "member.py")]
        self.child = Child(command, variables(name))

    def ask(self, command: str, **arguments: Any) -> None:
        self.child.send(f"{command} {json.dumps(arguments)}")

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.child.read_line(timeout_s))
        return found

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.ask(command, **arguments)
        return self.answer()


class Group:
    """Ranks, and the store at which they meet."""

    def __init__(self, ranks: list[Rank], store: TCPStore) -> None:
        self.ranks = ranks
        self._store = store
        self._quorum = 0

    def configure(self, *ranks: Rank) -> list[dict[str, Any]]:
        """Meet as a new quorum (default: everyone)."""
        self._quorum += 1
        where = f"127.0.0.1:{self._store.port}/quorum/{self._quorum}"
        members = ranks or tuple(self.ranks)
        for index, rank in enumerate(members):
            rank.ask("configure", store=where, rank=index, size=len(members), quorum=self._quorum)
        return [rank.answer() for rank in members]

    def configure_without_peer(self, rank: Rank) -> dict[str, Any]:
        """Meet one that is present in the store alone."""
        self._quorum += 1
        prefix = f"quorum/{self._quorum}"
        PrefixStore(prefix, self._store).set("present/1", "1")
        where = f"127.0.0.1:{self._store.port}/{prefix}"
        return rank.call("configure", store=where, rank=0, size=2, quorum=self._quorum)

    @property
    def quorum(self) -> int:
        return self._quorum


def everyone(ranks: list[Rank], command: str, **arguments: Any) -> list[dict[str, Any]]:
    """The same command for all, at once."""
    for rank in ranks:
        rank.ask(command, **arguments)
    return [rank.answer() for rank in ranks]


@contextlib.contextmanager
def group_of(size: int, **options: Any) -> Iterator[Group]:
    """``size`` ranks that have a process group each, not configured yet."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    with contextlib.ExitStack() as stack:
        ranks = [Rank(str(index)) for index in range(size)]
        for rank in ranks:
            stack.enter_context(rank.child)
        for rank in ranks:
            assert rank.child.read_line(START_S) == "ready"
        for answer in everyone(ranks, "make", **options):
            assert answer == {}, answer
        yield Group(ranks, store)
