"""Writes the table of all metrics from their catalog."""

from __future__ import annotations

from torchft_svc.telemetry.catalog import METRICS, Program


def metrics_table() -> str:
    """Return one table for each program, in the order of the catalog."""
    parts = []
    for program in Program:
        rows = [
            f"| `{metric.name}` | {metric.kind.value} | {_labels(metric.labels)} | {metric.help} |"
            for metric in METRICS
            if program in metric.programs
        ]
        head = "| metric | kind | labels | meaning |\n| --- | --- | --- | --- |"
        parts.append("\n".join([f"### Of a {program.value}", "", head, *rows]))
    return "\n\n".join(parts)


def _labels(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"
