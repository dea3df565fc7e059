"""Runs seeds; where one falls, looks for the smallest scenario that still does (rule X1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

from tools.sim.fleet import Fleet, RunOutcome
from tools.sim.launch_fleet import LaunchFleet, LaunchOutcome
from tools.sim.launch_scenario import LaunchScenario, draw_launch
from tools.sim.scenario import Fault, Scenario, draw

_Outcome = TypeVar("_Outcome", RunOutcome, LaunchOutcome)

# A scenario is run again this often at most, to make its trace shorter.
MAX_SHRINKING_RUNS = 150


def run_seed(seed: int, num_groups: int | None = None) -> RunOutcome:
    """The run of ``seed``; one that falls comes back as small as it could be made."""
    outcome = Fleet(draw(seed, num_groups)).run()
    return outcome if outcome.fell is None else shrink(outcome)


def run_launch_seed(seed: int, num_nodes: int | None = None) -> LaunchOutcome:
    """The same, for a run of the launcher."""
    outcome = LaunchFleet(draw_launch(seed, num_nodes)).run()
    return outcome if outcome.fell is None else shrink(outcome)


def shrink(fallen: _Outcome, max_runs: int = MAX_SHRINKING_RUNS) -> _Outcome:
    """A smaller scenario in which the same invariant falls: fewer groups, fewer faults."""
    smallest = fallen
    num_runs = 0
    progress = True
    while progress:
        progress = False
        for outcome in _smaller_ones(smallest):
            if num_runs == max_runs:
                return smallest
            num_runs += 1
            if outcome.fell == fallen.fell:
                smallest, progress = outcome, True
                break
    return smallest


def _smaller_ones(outcome: _Outcome) -> Iterator[_Outcome]:
    """How smaller scenarios end."""
    if isinstance(outcome, RunOutcome):
        for scenario in _smaller(outcome.scenario):
            yield Fleet(scenario).run()
    else:
        for launch in _smaller_launches(outcome.scenario):
            yield LaunchFleet(launch).run()


def _smaller_launches(scenario: LaunchScenario) -> Iterator[LaunchScenario]:
    """One node less; fewer faults."""
    if scenario.num_nodes > scenario.settings.min_nodes:
        yield dataclasses.replace(scenario, num_nodes=scenario.num_nodes - 1)
    for faults in _fewer(scenario.faults):
        yield dataclasses.replace(scenario, faults=faults)


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Fewer groups; fewer workers; without a half, a quarter, ..., one of the faults."""
    fewest = max(scenario.config.min_replicas, scenario.trainer.min_replica_size)
    for num_groups in (scenario.num_groups // 2, scenario.num_groups - 1):
        if scenario.num_jobs * fewest <= num_groups:
            yield dataclasses.replace(scenario, num_groups=num_groups)
    if scenario.num_spares > scenario.num_jobs:
        yield dataclasses.replace(scenario, num_spares=scenario.num_spares - 1)
    if scenario.num_holders > 1:
        yield dataclasses.replace(scenario, num_holders=scenario.num_holders - 1)
    if scenario.num_jobs > 1:
        yield dataclasses.replace(scenario, num_jobs=1)
    if scenario.group_world_size > 1:
        yield dataclasses.replace(scenario, group_world_size=scenario.group_world_size - 1)
    for faults in _fewer(scenario.faults):
        yield dataclasses.replace(scenario, faults=faults)


def _fewer(faults: tuple[Fault, ...]) -> Iterator[tuple[Fault, ...]]:
    size = len(faults)
    while size > 0:
        for start in range(0, len(faults), size):
            yield faults[:start] + faults[start + size :]
        size //= 2


def describe(outcome: RunOutcome | LaunchOutcome) -> str:
    """What fell, in which scenario, and the trace that led there."""
    scenario = outcome.scenario
    fields = {
        field.name: getattr(scenario, field.name)
        for field in dataclasses.fields(scenario)
        if field.name != "faults"
    }
    option = " --launcher" if isinstance(outcome, LaunchOutcome) else ""
    lines = [
        f"{outcome.fell} fell after {outcome.virtual_s:.4f} s: {outcome.what}",
        "",
        "scenario: " + ", ".join(f"{name}={value}" for name, value in fields.items()),
        "",
        *map(str, scenario.faults),
        "",
        *outcome.trace,
        "",
        f"again: python -m tools.sim{option} --seed {scenario.seed} --count 1",
    ]
    return "\n".join(lines)
