"""Measures what collectives in a process of their own cost, beside the same ones in the trainer."""

from __future__ import annotations

import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import psutil
from torch.distributed import TCPStore

from tools.benchmarks.options import json_option
from tools.benchmarks.processes import START_TIMEOUT_S, Child, program
from tools.benchmarks.table import Column, Result, Value, hand_over

_BLOCK_TIMEOUT_S = 300.0
# By name: which group of the member, and whether the tensor lies in shared memory.
_KINDS = {
    "in process": ("in process", False),
    "isolated": ("isolated", False),
    "shared": ("isolated", True),
}
_COLUMNS = (
    Column("megabytes", "MB", 1),
    Column("in process", "in process ms", 2),
    Column("isolated", "isolated ms", 2),
    Column("ratio", "isolated / in process", 2),
    Column("shared", "isolated, in shared memory ms", 2),
    Column("shared ratio", "that / in process", 2),
)


def _block(members: list[Child], kind: str, num_bytes: int, repeat: int) -> list[float]:
    """The times of one member, while both sum."""
    group, shared = _KINDS[kind]
    asked = {"group": group, "bytes": num_bytes, "repeat": repeat, "shared": shared}
    for member in members:
        member.send(json.dumps(asked))
    answers: list[list[float]] = [json.loads(m.read_line(_BLOCK_TIMEOUT_S)) for m in members]
    return answers[0]


def _measure(members: list[Child], megabytes: float, blocks: int) -> dict[str, Any]:
    num_bytes = int(megabytes * 1e6) // 4 * 4
    repeat = max(3, min(50, round(100 / megabytes)))
    times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(blocks):
        for kind in list(_KINDS)[:: 1 if number % 2 else -1]:
            times[kind] += _block(members, kind, num_bytes, repeat)
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    ratios = {
        "ratio": medians["isolated"] / medians["in process"],
        "shared ratio": medians["shared"] / medians["in process"],
    }
    return {"megabytes": megabytes, **medians, **ratios}


@click.command(context_settings={"show_default": True})
@click.option("--megabytes", type=float, multiple=True, default=(1.0, 100.0), help="Per sum.")
@click.option("--blocks", type=click.IntRange(1), default=6, help="Turns that each takes.")
@json_option
def main(megabytes: tuple[float, ...], blocks: int, json_file: Path | None) -> None:
    """Sum float32 over two members, with gloo in the trainers and in processes of their own."""
    settings: dict[str, Value] = {"blocks": blocks, "members": 2}
    result = Result("isolation", "A sum over two members", _COLUMNS, settings)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        members = [
            stack.enter_context(
                Child(
                    program(
                        "tools.benchmarks.children.collectives", f"127.0.0.1:{store.port}", rank
                    )
                )
            )
            for rank in range(2)
        ]
        pids = [json.loads(member.read_line(START_TIMEOUT_S))["pid"] for member in members]
        result.rows = [_measure(members, size, blocks) for size in megabytes]
        _block(members, "isolated", 4, 1)  # with it the process lets go of what was shared
        carrier = psutil.Process(pids[0])
        server = carrier.parent()
        assert server is not None
        own, shared = (each.memory_full_info().uss / 1e6 for each in (carrier, server))
    result.notes.append(
        f"memory of its own: {own:.0f} MB for the process that carries the collectives, of the "
        f"largest sum {max(megabytes):g} MB; {shared:.0f} MB for the server it was forked from"
    )
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
