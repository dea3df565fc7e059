"""Measures what it costs that groups compare their states, beside the same groups that do not."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.options import json_option
from tools.benchmarks.step_time import WARM_UP_STEPS, Pair, in_turns, tolerant_pair
from tools.benchmarks.table import Column, Result, hand_over

# Width and depth of the MLP, by name: one whose steps are as short as they get, and that of
# `step_time`.
MODELS = {"small": (64, 2), "17 MB": (728, 8)}
_COLUMNS = (
    Column("model", "model"),
    Column("off_ms", "step ms: off", 3),
    Column("on_ms", "on", 3),
    Column("ratio", "on / off", 4),
    Column("cpu_ratio", "of the CPU time", 4),
    Column("check_ms", "a check ms", 2),
    Column("share", "checks' share of a step", 5),
)


def measure(name: str, steps: int, blocks: int, every: int) -> dict[str, Any]:
    """A row: two groups that compare every ``every`` steps, and two that never do, in turns."""
    width, depth = MODELS[name]
    model = [f"--width={width}", f"--depth={depth}"]
    with ExitStack() as stack:
        off, on = (
            stack.enter_context(
                tolerant_pair(which, model, environment={"TORCHFT_CHECK_EVERY": str(interval)})
            )
            for which, interval in (("off", 0), ("on", every))
        )
        in_turns([off, on], steps, blocks)
        ratios = [
            statistics.fmean(mine["total"]) / statistics.fmean(theirs["total"])
            for mine, theirs in zip(on.blocks, off.blocks, strict=True)
        ]
        off_ms, on_ms = (
            statistics.median(statistics.fmean(block["total"]) for block in pair.blocks)
            for pair in (off, on)
        )
        check_ms = _check_ms(on, steps, every)
    return {
        "model": name,
        "off_ms": off_ms,
        "on_ms": on_ms,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_ratio": cpu_ms(on) / cpu_ms(off),
        "check_ms": check_ms,
        "share": check_ms / every / off_ms,
    }


def cpu_ms(pair: Pair) -> float:
    """CPU time of a trainer for each step, which other work on the machine changes little."""
    return 1000 * pair.cpu_s["trainer"] / pair.num_steps


def _check_ms(pair: Pair, num_steps: int, every: int) -> float:
    """How much longer than its neighbours a step takes that compares: the median over all."""
    taken = []
    length = num_steps + WARM_UP_STEPS
    for block, times in enumerate(pair.blocks, start=1):  # after that which warms up
        first = block * length + WARM_UP_STEPS
        for trainer in range(len(pair.trainers)):
            mine = times["total"][trainer * num_steps : (trainer + 1) * num_steps]
            usual = statistics.median(mine)
            checks = [i for i in range(num_steps) if (first + i) % every == 0]
            taken += [mine[i] - usual for i in checks]
    return statistics.median(taken)


@click.command(context_settings={"show_default": True})
@click.option("--steps", type=click.IntRange(2), default=500, help="Steps of a block.")
@click.option("--blocks", type=click.IntRange(1), default=9, help="Blocks of each, in turns.")
@click.option("--every", type=click.IntRange(1), default=500, help="Steps between two checks.")
@click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True,
              default=list(MODELS), help="Only this model.")  # fmt: skip
@json_option
def main(
    steps: int, blocks: int, every: int, models: tuple[str, ...], json_file: Path | None
) -> None:
    """Time of a training step with and without state checks: two groups, over gloo."""
    if steps < every:
        raise click.UsageError("a block needs a check: --steps must not be below --every")
    result = Result(
        name="state_checks",
        title=f"State checks: 2 groups, a check in every {every} steps",
        columns=_COLUMNS,
        settings={"steps": steps, "blocks": blocks, "every": every},
        notes=[
            "a block's step time is the mean over its steps, checks included; 'on / off' is the "
            "median over neighbouring blocks",
            "the CPU time is that of a trainer, for each step",
            "a check: how much longer than the median step of its block a step takes that compares",
        ],
    )
    result.rows = [measure(name, steps, blocks, every) for name in models]
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
