"""Measures what it costs trainers to be observed: with metrics, JSON lines, a lighthouse with an
event log and an HTTP port, and traces at a collector, beside the same groups with all of it off."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from tools.benchmarks.options import json_option
from tools.benchmarks.processes import START_TIMEOUT_S, Child, program
from tools.benchmarks.state_checks import MODELS, cpu_ms
from tools.benchmarks.step_time import in_turns, tolerant_pair
from tools.benchmarks.table import Column, Result, hand_over

_PLAIN = {"TORCHFT_METRICS_PORT": "0", "TORCHFT_LOG_FORMAT": "json"}
_COLUMNS = (
    Column("model", "model"),
    Column("what", "on"),
    Column("off_ms", "step ms: off", 3),
    Column("on_ms", "on", 3),
    Column("ratio", "on / off", 4),
    Column("cpu_ratio", "of the CPU time", 4),
)


def measure(name: str, steps: int, blocks: int) -> list[dict[str, Any]]:
    """Rows for two groups, with all off, with what needs no collector, and with all, in turns."""
    width, depth = MODELS[name]
    model = [f"--width={width}", f"--depth={depth}"]
    with ExitStack() as stack:
        collector = stack.enter_context(Child(program("tools.benchmarks.children.collector")))
        exports = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.read_line(START_TIMEOUT_S)}
        kinds = {"": {}, "metrics, JSON": _PLAIN, "and OpenTelemetry": _PLAIN | exports}
        folder = stack.enter_context(TemporaryDirectory())
        pairs = {}
        for number, (kind, variables) in enumerate(kinds.items()):
            log = f"{folder}/{number}.jsonl"
            flags = {"event_log": log, "http_bind": "127.0.0.1:0"} if kind else {}
            groups = tolerant_pair(kind or "off", model, environment=variables, flags=flags)
            pairs[kind] = stack.enter_context(groups)
        in_turns(list(pairs.values()), steps, blocks)
        off = pairs.pop("")
        rows = []
        for kind, pair in pairs.items():
            ratios = pair.ratios(off)
            off_ms, on_ms = (
                statistics.median(statistics.median(block["total"]) for block in each.blocks)
                for each in (off, pair)
            )
            row = {
                "model": name,
                "what": kind,
                "off_ms": off_ms,
                "on_ms": on_ms,
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "cpu_ratio": cpu_ms(pair) / cpu_ms(off),
            }
            rows.append(row)
    return rows


@click.command(context_settings={"show_default": True})
@click.option("--steps", type=click.IntRange(2), default=300, help="Steps of a block.")
@click.option("--blocks", type=click.IntRange(1), default=9, help="Blocks of each, in turns.")
@click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True,
              default=list(MODELS), help="Only this model.")  # fmt: skip
@json_option
def main(steps: int, blocks: int, models: tuple[str, ...], json_file: Path | None) -> None:
    """Time of a training step with and without observation: two groups, over gloo."""
    result = Result(
        name="observing",
        title="Observing: 2 groups with metrics, JSON lines and OpenTelemetry",
        columns=_COLUMNS,
        settings={"steps": steps, "blocks": blocks},
        notes=[
            "a block's step time is the median over its steps; 'on / off' is the median over "
            "neighbouring blocks",
            "the CPU time is that of a trainer, for each step",
        ],
    )
    for name in models:
        result.rows += measure(name, steps, blocks)
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
