"""Launched runs with faults keep their rules: a fixed set of seeds, as CI runs it."""

from __future__ import annotations

import dataclasses

import pytest
from click.testing import CliRunner
from support.core.guards import replace_guard

from tools.sim.__main__ import main
from tools.sim.explore import describe, run_launch_seed, shrink
from tools.sim.launch_fleet import LaunchFleet
from tools.sim.launch_scenario import PLAIN_FAULTS, draw_launch, on_a_list_from_the_start
from torchft_svc.core.launch.launched_run import LaunchedRun
from torchft_svc.core.launch.restart import RestartPolicy

NUM_SEEDS = 200


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_small_runs(first: int) -> None:
    for seed in range(first, first + 50):
        outcome = run_launch_seed(seed)
        assert outcome.fell is None, describe(outcome)


# A lighthouse that stood still; a store that was used in a world that its node did not receive; a
# member of a world that was taken over, which had left it; on a list, a node that wakes and
# receives a world, while another lighthouse has begun the same round; a world that all reach, while
# one of its nodes cannot report that; a node whose workers fail while old news are on their way;
# on a list, a run that has begun anew at one of its lighthouses.
@pytest.mark.parametrize(
    "seed",
    [
        316902,
        904092,
        985420,
        106010,
        422056,
        7800090,
        7962044,
        1795483226780,
        99500017505,
        99500020169,
        99500033596,
    ],
)
def test_runs_that_fell_once(seed: int) -> None:
    outcome = run_launch_seed(seed)
    assert outcome.fell is None, describe(outcome)


# Two worlds of one round, with a node in both; a world that a node enters after another one of it
# has died; nodes that die while they are cut off, before another lighthouse does.
@pytest.mark.parametrize("seed", [528, 30287, 30503])
def test_lists_that_fell_once(seed: int) -> None:
    outcome = LaunchFleet(on_a_list_from_the_start(draw_launch(seed))).run()
    assert outcome.fell is None, describe(outcome)


def test_many_nodes() -> None:
    outcome = run_launch_seed(1, 60)
    assert outcome.fell is None, describe(outcome)
    assert outcome.num_worlds > 0


def test_a_seed_is_one_and_the_same_run() -> None:
    first, again = (LaunchFleet(draw_launch(2)).run() for _ in range(2))
    assert first == again
    assert first.num_worlds > 0


def test_without_faults_there_is_one_world_or_a_few_that_grow() -> None:
    calm = dataclasses.replace(draw_launch(4), faults=(), start_spread_s=0.3)
    outcome = LaunchFleet(calm).run()
    assert outcome.fell is None
    assert outcome.num_worlds == 1


@pytest.mark.parametrize("limits", [{"max_node_failures": 1}, {"max_run_failures": 4}])
def test_limits_on_failures_are_kept(limits: dict[str, int]) -> None:
    num_worlds = 0
    for seed in range(20):
        drawn = draw_launch(seed)
        settings = dataclasses.replace(drawn.settings, failure_window_s=1e6, **limits)
        plain = [fault for fault in drawn.faults if fault.kind in PLAIN_FAULTS]
        outcome = LaunchFleet(
            dataclasses.replace(
                drawn, settings=settings, policy=RestartPolicy.SOFT, faults=tuple(plain)
            )
        ).run()
        assert outcome.fell is None, describe(outcome)
        num_worlds += outcome.num_worlds
    assert num_worlds > 20


def test_the_story_of_a_fall_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_guard(monkeypatch, LaunchedRun.schedule_replacement, lambda self, at: None)
    outcomes = (LaunchFleet(draw_launch(seed)).run() for seed in range(40))
    fallen = next(outcome for outcome in outcomes if outcome.fell is not None)
    small = shrink(fallen, max_runs=60)
    assert small.fell == fallen.fell
    assert len(small.scenario.faults) <= len(fallen.scenario.faults)
    assert f"--launcher --seed {small.scenario.seed}" in describe(small)


def test_the_command_counts_what_it_has_seen() -> None:
    options = ["--launcher", "--seed", "0", "--count", "2", "--processes", "1"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    assert "2 seeds" in result.output
    assert "worlds" in result.output
