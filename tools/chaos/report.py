"""Writes what a run showed: a table of the stalls by cause, the verdicts, a picture, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from tools.chaos.director import Incident
from tools.chaos.faults import BOUNDS_S, FOR_ALL, Kind
from tools.chaos.records import Record
from tools.chaos.verdicts import Run
from tools.demo.events import Committed, Discarded
from tools.demo.promises import Verdict
from tools.demo.report import promise_table

# Of what has missed a promise; the JSON has all.
MAX_SHOWN = 10


def print_report(console: Console, run: Run, verdicts: Sequence[Verdict]) -> None:
    console.print(stall_table(run.incidents))
    console.print(promise_table(verdicts))
    for verdict in verdicts:
        print_faults(console, verdict)


def print_faults(console: Console, verdict: Verdict) -> None:
    """Print what has missed the promise, one thing a line; nothing if the table shows all of it."""
    if len(verdict.faults) < 2:
        return
    num_left_out = len(verdict.faults) - MAX_SHOWN
    console.print(f"{verdict.promise}: missed {len(verdict.faults)} times", style="bold red")
    for fault in verdict.faults[:MAX_SHOWN]:
        console.print(f"  {fault}", soft_wrap=True, markup=False, highlight=False)
    if num_left_out > 0:
        console.print(f"  and {num_left_out} more, see the JSON")


def stall_table(incidents: Sequence[Incident]) -> Table:
    """A row for each cause."""
    table = Table(
        title="Stalls by their cause (seconds)",
        caption="stall: until all others had committed an update begun after the fault; "
        "all back: until all groups trained together again",
    )
    table.add_column("cause")
    for name in ("times", "median", "worst", "bound", "all back, median", "worst"):
        table.add_column(name, justify="right")
    for kind in Kind:
        own = [incident for incident in incidents if incident.fault.kind is kind]
        stalls = [incident.stall_s for incident in own if incident.stall_s is not None]
        backs = [incident.back_s for incident in own if incident.back_s is not None]
        figures = [
            str(len(own)),
            *_middle_and_worst(stalls),
            f"{BOUNDS_S[kind]:.2f}",
            *_middle_and_worst(backs),
        ]
        table.add_row(kind.value, *figures)
    return table


def _middle_and_worst(times: Sequence[float]) -> tuple[str, str]:
    return (f"{median(times):.2f}", f"{max(times):.2f}") if times else ("-", "-")


def write_json(run: Run, verdicts: Sequence[Verdict], seed: int, path: Path) -> None:
    """Write the figures of a run, for programs to read."""
    figures = {
        "seed": seed,
        "began_at": run.began_at,
        "incidents": [
            {
                "cause": incident.fault.kind.value,
                "bound_s": BOUNDS_S[incident.fault.kind],
                **asdict(incident),
                "fault": {**asdict(incident.fault), "kind": incident.fault.kind.name},
            }
            for incident in run.incidents
        ],
        "wrong_records": [
            {**asdict(wrong), "found": [_record(each) for each in wrong.found]}
            for wrong in run.wrong_records()
        ],
        "stretches": [asdict(stretch) for job in run.jobs() for stretch in run.stretches(job)],
        "verdicts": [asdict(verdict) | {"outcome": verdict.outcome.value} for verdict in verdicts],
    }
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _record(record: Record) -> dict[str, object]:
    return {**asdict(record), "groups": sorted(record.groups)}


def draw_picture(run: Run, path: Path) -> None:
    """A row of commits for each group; the faults as lines, and how long the others stood still."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    groups = sorted({event.group for _, event in run.seen})
    zero = min((event.at for _, event in run.seen), default=0.0)
    figure, axes = pyplot.subplots(figsize=(13, 1.0 + 0.7 * len(groups)), layout="constrained")
    for kind, mark, color in ((Committed, "|", "#3568b8"), (Discarded, "x", "#b03a48")):
        events = [event for _, event in run.seen if isinstance(event, kind)]
        axes.scatter(
            [event.at - zero for event in events],
            [groups.index(event.group) for event in events],
            marker=mark,
            s=60 if kind is Discarded else 90,
            linewidths=1.5 if kind is Discarded else 0.4,
            color=color,
            label=kind.__name__.lower(),
        )
    for incident in run.incidents:
        begin = incident.at - zero
        axes.axvline(begin, color="#d9772b", linewidth=0.8, linestyle=":")
        axes.axvspan(begin, begin + (incident.stall_s or 0.0), color="#f2c14e", alpha=0.5, zorder=0)
        if incident.fault.kind not in FOR_ALL:
            axes.plot(begin, groups.index(incident.fault.group), "kv", markersize=6)
    axes.set_yticks(range(len(groups)), [f"group {group}" for group in groups])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (triangle: the group that is hit; yellow: until the others went on)")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
