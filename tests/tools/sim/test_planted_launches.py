"""Each fault that is planted in the launcher's machines is found by some seed (rule X3)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from tools.sim.launch_agent import LaunchAgent
from tools.sim.launch_fleet import LaunchFleet
from tools.sim.launch_scenario import LaunchScenario, draw_launch, on_a_list_from_the_start
from torchft_svc.core.launch import agent, node_ranks, restart, run_nodes
from torchft_svc.core.launch.agent import AgentMachine
from torchft_svc.core.launch.launched_run import LaunchedRun
from torchft_svc.core.launch.rendezvous_orders import SendNews
from torchft_svc.core.launch.restart import REACTIONS, Reaction, RestartPolicy, RunEvent
from torchft_svc.core.launch.run_failures import RunFailures
from torchft_svc.core.launch.run_nodes import RunNodes
from torchft_svc.core.launch.world import AgentStatus, RunMove, RunWaiting
from torchft_svc.core.launch.world_pace import WorldPace
from torchft_svc.core.streams import EndStream

# A fault that needs more seeds than this is not found: the simulator looks in the wrong places.
MAX_SEEDS = 60

Plant = Callable[[pytest.MonkeyPatch], None]


def losses_are_not_acted_on(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(WorldPace, "note_loss", lambda self, at: None)


def losses_are_acted_on_late(plant: pytest.MonkeyPatch) -> None:
    real = WorldPace.note_loss

    def plan(self: Any, at: float) -> None:
        real(self, at + 3.0)

    plant.setattr(WorldPace, "note_loss", plan)


def the_silent_never_die(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun.__init__

    def init(self: Any, name: Any, settings: Any, timeout_s: float, *more: Any) -> None:
        real(self, name, settings, 1e6, *more)

    plant.setattr(LaunchedRun, "__init__", init)


def joins_do_not_wait_for_the_present_world(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun._join_at

    def join_at(self: Any, joiners: Any) -> float:
        self._nodes.unreached.clear()
        return real(self, joiners)

    plant.setattr(LaunchedRun, "_join_at", join_at)


def joins_have_no_window(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(LaunchedRun, "_join_at", lambda self, joiners: -math.inf)


def joins_never_happen(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(LaunchedRun, "_join_at", lambda self, joiners: math.inf)


def the_present_world_is_replaced_again_and_again(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun._publish

    def publish(self: Any, cause: Any, joiners: Any, at: float) -> Any:
        orders = real(self, cause, joiners, at)
        self._is_broken = True
        return orders

    plant.setattr(LaunchedRun, "_publish", publish)


def more_than_max_are_taken(plant: pytest.MonkeyPatch) -> None:
    real = RunNodes.give_seats
    plant.setattr(RunNodes, "give_seats", lambda self, number: real(self, number + 1))


def fewer_than_min_are_enough(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun._replace

    def replace(self: Any, joiners: Any, at: float) -> Any:
        settings = self.settings
        self.settings = dataclasses.replace(settings, min_nodes=1)
        orders = real(self, joiners, at)
        self.settings = settings
        return orders

    plant.setattr(LaunchedRun, "_replace", replace)


def a_store_is_used_twice(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(
        RunNodes, "free_port", lambda self, node_id: self.agents[node_id].state.store_port
    )
    plant.setattr(AgentMachine, "_take_store", lambda self, world: None)


def rank_0_may_be_a_newcomer(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(RunNodes, "_seniors", lambda self: set())


def rank_0_is_any_member(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(RunNodes, "_seniors", lambda self: set(self.members))


def those_that_wait_are_never_told_to_end(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(LaunchedRun, "_give_up", lambda self, at: [])
    plant.setattr(agent, "WAIT_SLACK_S", 1e6)


def survivors_are_restarted(plant: pytest.MonkeyPatch) -> None:
    steps = REACTIONS[RestartPolicy.HARD][RunEvent.SCALE_DOWN]
    plant.setitem(REACTIONS[RestartPolicy.SOFT], RunEvent.SCALE_DOWN, steps)


def a_join_uses_a_restart(plant: pytest.MonkeyPatch) -> None:
    steps = (Reaction.USE_RESTART, *REACTIONS[RestartPolicy.HARD][RunEvent.SCALE_UP])
    for event in (RunEvent.SCALE_UP, RunEvent.SCALE_DOWN):
        plant.setitem(REACTIONS[RestartPolicy.HARD], event, steps)


def restarts_are_not_counted(plant: pytest.MonkeyPatch) -> None:
    real = restart.event_of_failure
    plant.setattr(agent, "event_of_failure", lambda policy, left, *more: real(policy, 1, *more))


def workers_are_not_paused(plant: pytest.MonkeyPatch) -> None:
    steps = (Reaction.RENDEZVOUS, Reaction.RESUME)
    for event in (RunEvent.SCALE_UP, RunEvent.SCALE_DOWN):
        plant.setitem(REACTIONS[RestartPolicy.SOFT], event, steps)


def a_world_of_the_workers_before_is_entered(plant: pytest.MonkeyPatch) -> None:
    real = AgentMachine._leave_world

    def leave_world(self: Any, status: AgentStatus) -> None:
        real(self, status)
        self._passed_round = 0

    plant.setattr(AgentMachine, "_leave_world", leave_world)


def a_lighthouse_does_not_say_that_it_heard(plant: pytest.MonkeyPatch) -> None:
    real = run_nodes.Agent.tell

    def tell(self: Any, news: Any) -> Any:
        return [] if isinstance(news, RunWaiting) else real(self, news)

    plant.setattr(run_nodes.Agent, "tell", tell)


def an_old_world_is_entered_again(plant: pytest.MonkeyPatch) -> None:
    real = AgentMachine._hear_world

    def hear(self: Any, world: Any, now: float) -> None:
        if self.world is not None and self.entered is not None:
            world = dataclasses.replace(world, round=self.world.round + 1)
        real(self, world, now)

    plant.setattr(AgentMachine, "_hear_world", hear)


def ranks_are_those_of_arrival(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(run_nodes, "order_nodes", lambda survivors, joiners, *_: (*joiners, *survivors))
    assert node_ranks.order_nodes is not None


def a_world_is_not_taken_over(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(LaunchedRun, "_take_over", lambda self, hello, is_new, at: [])


def a_new_lighthouse_waits_for_nobody(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun._take_over

    def take_over(self: Any, hello: Any, is_new: bool, at: float) -> Any:
        orders = real(self, hello, is_new, at)
        self._awaited_until = min(self._awaited_until, at)
        return orders

    plant.setattr(LaunchedRun, "_take_over", take_over)


def a_new_lighthouse_begins_at_once(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun.__init__

    def init(self: Any, name: Any, settings: Any, timeout_s: float, most: int, at: float) -> None:
        real(self, name, settings, timeout_s, most, 0.0)

    plant.setattr(LaunchedRun, "__init__", init)


def seats_are_not_given_again(plant: pytest.MonkeyPatch) -> None:
    real = RunNodes.give_seats

    def give(self: Any, number: int) -> None:
        if not self.members:
            real(self, number)

    plant.setattr(RunNodes, "give_seats", give)


def nobody_looks_back_to_an_earlier_lighthouse(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(LaunchAgent, "_look_back", lambda self, end: None)


def a_standstill_is_ignored(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(LaunchedRun, "stood_still", lambda self, settle_s, at: None)


def those_that_move_are_lost_to_the_slowest(plant: pytest.MonkeyPatch) -> None:
    def moved(self: Any, move: RunMove, at: float) -> Any:
        *leaving, slowest = [each.stream for each in self._nodes.agents.values()]
        orders = [SendNews((*leaving, slowest), move), *map(EndStream, leaving)]
        for node_id, each in list(self._nodes.agents.items()):
            if each.stream != slowest:
                orders += self.gone(node_id, "it moves", at)
        return orders

    plant.setattr(LaunchedRun, "moved", moved)


def nodes_may_fail_however_often(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(RunFailures, "why_excluded", lambda self, node, at: "")


def runs_may_fail_however_often(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(RunFailures, "why_over", lambda self, at: "")


def a_run_that_has_begun_anew_elsewhere_is_not_taken_over(plant: pytest.MonkeyPatch) -> None:
    real = LaunchedRun._take_over

    def take_over(self: Any, hello: Any, is_new: bool, at: float) -> Any:
        return real(self, hello, False, at)

    plant.setattr(LaunchedRun, "_take_over", take_over)


def a_world_of_another_lighthouse_is_taken_for_the_present_one(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(LaunchedRun, "_is_apart", lambda self, hello: False)


# Each with the first of the seeds that are tried.
PLANTS: dict[Plant, int] = {
    losses_are_not_acted_on: 0,
    losses_are_acted_on_late: 0,
    the_silent_never_die: 50,
    joins_do_not_wait_for_the_present_world: 0,
    joins_have_no_window: 0,
    joins_never_happen: 200,
    the_present_world_is_replaced_again_and_again: 0,
    more_than_max_are_taken: 0,
    fewer_than_min_are_enough: 0,
    a_store_is_used_twice: 0,
    rank_0_may_be_a_newcomer: 0,
    rank_0_is_any_member: 0,
    those_that_wait_are_never_told_to_end: 0,
    survivors_are_restarted: 0,
    a_join_uses_a_restart: 0,
    restarts_are_not_counted: 0,
    workers_are_not_paused: 0,
    a_world_of_the_workers_before_is_entered: 0,
    a_lighthouse_does_not_say_that_it_heard: 0,
    an_old_world_is_entered_again: 0,
    ranks_are_those_of_arrival: 0,
    a_world_is_not_taken_over: 0,
    a_new_lighthouse_waits_for_nobody: 0,
    a_new_lighthouse_begins_at_once: 325,
    seats_are_not_given_again: 140,
    nobody_looks_back_to_an_earlier_lighthouse: 0,
    those_that_move_are_lost_to_the_slowest: 0,
    a_standstill_is_ignored: 904090,
    nodes_may_fail_however_often: 640,
    runs_may_fail_however_often: 600,
    a_run_that_has_begun_anew_elsewhere_is_not_taken_over: 16325,
    a_world_of_another_lighthouse_is_taken_for_the_present_one: 500,
}


def with_crashes(scenario: LaunchScenario) -> LaunchScenario:
    """Lighthouses that would freeze are killed."""
    faults = (
        dataclasses.replace(fault, kind="lighthouse_crash")
        if fault.kind == "lighthouse_freeze"
        else fault
        for fault in scenario.faults
    )
    return dataclasses.replace(scenario, faults=tuple(faults))


# Of what is rare otherwise.
CHANGES: dict[Plant, Callable[[LaunchScenario], LaunchScenario]] = {
    a_run_that_has_begun_anew_elsewhere_is_not_taken_over: with_crashes,
    a_world_of_another_lighthouse_is_taken_for_the_present_one: on_a_list_from_the_start,
}


@pytest.mark.parametrize(
    ("planted", "first"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS]
)
def test_it_is_found(planted: Plant, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    change = CHANGES.get(planted, lambda scenario: scenario)
    drawn = (draw_launch(seed) for seed in range(first, first + MAX_SEEDS))
    outcomes = (LaunchFleet(change(scenario)).run() for scenario in drawn)
    assert any(outcome.fell is not None for outcome in outcomes)
