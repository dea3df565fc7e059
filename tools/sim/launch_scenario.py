"""What a run of the launcher is: its nodes, settings and faults, all drawn from one seed."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from tools.sim.network import MAX_KEEPALIVE_S
from tools.sim.scenario import Fault
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.launch.world import RunSettings

# What may happen to a node, and how often, compared with each other.
NODE_FAULTS = {
    "kill_agent": 4.0,
    "kill_worker": 5.0,
    "fail_start": 1.0,
    "hang_workers": 1.0,
    "leave_world": 2.0,
    "freeze": 2.0,
    "freeze_agent": 1.0,
    "cut": 2.0,
    "reset": 3.0,
    "half_open": 1.0,
    "lag": 1.0,
    "stop": 1.0,
}
# Faults that a lighthouse notices at once.
PLAIN_FAULTS = ("kill_agent", "kill_worker", "fail_start")
LIGHTHOUSE_FAULTS = {
    "lighthouse_crash": 1.5,
    "lighthouse_freeze": 0.5,
    "change_leader": 1.0,
}
MAX_FAULTS = 20
FAULTS_END_S = 30.0
DURATIONS_S = (0.02, 0.3, 2.0, 6.0, 12.0)
EARLY = 0.1  # of the time until then
# Faults that come at nearly one moment.
BURST_S = 1.0
MAX_BURST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchScenario:
    """All that decides a run; durations in seconds."""

    seed: int
    num_nodes: int
    settings: RunSettings
    policy: RestartPolicy
    max_restarts: int
    max_soft_failures: int
    ready_timeout_s: float
    exit_barrier_timeout_s: float
    heartbeat_timeout_s: float
    num_lighthouses: int
    is_elected: bool  # one of them leads; else the first one of the list that is there serves
    start_spread_s: float
    worker_start_s: float
    returns_after_s: float  # an agent that ended, or died, is started again; 0: it is not
    finishes: bool
    is_ranked: bool  # nodes are given their ranks by hand
    faults: tuple[Fault, ...]

    @property
    def quiet_at(self) -> float:
        """Time when the last fault is over, and no agent starts any more."""
        ends = (fault.at + fault.seconds for fault in self.faults)
        return max(ends, default=0.0) + self.start_spread_s + self.worker_start_s + 1.0

    @property
    def patience_s(self) -> float:
        """How long after that nothing may change any more.

        A fault may have left somebody in each of the waits, one after the other.
        """
        parts = (
            self.settings.join_timeout_s,
            self.ready_timeout_s,
            self.settings.join_window_s,
            self.heartbeat_timeout_s,
            self.worker_start_s,
            MAX_KEEPALIVE_S,
        )
        return 3 * sum(parts) + 40.0


def draw_launch(seed: int, num_nodes: int | None = None) -> LaunchScenario:
    """Draw the scenario of ``seed``; ``num_nodes`` overrides the number drawn."""
    chance = random.Random(f"launch/{seed}")
    drawn = chance.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 8])
    nodes = drawn if num_nodes is None else num_nodes
    most = chance.choice([nodes, nodes, nodes, max(1, nodes - 1), nodes + 2])
    least = chance.choice([1, 1, 1, most, max(1, most - 1), max(1, most // 2)])
    least = min(least, nodes)
    soft = [RestartPolicy.SOFT] * 5
    policies = [*soft, RestartPolicy.HARD, RestartPolicy.SOFT_NO_REPLACE, *RestartPolicy]
    scenario = LaunchScenario(
        seed=seed,
        num_nodes=nodes,
        settings=RunSettings(
            min_nodes=least,
            max_nodes=most,
            join_timeout_s=chance.choice([8.0, 20.0, 60.0]),
            join_window_s=chance.choice([0.0, 0.5, 0.5, 2.0]),
            **_draw_options(seed),
        ),
        policy=chance.choice(policies),
        max_restarts=chance.choice([0, 1, 3, 3, 100]),
        max_soft_failures=chance.choice([0, 1, 3]),
        ready_timeout_s=chance.choice([0.0, 6.0, 20.0]),
        exit_barrier_timeout_s=chance.choice([3.0, 20.0]),
        heartbeat_timeout_s=chance.choice([1.0, 5.0, 5.0]),
        num_lighthouses=chance.choice([1, 1, 2]),
        is_elected=True,
        start_spread_s=chance.choice([0.0, 0.3, 10.0]),
        worker_start_s=chance.choice([0.1, 0.5, 2.0]),
        returns_after_s=chance.choice([0.0, 0.3, 3.0]),
        finishes=chance.random() < 0.25,
        is_ranked=chance.random() < 0.1,
        faults=_draw_faults(chance, nodes),
    )
    is_list = scenario.num_lighthouses > 1 and chance.random() < 0.5
    return _without_election(scenario) if is_list else scenario


def on_a_list_from_the_start(scenario: LaunchScenario) -> LaunchScenario:
    """Return ``scenario`` with a list of two lighthouses, and faults before the first world."""
    early = (dataclasses.replace(fault, at=EARLY * fault.at) for fault in scenario.faults)
    scenario = dataclasses.replace(scenario, num_lighthouses=2, faults=tuple(early))
    return _without_election(scenario)


def _without_election(scenario: LaunchScenario) -> LaunchScenario:
    """Return ``scenario`` without an elected leader that could change."""
    faults = (
        dataclasses.replace(fault, kind="lighthouse_crash")
        if fault.kind == "change_leader"
        else fault
        for fault in scenario.faults
    )
    return dataclasses.replace(scenario, is_elected=False, faults=tuple(faults))


def _draw_options(seed: int) -> dict[str, Any]:
    """Draw what is off in most runs; from a chance of its own, so that other runs stay the same."""
    chance = random.Random(f"options/{seed}")
    if chance.random() < 0.8:
        return {}
    return {
        "max_run_failures": chance.choice([None, 0, 2]),
        "max_node_failures": chance.choice([None, 0, 1]),
        "failure_window_s": chance.choice([5.0, 1e6, 1e6]),
        "waits_for_lost": chance.random() < 0.3,
    }


def _draw_faults(chance: random.Random, num_nodes: int) -> tuple[Fault, ...]:
    """Draw faults of a few kinds, each as often as chance has it: runs are to differ."""
    kinds = {**NODE_FAULTS, **LIGHTHOUSE_FAULTS}
    rates = {kind: rate * chance.choice([0.0, 0.3, 1.0, 3.0]) for kind, rate in kinds.items()}
    names, weights = list(rates), list(rates.values())
    if not any(weights):
        return ()
    faults: list[Fault] = []
    while len(faults) < chance.randint(0, MAX_FAULTS):
        at = chance.uniform(0.0, FAULTS_END_S)
        for _ in range(chance.choice([1, 1, 1, MAX_BURST])):
            faults.append(
                Fault(
                    at=at,
                    kind=chance.choices(names, weights)[0],
                    target=chance.randrange(num_nodes),
                    seconds=chance.choice(DURATIONS_S),
                    value=chance.random(),
                )
            )
            at += chance.uniform(0.0, BURST_S)
    return tuple(sorted(faults, key=lambda fault: fault.at))
