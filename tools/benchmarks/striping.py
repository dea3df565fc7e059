"""Measures healing from one and from several sources, over links with and without a limit."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.children.healing_ends import MATRIX_BYTES
from tools.benchmarks.options import gb_option, json_option, num_matrices_in
from tools.benchmarks.processes import START_TIMEOUT_S, Child, program
from tools.benchmarks.table import Column, Result, hand_over

_TIMEOUT_S = 600.0
_ENV = {"OMP_NUM_THREADS": "1"}
_COLUMNS = (
    Column("link", "each link"),
    Column("num_sources", "sources"),
    Column("wall_s", "s", 2),
    Column("gb_per_s", "GB/s", 3),
    Column("speedup", "1 source = 1", 2),
    Column("receiver_cpu_s", "receiver CPU s", 2),
)


class Fleet:
    """One receiver and as many senders as are needed, each behind a link of its own."""

    def __init__(self, stack: ExitStack, num_matrices: int, num_senders: int, mb_per_s: float):
        self._step = 0
        matrices = f"--matrices={num_matrices}"
        ours = "tools.benchmarks.children.healing_ours"
        link = f"--bytes-per-s={mb_per_s * 1e6}"

        def child(*command: str) -> Child:
            return stack.enter_context(Child(program(*command), _ENV))

        self._receiver = child(ours, "receive", matrices)
        self._senders = [child(ours, "send", matrices) for _ in range(num_senders)]
        self._links = [child("tools.benchmarks.children.healing_link", link) for _ in self._senders]
        for each in (self._receiver, *self._senders, *self._links):
            each.read_line(START_TIMEOUT_S)

    def heal(self, num_sources: int, *, over_links: bool) -> tuple[float, float]:
        """Wall and CPU seconds of the receiver."""
        self._step += 1
        addresses = []
        for number, sender in enumerate(self._senders[:num_sources]):
            sender.send(f"offer {'extra' if number else 'first'} {self._step}")
            address = sender.read_line(_TIMEOUT_S).split()[1]
            if over_links:
                self._links[number].send(address)
                address = self._links[number].read_line(_TIMEOUT_S)
            addresses.append(address)
        self._receiver.send("prepare ours-2")
        self._receiver.read_line(_TIMEOUT_S)
        self._receiver.send(f"ours-2 {','.join(addresses)} {self._step}")
        wall_s, cpu_s = map(float, self._receiver.read_line(_TIMEOUT_S).split())
        for sender in self._senders[:num_sources]:
            sender.send("end ours")
            sender.read_line(_TIMEOUT_S)
        return wall_s, cpu_s


def measure(
    num_matrices: int, repeat: int, counts: Sequence[int], mb_per_s: float
) -> list[dict[str, Any]]:
    """All ways in turns, ``repeat`` times each after one that does not count."""
    ways = [(over_links, count) for over_links in (True, False) for count in counts]
    seen: dict[tuple[bool, int], list[tuple[float, float]]] = {way: [] for way in ways}
    with ExitStack() as stack:
        fleet = Fleet(stack, num_matrices, max(counts), mb_per_s)
        for turn in range(repeat + 1):
            for over_links, count in ways if turn % 2 == 0 else ways[::-1]:
                # Nothing gets faster over a link by being done before.
                if turn > 0 or not over_links:
                    result = fleet.heal(count, over_links=over_links)
                    seen[over_links, count] += [result] if turn else []
    rows = []
    for (over_links, count), results in seen.items():
        wall_s = statistics.median(wall for wall, _ in results)
        alone_s = statistics.median(wall for wall, _ in seen[over_links, counts[0]])
        rows.append(
            {
                "link": f"{mb_per_s:g} MB/s" if over_links else "loopback",
                "num_sources": count,
                "wall_s": wall_s,
                "gb_per_s": num_matrices * MATRIX_BYTES / 1e9 / wall_s,
                "speedup": alone_s / wall_s,
                "receiver_cpu_s": statistics.median(cpu for _, cpu in results),
                "walls_s": [wall for wall, _ in results],
            }
        )
    return rows


@click.command(context_settings={"show_default": True})
@gb_option
@click.option("--repeat", type=click.IntRange(1), default=3, help="Transfers of each way.")
@click.option("--sources", type=click.IntRange(1, 16), multiple=True, default=(1, 2, 3, 4),
              help="Groups that serve; the first is what others are compared with.")  # fmt: skip
@click.option("--mb-per-s", type=click.FloatRange(1.0), default=100.0, help="What a link carries.")
@json_option
def main(
    gb: float, repeat: int, sources: tuple[int, ...], mb_per_s: float, json_file: Path | None
) -> None:
    """Healing from several groups: each behind a link of its own, and over plain loopback."""
    num_matrices = num_matrices_in(gb)
    num_bytes = num_matrices * MATRIX_BYTES
    result = Result(
        name="striping",
        title=f"Healing {num_bytes / 1e9:.2f} GB from several groups",
        columns=_COLUMNS,
        settings={"bytes": num_bytes, "repeat": repeat, "cores": os.cpu_count()},
        notes=[
            "from the request until the receiver has the state, its memory made ready before;",
            "median of all transfers, in turns; each link is a proxy in a process of its own",
            "loopback: all processes share the cores, so that more sources cannot be faster there",
        ],
    )
    result.rows += measure(num_matrices, repeat, sources, mb_per_s)
    hand_over(result, json_file)


if __name__ == "__main__":
    sys.exit(main())
