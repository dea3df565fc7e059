"""Writes the findings for people, one line each, or as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from torchft_svc.doctor.findings import Diagnosis, Level
from torchft_svc.doctor.timeouts import SettingsPlan
from torchft_svc.host.quantities import show_bytes, show_rate, show_seconds

_MARKS = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "PROBLEM", Level.UNCHECKED: "-"}


def count_level(findings: Sequence[Diagnosis], level: Level) -> int:
    """Return how many findings have this level."""
    return sum(each.level is level for each in findings)


def findings_text(findings: Sequence[Diagnosis], plan: SettingsPlan | None) -> str:
    """One line for each finding, a table of the plan, and a summary."""
    return "\n".join(
        [*_lines(findings), *([] if plan is None else _plan(plan)), _summary(findings)]
    )


def findings_json(findings: Sequence[Diagnosis], plan: SettingsPlan | None) -> str:
    """An object with ``findings`` and ``plan``, by the names of their fields."""
    shown = {
        "findings": [dataclasses.asdict(each) | {"level": each.level.value} for each in findings],
        "problems": count_level(findings, Level.PROBLEM),
        "warnings": count_level(findings, Level.WARNING),
        "plan": None if plan is None else dataclasses.asdict(plan),
    }
    return json.dumps(shown, indent=2)


def _lines(findings: Sequence[Diagnosis]) -> Iterator[str]:
    mark = max(map(len, _MARKS.values()))
    name = max((len(each.check) for each in findings), default=0)
    for each in findings:
        advice = f" -> {each.advice}" if each.advice else ""
        yield f"{_MARKS[each.level]:{mark}}  {each.check:{name}}  {each.found}{advice}"


def _plan(plan: SettingsPlan) -> Iterator[str]:
    load = plan.load
    yield ""
    yield (
        f"Settings for {load.num_groups} groups with steps of {load.step_s:g} s and a state of "
        f"{show_bytes(load.state_bytes)} per worker, at {show_rate(load.link_rate)}:"
    )
    yield from _table([(each.setting, each.value, each.reason) for each in plan.choices])
    yield ""
    yield "What a failure then costs the other groups:"
    head = ("EVENT", "STANDS STILL", "STEPS LOST", "")
    rows = [
        (
            each.event,
            show_seconds(each.stands_still_s),
            "-" if each.steps_lost is None else str(each.steps_lost),
            each.note,
        )
        for each in plan.costs
    ]
    yield from _table([head, *rows])
    yield ""


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  " + "  ".join(cells).rstrip()


def _summary(findings: Sequence[Diagnosis]) -> str:
    problems = count_level(findings, Level.PROBLEM)
    warnings = count_level(findings, Level.WARNING)
    unchecked = count_level(findings, Level.UNCHECKED)
    return (
        f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}, "
        f"{unchecked} not checked"
    )
