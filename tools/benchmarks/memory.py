"""Measures the host memory of a trainer on a CPU that is alone in its job, beside plain PyTorch."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.options import json_option
from tools.benchmarks.processes import (
    START_TIMEOUT_S,
    Child,
    lighthouse_address,
    program,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHFT_LOG": "error"}
_NAMES = {
    "plain": "plain",
    "ddp": "DDP",
    "ddp_views": "DDP, views",
    "ours": "ours",
}
_COMPARED_WITH = ("plain", "ddp", "ddp_views")
_COLUMNS = (
    Column("trainer", "trainer"),
    Column("peak_mb", "peak MB", 0),
    Column("peak_of_plain", "of plain", 2),
    Column("peak_of_ddp", "of DDP", 2),
    Column("peak_of_ddp_views", "of views", 2),
    Column("plateau_mb", "plateau MB", 0),
    Column("plateau_of_plain", "of plain", 2),
    Column("plateau_of_ddp", "of DDP", 2),
    Column("plateau_of_ddp_views", "of views", 2),
    Column("whole_mb", "with torch MB", 0),
    Column("others_mb", "others MB", 0),
)


@dataclass(frozen=True, slots=True)
class Use:
    """Memory of one trainer in bytes; ``peak`` and ``plateau`` do not include imported torch."""

    peak: int
    plateau: float  # the median after the steps of the second half
    whole: int  # the peak, imported torch included
    others: int  # of the processes that the trainer has started


def measure(trainer: str, flags: list[str], lighthouse: str) -> Use:
    """Let ``trainer`` train in a process of its own.

    Raises:
        ChildError: it has failed, or did not end in time.
    """
    command = program("tools.benchmarks.children.memory_trainer", f"--trainer={trainer}", *flags)
    with Child([*command, f"--lighthouse={lighthouse}"], _ENVIRONMENT) as child:
        report = json.loads(child.read_line(2 * START_TIMEOUT_S))
    imported, after = report["imported"], report["after"]
    return Use(
        peak=report["peak"] - imported,
        plateau=statistics.median(after[len(after) // 2 :]) - imported,
        whole=report["peak"],
        others=report["others"],
    )


def rows(uses: dict[str, list[Use]]) -> list[dict[str, Any]]:
    """A row for each trainer: medians over its repetitions, and their ratios to the others'."""
    found: dict[str, dict[str, Any]] = {name: {"trainer": _NAMES[name]} for name in uses}
    for what in ("peak", "plateau"):
        measured = {name: [getattr(use, what) for use in each] for name, each in uses.items()}
        medians = {name: statistics.median(each) for name, each in measured.items()}
        for name, row in found.items():
            row[f"{what}_mb"] = medians[name] / 1e6
            row[f"{what}s_mb"] = [each / 1e6 for each in measured[name]]
            for other in _COMPARED_WITH:
                row[f"{what}_of_{other}"] = medians[name] / medians[other]
    for name, row in found.items():
        row["whole_mb"] = statistics.median(use.whole for use in uses[name]) / 1e6
        row["others_mb"] = statistics.median(use.others for use in uses[name]) / 1e6
    return list(found.values())


@click.command(context_settings={"show_default": True})
@click.option("--mb", type=click.IntRange(1), default=200, help="MiB of parameters.")
@click.option("--width", type=click.IntRange(8), default=1024, help="Width of the layers.")
@click.option("--steps", type=click.IntRange(2), default=8, help="Steps of each trainer.")
@click.option("--repeat", type=click.IntRange(1), default=5, help="Processes of each, in turns.")
@json_option
def main(mb: int, width: int, steps: int, repeat: int, json_file: Path | None) -> None:
    """Host memory of a large CPU model, alone in its job: ours, torch's DDP, and no wrapper."""
    layer_bytes = 4 * width * width
    depth = max(1, (mb << 20) // layer_bytes)
    parameters = f"{depth * layer_bytes / 1e6:.0f} MB of parameters"
    flags = [f"--width={width}", f"--depth={depth}", f"--steps={steps}"]
    uses: dict[str, list[Use]] = {name: [] for name in _NAMES}
    with start_lighthouse(min_replicas=1) as lighthouse:
        address = lighthouse_address(lighthouse)
        for turn in range(repeat):
            order = list(_NAMES) if turn % 2 == 0 else list(reversed(_NAMES))
            for trainer in order:
                uses[trainer].append(measure(trainer, flags, address))
    result = Result(
        name="memory",
        title=f"Host memory of a trainer that is alone: {parameters}",
        columns=_COLUMNS,
        settings={"mb": mb, "width": width, "steps": steps, "repeat": repeat},
        rows=rows(uses),
        notes=[
            f"medians of {repeat} processes each, in turns; SGD without momentum, one thread; "
            "what importing torch takes is a part of 'with torch' only",
            "peak: the kernel's high-water mark; plateau: after the steps of the second half",
            "plain: no wrapper; views: DDP with gradient_as_bucket_view=True",
            "others: what only processes use that the trainer has started; with ours, its manager",
        ],
    )
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
