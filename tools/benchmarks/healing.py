"""Measures healing over loopback: our transport beside a plain socket copy, in turns."""

from __future__ import annotations

import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.children.healing_ends import MATRIX_BYTES, PLAIN_KINDS
from tools.benchmarks.options import before_option, gb_option, json_option, num_matrices_in
from tools.benchmarks.processes import (
    ROOT,
    START_TIMEOUT_S,
    Child,
    peer_python,
    program,
    root_with_package_of,
)
from tools.benchmarks.table import Column, Result, hand_over

_TRANSFER_TIMEOUT_S = 180.0
_ROLES = ("send", "receive")
_PUBLIC_CHUNKS = (0, 4)
_COLUMNS = (
    Column("way", "way"),
    Column("gb_per_s", "GB/s", 2),
    Column("kept_ratio", "kept = 1", 2),
    Column("ratio", "thrown away = 1", 2),
    Column("before_ratio", "time, before = 1", 3),
    Column("best_gb_per_s", "best GB/s", 2),
    Column("worst_gb_per_s", "worst GB/s", 2),
    Column("prepare_s", "prepare s", 2),
    Column("offer_ms", "offer ms", 1),
    Column("receiver_cpu_s", "receiver CPU s", 2),
    Column("sender_cpu_s", "sender CPU s", 2),
)


@dataclass(slots=True)
class Course:
    """One way to move the state, and what was measured of it."""

    kind: str
    title: str
    sender: Child
    receiver: Child
    prepares_s: list[float] = field(default_factory=list)
    walls_s: list[float] = field(default_factory=list)
    offers_s: list[float] = field(default_factory=list)
    receiver_cpu_s: list[float] = field(default_factory=list)
    sender_cpu_s: list[float] = field(default_factory=list)

    def run(self, step: int, *, is_counted: bool) -> None:
        """Move the state once: from the offer until the receiver has it whole."""
        self.receiver.send(f"prepare {self.kind}")
        prepare_s = self.receiver.read_line(_TRANSFER_TIMEOUT_S)
        cpu_before_s = self.sender.cpu_s()
        self.sender.send(f"offer {self.kind} {step}")
        offer_s, address = self.sender.read_line(_TRANSFER_TIMEOUT_S).split()
        self.receiver.send(f"{self.kind} {address} {step}")
        wall_s, cpu_s = self.receiver.read_line(_TRANSFER_TIMEOUT_S).split()
        cpu_after_s = self.sender.cpu_s()
        if self.kind not in PLAIN_KINDS:
            self.sender.send(f"end {self.kind}")
            self.sender.read_line(_TRANSFER_TIMEOUT_S)
        if is_counted:
            self.prepares_s.append(float(prepare_s))
            self.walls_s.append(float(offer_s) + float(wall_s))
            self.offers_s.append(float(offer_s))
            self.receiver_cpu_s.append(float(cpu_s))
            self.sender_cpu_s.append(cpu_after_s - cpu_before_s)

    def row(
        self, num_bytes: int, plain: Course, kept: Course, before: Course | None
    ) -> dict[str, Any]:
        gigabytes = num_bytes / 1e9
        olds_s = before.walls_s if before else []
        of_before = [new_s / old_s for new_s, old_s in zip(self.walls_s, olds_s, strict=False)]
        return {
            "way": self.title,
            "gb_per_s": gigabytes / statistics.median(self.walls_s),
            "kept_ratio": statistics.median(kept.walls_s) / statistics.median(self.walls_s),
            "ratio": statistics.median(plain.walls_s) / statistics.median(self.walls_s),
            "before_ratio": statistics.median(of_before) if of_before else None,
            "best_gb_per_s": gigabytes / min(self.walls_s),
            "worst_gb_per_s": gigabytes / max(self.walls_s),
            "prepare_s": statistics.median(self.prepares_s),
            "offer_ms": statistics.median(self.offers_s) * 1000,
            "receiver_cpu_s": statistics.median(self.receiver_cpu_s),
            "sender_cpu_s": statistics.median(self.sender_cpu_s),
            "walls_s": self.walls_s,
        }


def measure(
    num_matrices: int, repeat: int, connections: tuple[int, ...], before: Path | None
) -> list[dict[str, Any]]:
    """All ways in turns, ``repeat`` times each after one that does not count."""
    with ExitStack() as stack:

        def ends(
            module: str, python: str = sys.executable, root: Path = ROOT
        ) -> tuple[Child, Child]:
            matrices = f"--matrices={num_matrices}"
            commands = [program(module, role, matrices, python=python) for role in _ROLES]
            send, receive = (
                stack.enter_context(Child(command, {"OMP_NUM_THREADS": "1"}, root=root))
                for command in commands
            )
            return send, receive

        ours = ends("tools.benchmarks.children.healing_ours")
        courses = [
            Course("plain", "plain copy, thrown away", *ours),
            Course("kept", "plain copy, kept", *ours),
        ]
        courses += [
            Course(f"{way}-{n}", f"{title}, {_count(n, 'connection')}", *ours)
            for way, title in (("ours", "ours"), ("unprepared", "ours, not prepared"))
            for n in connections
        ]
        children = [*ours]
        pairs: dict[int, Course] = {}  # what was measured before, by the id of what is now
        if root := stack.enter_context(root_with_package_of(before)):
            old = ends("tools.benchmarks.children.healing_ours", root=root)
            children += old
            for course in [each for each in courses if each.kind not in PLAIN_KINDS]:
                pairs[id(course)] = Course(course.kind, f"{course.title}, before", *old)
                courses.append(pairs[id(course)])
        if peer := peer_python():
            public = ends("tools.benchmarks.children.healing_public", peer)
            children += public
            courses += [
                Course(f"public-{n}", f"public release, {_count(n, 'chunk')}", *public)
                for n in _PUBLIC_CHUNKS
            ]
        for child in children:
            child.read_line(START_TIMEOUT_S)
        for step in range(repeat + 1):
            for course in courses if step % 2 == 0 else courses[::-1]:
                course.run(step, is_counted=step > 0)
        num_bytes = num_matrices * MATRIX_BYTES
        return [
            course.row(num_bytes, courses[0], courses[1], pairs.get(id(course)))
            for course in courses
        ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


@click.command(context_settings={"show_default": True})
@gb_option
@click.option("--repeat", type=click.IntRange(1), default=5, help="Transfers of each way.")
@click.option("--connections", type=click.IntRange(1, 32), multiple=True, default=(1, 2, 4),
              help="Connections of ours; may be repeated.")  # fmt: skip
@before_option
@json_option
def main(
    gb: float,
    repeat: int,
    connections: tuple[int, ...],
    before: Path | None,
    json_file: Path | None,
) -> None:
    """Healing over loopback: a state from one process to another, checked and in fresh memory."""
    num_matrices = num_matrices_in(gb)
    num_bytes = num_matrices * MATRIX_BYTES
    result = Result(
        name="healing",
        title=f"Healing {num_bytes / 1e9:.2f} GB over loopback",
        columns=_COLUMNS,
        settings={"bytes": num_bytes, "repeat": repeat, "cores": os.cpu_count()},
        notes=[
            "from the offer until the receiver has the state; median of all transfers, in turns",
            "prepare: comes before and is not counted; a worker that has just started makes memory",
            "ready while it waits for its first quorum, all of it if that wait is as long as this",
            "plain: one connection, no checksums; kept: all bytes are there in the end, in fresh",
            "memory, as a state has to be; thrown away: into the same 1 MiB again and again",
        ],
    )
    result.rows += measure(num_matrices, repeat, connections, before)
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
