"""Writes what the run showed: a table of groups, one of kills, one of promises, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from tools.demo.events import Committed, Discarded, Killed
from tools.demo.incidents import Incident, incidents_of
from tools.demo.promises import Outcome, Run, Verdict

_WIDTH_WITHOUT_TERMINAL = 140
_STATUS_MISSED, _STATUS_INTERRUPTED = 1, 130
_STYLE = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.NOT_JUDGED: "yellow"}


def make_console() -> Console:
    """Standard output; as wide as the tables need where no terminal says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)


def conclude(
    console: Console, verdicts: Sequence[Verdict], folder: Path, *, interrupted: bool
) -> int:
    """Say how it ended, and where to look if not well; the exit status."""
    if any(verdict.outcome is Outcome.FAIL for verdict in verdicts):
        status, said = _STATUS_MISSED, "[bold red]FAIL[/]: a promise was missed"
    elif interrupted:
        status, said = _STATUS_INTERRUPTED, "interrupted; no promise was missed until then"
    else:
        status, said = 0, "[bold green]PASS[/]: every promise was kept"
    console.print(said)
    if status:
        console.print(f"logs and events: {folder}", soft_wrap=True)
    return status


def print_report(console: Console, run: Run, verdicts: Sequence[Verdict]) -> None:
    """Print all three tables."""
    console.print(group_table(run))
    incidents = incidents_of(run.events)
    if incidents:
        console.print(incident_table(incidents))
    console.print(promise_table(verdicts))


def write_json(run: Run, verdicts: Sequence[Verdict], path: Path) -> None:
    """Write the incidents and verdicts for programs to read."""
    figures = {
        "num_groups": run.num_groups,
        "num_steps": max((commit.step for commit in run.commits()), default=0),
        "step_time_s": step_time_s(run),
        "incidents": [asdict(incident) for incident in incidents_of(run.events)],
        "verdicts": [asdict(verdict) | {"outcome": verdict.outcome.value} for verdict in verdicts],
    }
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def step_time_s(run: Run) -> float:
    """Median seconds from one commit of a group to its next, 0 if none has two."""
    times = []
    for group in range(run.num_groups):
        commits = run.commits(group)
        pairs = pairwise(commits)
        times += [later.at - sooner.at for sooner, later in pairs if later.life == sooner.life]
    return median(times) if times else 0.0


def group_table(run: Run) -> Table:
    table = Table(title=f"Groups (median step {step_time_s(run) * 1000:.0f} ms)")
    for name in ("group", "commits", "discarded", "kills", "last step", "loss", "last bits"):
        table.add_column(name, justify="right")
    for group in range(run.num_groups):
        commits = run.commits(group)
        events = [event for event in run.events if event.group == group]
        last = commits[-1] if commits else None
        table.add_row(
            str(group),
            str(len(commits)),
            str(sum(isinstance(event, Discarded) for event in events)),
            str(sum(isinstance(event, Killed) for event in events)),
            str(last.step) if last else "-",
            f"{_last_losses(commits):.2f}" if last else "-",
            last.digest[:12] if last else "-",
        )
    return table


def _last_losses(commits: Sequence[Committed]) -> float:
    return median(commit.loss for commit in commits[-10:])


def incident_table(incidents: Sequence[Incident]) -> Table:
    table = Table(
        title="Kills (seconds)",
        caption="next commit: of all survivors, maybe the one under way; without it: an update "
        "begun after the kill; joined, healed: from restart to the first quorum asked for, and "
        "to the first update with own gradients",
    )
    for name in ("kill", "group", "phase", "SIGKILL for", "next commit", "without it"):
        table.add_column(name, justify="right")
    table.add_column("joined", justify="right")
    table.add_column("healed", justify="right")
    for incident in incidents:
        table.add_row(
            str(incident.number),
            str(incident.kill.group),
            incident.phase,
            "trainer + sidecar" if incident.kill.whole_group else "trainer",
            *map(
                _seconds,
                (incident.stall_s, incident.without_s, incident.join_s, incident.heal_s),
            ),
        )
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def promise_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="Promises")
    for name in ("", "promise", "seen"):
        table.add_column(name)
    for verdict in verdicts:
        style = _STYLE[verdict.outcome]
        table.add_row(f"[{style}]{verdict.outcome.value}[/]", verdict.promise, verdict.detail)
    return table
