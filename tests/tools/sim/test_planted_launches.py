"""Each fault that is planted in the launcher's machines is found by some seed (rule X3)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from support.core.guards import replace_guard

from tools.sim.launch_fleet import LaunchFleet
from tools.sim.launch_scenario import LaunchScenario, draw_launch, on_a_list_from_the_start
from tools.sim.scenario import Fault
from torchft_svc.core.launch import agent
from torchft_svc.core.launch.agent import AgentMachine
from torchft_svc.core.launch.launched_run import (
    ConnectedAgent,
    FailureCounts,
    LaunchedRun,
    SendNews,
    order_nodes,
)
from torchft_svc.core.launch.restart import (
    REACTIONS,
    Reaction,
    RestartPolicy,
    RunEvent,
    event_of_failure,
)
from torchft_svc.core.launch.world import RunMove, RunWaiting
from torchft_svc.core.link import LinkMachine
from torchft_svc.core.streams import EndStream

# A fault that needs more seeds than this is not found: the simulator looks in the wrong places.
MAX_SEEDS = 60

Plant = Callable[[pytest.MonkeyPatch], None]


def losses_are_not_acted_on(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.schedule_replacement, lambda self, at: None)


def losses_are_acted_on_late(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun.schedule_replacement
    replace_guard(plant, real, lambda self, at: real(self, at + 3.0))


def the_silent_never_die(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun.__init__

    def init(self: Any, name: Any, settings: Any, timeout_s: float, *more: Any) -> None:
        real(self, name, settings, 1e6, *more)

    plant.setattr(LaunchedRun, "__init__", init)


def joins_do_not_wait_for_the_present_world(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.has_unreached_members, lambda self: False)


def joins_have_no_window(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.joins_at, lambda self, joiners: -math.inf)


def joins_never_happen(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.joins_at, lambda self, joiners: math.inf)


def the_present_world_is_replaced_again_and_again(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.needs_replacement, lambda self: True)


def more_than_max_are_accepted(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun.assign_places
    replace_guard(plant, real, lambda self, number: real(self, number + 1))


def fewer_than_min_are_enough(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.enough_are_left, lambda self, joiners: True)


def a_store_is_used_twice(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.is_unused_store, lambda self, node_id, port: True)
    replace_guard(plant, AgentMachine.replace_used_store, lambda self, world: None)


def rank_0_may_be_a_newcomer(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.holders_of_state, lambda self: set())


def rank_0_is_any_member(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.holders_of_state, lambda self: set(self.members))


def nodes_that_wait_are_never_dismissed(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.dismiss_late_nodes, lambda self, at: [])
    plant.setattr(agent, "WAIT_SLACK_S", 1e6)


def survivors_are_restarted(plant: pytest.MonkeyPatch) -> None:
    steps = REACTIONS[RestartPolicy.HARD][RunEvent.SCALE_DOWN]
    plant.setitem(REACTIONS[RestartPolicy.SOFT], RunEvent.SCALE_DOWN, steps)


def a_join_uses_a_restart(plant: pytest.MonkeyPatch) -> None:
    steps = (Reaction.USE_RESTART, *REACTIONS[RestartPolicy.HARD][RunEvent.SCALE_UP])
    for event in (RunEvent.SCALE_UP, RunEvent.SCALE_DOWN):
        plant.setitem(REACTIONS[RestartPolicy.HARD], event, steps)


def restarts_are_not_counted(plant: pytest.MonkeyPatch) -> None:
    def event(policy: RestartPolicy, num_left: int, *more: int) -> RunEvent:
        return event_of_failure(policy, 1, *more)

    plant.setattr(agent, event_of_failure.__name__, event)


def workers_are_not_paused(plant: pytest.MonkeyPatch) -> None:
    steps = (Reaction.RENDEZVOUS, Reaction.RESUME)
    for event in (RunEvent.SCALE_UP, RunEvent.SCALE_DOWN):
        plant.setitem(REACTIONS[RestartPolicy.SOFT], event, steps)


def a_world_of_the_workers_before_is_entered(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, AgentMachine.round_to_skip, lambda self: 0)


def a_lighthouse_does_not_confirm_failures(plant: pytest.MonkeyPatch) -> None:
    real = ConnectedAgent.send_news

    def send_news(self: Any, news: Any) -> Any:
        return [] if isinstance(news, RunWaiting) else real(self, news)

    replace_guard(plant, real, send_news)


def an_old_world_is_entered_again(plant: pytest.MonkeyPatch) -> None:
    real = AgentMachine.accept_world

    def accept_world(self: Any, world: Any, now: float) -> None:
        if self.world is not None and self.entered is not None:
            world = dataclasses.replace(world, round=self.world.round + 1)
        real(self, world, now)

    replace_guard(plant, real, accept_world)


def ranks_are_those_of_arrival(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, order_nodes, lambda survivors, joiners, *_: (*joiners, *survivors))


def a_world_is_not_adopted(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.adopt_world, lambda self, hello, is_new, at: [])


def a_new_lighthouse_waits_for_nobody(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.awaits_members_until, lambda self, at: at)


def a_new_lighthouse_begins_at_once(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun.__init__

    def init(self: Any, name: Any, settings: Any, timeout_s: float, most: int, at: float) -> None:
        real(self, name, settings, timeout_s, most, 0.0)

    plant.setattr(LaunchedRun, "__init__", init)


def places_are_not_given_again(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun.assign_places

    def assign_places(self: Any, number: int) -> None:
        if not self.members:
            real(self, number)

    replace_guard(plant, real, assign_places)


def nobody_looks_back_to_an_earlier_lighthouse(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LinkMachine.probed, lambda self, number, accepting, now: None)


def a_standstill_is_ignored(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.stood_still, lambda self, settle_s, at: None)


def agents_that_move_are_lost_to_the_slowest(plant: pytest.MonkeyPatch) -> None:
    def moved(self: Any, move: RunMove, at: float) -> Any:
        *leaving, slowest = [each.stream for each in self.agents.values()]
        orders = [SendNews(tuple(leaving), move), *map(EndStream, leaving)]
        for node_id, each in list(self.agents.items()):
            if each.stream != slowest:
                orders += self.stream_ended(node_id, "it moves", at)
        return orders

    replace_guard(plant, LaunchedRun.moved, moved)


def nodes_may_fail_however_often(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, FailureCounts.why_excluded, lambda self, node, at: "")


def runs_may_fail_however_often(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, FailureCounts.why_over, lambda self, at: "")


def a_run_that_has_begun_anew_elsewhere_is_not_adopted(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun.adopt_world

    def adopt_world(self: Any, hello: Any, is_new: bool, at: float) -> Any:
        return real(self, hello, False, at)

    replace_guard(plant, real, adopt_world)


def a_world_of_another_lighthouse_passes_for_the_present_one(plant: pytest.MonkeyPatch) -> None:
    replace_guard(plant, LaunchedRun.is_of_another_lighthouse, lambda self, hello: False)


# Each with the first of the seeds that are tried.
PLANTS: dict[Plant, int] = {
    losses_are_not_acted_on: 0,
    losses_are_acted_on_late: 0,
    the_silent_never_die: 50,
    joins_do_not_wait_for_the_present_world: 0,
    joins_have_no_window: 0,
    joins_never_happen: 200,
    the_present_world_is_replaced_again_and_again: 0,
    more_than_max_are_accepted: 0,
    fewer_than_min_are_enough: 0,
    a_store_is_used_twice: 0,
    rank_0_may_be_a_newcomer: 0,
    rank_0_is_any_member: 0,
    nodes_that_wait_are_never_dismissed: 0,
    survivors_are_restarted: 0,
    a_join_uses_a_restart: 0,
    restarts_are_not_counted: 0,
    workers_are_not_paused: 0,
    a_world_of_the_workers_before_is_entered: 0,
    a_lighthouse_does_not_confirm_failures: 0,
    an_old_world_is_entered_again: 0,
    ranks_are_those_of_arrival: 0,
    a_world_is_not_adopted: 0,
    a_new_lighthouse_waits_for_nobody: 0,
    a_new_lighthouse_begins_at_once: 325,
    places_are_not_given_again: 140,
    nobody_looks_back_to_an_earlier_lighthouse: 0,
    agents_that_move_are_lost_to_the_slowest: 0,
    a_standstill_is_ignored: 0,
    nodes_may_fail_however_often: 640,
    runs_may_fail_however_often: 600,
    a_run_that_has_begun_anew_elsewhere_is_not_adopted: 16325,
    a_world_of_another_lighthouse_passes_for_the_present_one: 500,
}


def with_crashes(scenario: LaunchScenario) -> LaunchScenario:
    """Return ``scenario`` with lighthouses that are killed instead of frozen."""
    faults = (
        dataclasses.replace(fault, kind="lighthouse_crash")
        if fault.kind == "lighthouse_freeze"
        else fault
        for fault in scenario.faults
    )
    return dataclasses.replace(scenario, faults=tuple(faults))


def with_one_short_freeze(scenario: LaunchScenario) -> LaunchScenario:
    """Return a run on a list whose first lighthouse stands still until some agents have left."""
    seconds = 2.0 + scenario.seed % 10 * 0.25
    freeze = Fault(at=20.0, kind="lighthouse_freeze", target=0, seconds=seconds, value=0.0)
    return dataclasses.replace(scenario, num_lighthouses=2, is_elected=False, faults=(freeze,))


# How scenarios are changed for what is rare otherwise.
CHANGES: dict[Plant, Callable[[LaunchScenario], LaunchScenario]] = {
    a_run_that_has_begun_anew_elsewhere_is_not_adopted: with_crashes,
    a_standstill_is_ignored: with_one_short_freeze,
    a_world_of_another_lighthouse_passes_for_the_present_one: on_a_list_from_the_start,
}


@pytest.mark.parametrize(
    ("planted", "first"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS]
)
def test_it_is_found(planted: Plant, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    change = CHANGES.get(planted, lambda scenario: scenario)
    drawn = (draw_launch(seed) for seed in range(first, first + MAX_SEEDS))
    outcomes = (LaunchFleet(change(scenario)).run() for scenario in drawn)
    found = next(outcome for outcome in outcomes if outcome.fell is not None)
    monkeypatch.undo()
    assert LaunchFleet(found.scenario).run().fell is None, "it falls without the fault, too"
