"""Measures how members meet at a store, and apart from it how gloo connects them.

Up to some tens of members are processes. A thousand are only clients of the store, each with a
connection of its own, which one process lets poll in turns: what is measured is what the store has
to do, and how often it is asked.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
from torch.distributed import PrefixStore, Store, TCPStore

from tools.benchmarks.options import before_option, json_option
from tools.benchmarks.processes import ROOT, START_TIMEOUT_S, Child, program, root_with_package_of
from tools.benchmarks.quorum_rounds import shares
from tools.benchmarks.table import Column, Result, hand_over
from torchft_svc.client.process_groups.rendezvous import MembersMeeting

_ROUND_TIMEOUT_S = 150.0
# Within this time all members have received when they meet.
_LEAD_S = 0.3
_LEAD_PER_MEMBER_S = 0.001
# Torch looks up the name of each peer of a store, which a name server may delay for seconds.
_NO_NAMES = {"RES_OPTIONS": "attempts:0"}
_COLUMNS = (
    Column("members", "members", 0),
    Column("each_is", "each is"),
    Column("package", "package"),
    Column("requests", "requests of a member", 1),
    Column("first_ms", "first meeting ms", 1),
    Column("meet_ms", "meeting ms", 1),
    Column("meet_worst_ms", "worst ms", 1),
    Column("store_cpu_ms", "store CPU ms", 1),
    Column("load_cpu_ms", "members' CPU ms", 1),
    Column("late_ms", "after a late one ms", 1),
    Column("late_cpu", "store CPU meanwhile, %", 1),
    Column("gloo_ms", "gloo ms", 1),
    Column("gloo_cpu_ms", "store CPU of gloo ms", 1),
)


@dataclass(slots=True)
class Meetings:
    """A store, and processes with the members that meet at it."""

    package: str
    store: Child
    load: list[Child]
    members: int
    quorum: int = 0
    first_ms: float = 0.0
    meet_ms: list[float] = field(default_factory=list)
    store_cpu_ms: list[float] = field(default_factory=list)
    load_cpu_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    late_cpu: list[float] = field(default_factory=list)
    gloo_ms: list[float] = field(default_factory=list)
    gloo_cpu_ms: list[float] = field(default_factory=list)

    def meet(self, *, late_s: float = 0.0, connect: bool = False) -> tuple[float, float]:
        """All meet, the last one ``late_s`` later; seconds from the last arrival until the last
        one has met, and from then until the last one is connected."""
        self.quorum += 1
        at = time.monotonic() + _LEAD_S + _LEAD_PER_MEMBER_S * self.members
        asked = {"at": at, "late_at": at + late_s, "quorum": self.quorum, "connect": connect}
        for child in self.load:
            child.send(json.dumps(asked))
        met = [each for child in self.load for each in json.loads(_line(child))]
        last_met_at = max(met_at for met_at, _ in met)
        return last_met_at - at - late_s, max(at for _, at in met) - last_met_at

    def measure(self, late_s: float) -> None:
        """One ordinary meeting, and one at which a member is late."""
        store_s, load_s = self.store.cpu_s(), self._load_cpu_s()
        self.meet_ms.append(1000 * self.meet()[0])
        self.store_cpu_ms.append(1000 * (self.store.cpu_s() - store_s))
        self.load_cpu_ms.append(1000 * (self._load_cpu_s() - load_s))
        if late_s:
            store_s = self.store.cpu_s()
            self.late_ms.append(1000 * self.meet(late_s=late_s)[0])
            self.late_cpu.append(100 * (self.store.cpu_s() - store_s) / late_s)

    def connect(self) -> None:
        """One meeting, and gloo's connections."""
        store_s = self.store.cpu_s()
        self.gloo_ms.append(1000 * self.meet(connect=True)[1])
        cpu_ms = 1000 * (self.store.cpu_s() - store_s)
        self.gloo_cpu_ms.append(cpu_ms - statistics.median(self.store_cpu_ms))

    def _load_cpu_s(self) -> float:
        forked = (each for child in self.load for each in child.children())
        times = [each.cpu_times() for each in forked]
        return sum(child.cpu_s() for child in self.load) + sum(t.user + t.system for t in times)

    def row(self) -> dict[str, object]:
        def median(values: list[float]) -> float | None:
            return statistics.median(values) if values else None

        return {
            "members": self.members,
            "each_is": "a process",
            "package": self.package,
            "meetings": len(self.meet_ms),
            "first_ms": self.first_ms,
            "meet_ms": median(self.meet_ms),
            "meet_worst_ms": max(self.meet_ms),
            "store_cpu_ms": median(self.store_cpu_ms),
            "load_cpu_ms": median(self.load_cpu_ms),
            "late_ms": median(self.late_ms),
            "late_cpu": median(self.late_cpu),
            "gloo_ms": median(self.gloo_ms),
            "gloo_cpu_ms": median(self.gloo_cpu_ms),
        }


class CountingStore:
    """A client of a store, as far as a `MembersMeeting` uses it, that counts the requests."""

    num_requests = 0

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        CountingStore.num_requests += 1
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        CountingStore.num_requests += 1
        return self._store.check(keys)


def simulate(members: int, repeat: int) -> dict[str, object]:
    """A row of ``members`` clients that poll in turns until all have met."""
    load = psutil.Process()
    meet_ms, store_cpu_ms, load_cpu_ms = [], [], []
    with Child(program("tools.benchmarks.children.store")) as store:
        port = int(store.read_line(START_TIMEOUT_S))
        clients = [
            TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            for _ in range(members)
        ]
        CountingStore.num_requests = 0
        for number in range(repeat):
            places = [CountingStore(PrefixStore(f"{number}", client)) for client in clients]
            meetings = [MembersMeeting(place, rank, members) for rank, place in enumerate(places)]  # type: ignore[arg-type]
            store_s, load_s, began_at = store.cpu_s(), sum(load.cpu_times()[:2]), time.monotonic()
            while meetings:
                meetings = [each for each in meetings if not each.poll(0.0)]
            meet_ms.append(1000 * (time.monotonic() - began_at))
            store_cpu_ms.append(1000 * (store.cpu_s() - store_s))
            load_cpu_ms.append(1000 * (sum(load.cpu_times()[:2]) - load_s))
    return {
        "members": members,
        "each_is": "a client",
        "package": "ours",
        "meetings": repeat,
        "requests": CountingStore.num_requests / members / repeat,
        "meet_ms": statistics.median(meet_ms),
        "meet_worst_ms": max(meet_ms),
        "store_cpu_ms": statistics.median(store_cpu_ms),
        "load_cpu_ms": statistics.median(load_cpu_ms),
    }


def _line(child: Child) -> str:
    return child.read_line(_ROUND_TIMEOUT_S)


@contextmanager
def meetings(package: str, members: int, root: Path) -> Iterator[Meetings]:
    """Start a store and its members, and let them meet once: so all are connected to it."""
    with ExitStack() as stack:
        store = stack.enter_context(Child(program("tools.benchmarks.children.store"), root=root))
        address = f"127.0.0.1:{store.read_line(START_TIMEOUT_S)}"
        load = []
        for first, count in shares(members, 2):
            flags = [f"--store={address}", f"--first={first}", f"--count={count}"]
            flags.append(f"--world-size={members}")
            command = program("tools.benchmarks.children.meeting_members", *flags)
            load.append(stack.enter_context(Child(command, root=root)))
        for child in load:
            child.read_line(START_TIMEOUT_S)
        found = Meetings(package, store, load, members)
        found.first_ms = 1000 * found.meet()[0]
        yield found


def measure(
    members: int, *, repeat: int, late_s: float, before: Path | None
) -> list[dict[str, object]]:
    """A row of this package, and of ``before``, in turns."""
    with ExitStack() as stack:
        sides = [("ours", ROOT)]
        if root := stack.enter_context(root_with_package_of(before)):
            sides.append(("ours, before", root))
        found = [stack.enter_context(meetings(name, members, root)) for name, root in sides]
        for number in range(repeat):
            for each in found if number % 2 == 0 else found[::-1]:
                each.measure(late_s)
        for each in found:
            each.connect()
        return [each.row() for each in found]


@click.command(context_settings={"show_default": True})
@click.option("--members", type=click.IntRange(2, 5000), multiple=True, default=(10, 100, 1000),
              help="Members that are clients only; may be repeated.")  # fmt: skip
@click.option("--processes", type=click.IntRange(2, 200), multiple=True, default=(8, 64),
              help="Members that are processes, and connect over gloo; repeatable.")  # fmt: skip
@click.option("--repeat", type=click.IntRange(1), default=5, help="Meetings.")
@click.option("--late-s", type=click.FloatRange(0.0), default=2.0,
              help="How late the last one is in every other meeting (0: never).")  # fmt: skip
@before_option
@json_option
def main(
    members: tuple[int, ...], processes: tuple[int, ...], repeat: int, late_s: float,
    before: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Members of a quorum meet at a store before they connect."""
    os.environ.update(_NO_NAMES)
    result = Result(
        name="meeting",
        title="Members meet at a store",
        columns=_COLUMNS,
        settings={"repeat": repeat, "late_s": late_s},
        notes=[
            "meeting: from the last arrival until the last member has met, median",
            "clients poll one after the other; processes all at once, on the cores of the store",
            "gloo: from the last one that has met until all are connected; torch's own part",
        ],
    )
    for size in members:
        result.rows.append(simulate(size, repeat))
    for size in processes:
        result.rows += measure(size, repeat=repeat, late_s=late_s, before=before)
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
