"""Checks the rules of launched runs on what happens, as it happens; each by its number (rule X4).

The checks keep ledgers of their own, from what was done and reported.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from tools.sim.invariants import SLACK_S, must
from tools.sim.launch_scenario import LaunchScenario
from tools.sim.network import MAX_KEEPALIVE_S
from tools.sim.world import VirtualWorld
from torchft_svc.core.launch.agent import (
    WAIT_SLACK_S,
    AgentMachine,
    Broadcast,
    End,
    Outcome,
    ReplaceWorkers,
    StartWorkers,
    StopWorkers,
)
from torchft_svc.core.launch.launched_run import Cause, Report, ReportRunMoved, ReportWorld
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.launch.worker_events import WorkerState, WorldChangeEvent
from torchft_svc.core.launch.world import AgentStatus, RunClosed, World, WorldNews, WorldReached

# How long a loss that is noticed at once may take to lead to another world, also after many others.
LOSS_S = 2.0
# Each cause may take a node out, and bring it back.
ROUNDS_PER_CAUSE = 2
_WAITING = (AgentStatus.JOINING, AgentStatus.READY)


@dataclass(slots=True)
class NodeLedger:
    """What has happened to one life of an agent."""

    node_id: str
    machine: AgentMachine
    num_failures: int = 0
    num_handled: int = 0  # failures before its workers were started last
    was_hung: bool = False
    is_counted: bool = True  # the lighthouse knows all of its failures
    was_stopped: bool = False
    was_closed: bool = False
    has_finished: bool = False
    has_state: bool = False  # its workers have been in a world that all reached
    has_workers: bool = False
    is_paused: bool = False
    waiting_since: float | None = None
    last_healthy_at: float = 0.0
    last_round: int = 0
    has_ended: bool = False
    troubled_until: float = -math.inf

    def is_in_reached_world(self) -> bool:
        state = self.machine.state
        return state.status is AgentStatus.WORKING and state.reached and not self.is_paused

    def is_waiting(self) -> bool:
        """Whether it waits for a world; a node that starts its workers does not."""
        status = self.machine.state.status
        return status in _WAITING or (self.is_paused and status is not AgentStatus.WARMING)


@dataclass(frozen=True, slots=True)
class Maker:
    """One life of a lighthouse.

    ``met``: nodes that have ever sent it something. ``highest_reported``: the highest round that a
    connected agent has reported.
    """

    name: str
    met: Set[str]
    highest_reported: int


class LaunchChecks:
    """The checks of one run."""

    def __init__(self, universe: VirtualWorld, scenario: LaunchScenario) -> None:
        self._universe = universe
        self._scenario = scenario
        self._settings = scenario.settings
        self.nodes: dict[str, NodeLedger] = {}
        self.num_causes = 0
        self.num_worlds = 0
        self.last_world: World | None = None
        self._made_at: dict[World, float] = {}
        self._makers: dict[World, str] = {}
        self._reached: dict[World, set[str]] = {}
        self._reported_as_reached: set[World] = set()
        self._entered: dict[World, dict[str, bool]] = {}
        self._stores: dict[tuple[str, int], World] = {}
        self._lighthouse_troubled_at = -math.inf
        self._knows_states = True  # the lighthouse: all have reported that they reached a world
        self._newest: World | None = None  # world that it has made

    # -- what happens to nodes -------------------------------------------------------------------

    def record_start(self, node: NodeLedger) -> None:
        self.nodes[node.node_id] = node
        node.last_healthy_at = self._universe.now
        self.num_causes += 1

    def record_trouble(self, node_id: str, seconds: float, num_causes: int = 1) -> None:
        """Record that a node is in trouble, and may be lost and come back ``num_causes`` times."""
        node = self.nodes[node_id]
        node.troubled_until = max(node.troubled_until, self._universe.now + seconds)
        self.num_causes += num_causes

    def record_trouble_of_all(self, seconds: float) -> None:
        """Record that the lighthouse is away."""
        for node in self.nodes.values():
            node.is_counted = False
            node.troubled_until = max(node.troubled_until, self._universe.now + seconds)
        self._lighthouse_troubled_at = self._universe.now + seconds
        self.num_causes += 1

    def forget_lighthouse(self) -> None:
        """Forget what a lighthouse has decided: it may have reached no agent of the next one."""
        self.last_world = None
        self._stores.clear()
        self._forget_states()

    def _forget_states(self) -> None:
        """Forget which nodes have trained, as the next lighthouse does not know that."""
        self._knows_states, self._newest = False, None

    @property
    def counts(self) -> tuple[int, int]:
        """How much has happened to nodes and lighthouses, and how many worlds were made."""
        num_failures = sum(node.num_failures for node in self.nodes.values())
        return self.num_causes + num_failures, self.num_worlds

    def expect_same(self, before: tuple[int, int]) -> None:
        """Expect the same world: a lighthouse was away, and nothing else has happened since."""
        num_causes, num_worlds = before
        if num_causes == self.counts[0]:
            rule = "L13" if self._scenario.is_elected else "L21"
            must(num_worlds == self.num_worlds, rule, "a new lighthouse makes another world")

    def expect_loss(self, node_id: str) -> None:
        """Expect a world without a node that died ``LOSS_S`` ago, if nothing hid that."""
        world = self.last_world
        since = self._universe.now - LOSS_S
        others = [each for key, each in self.nodes.items() if world and key in world.node_ids]
        is_calm = self._lighthouse_troubled_at < since - MAX_KEEPALIVE_S and all(
            each.troubled_until < since - MAX_KEEPALIVE_S
            or each.node_id == node_id
            or each.has_ended
            for each in others
        )
        is_over = any(each.has_finished or each.was_closed for each in self.nodes.values())
        if world is None or not is_calm or is_over:
            return
        left = [each for each in others if each.node_id != node_id and not each.has_ended]
        if len(left) >= self._settings.min_nodes and not any(each.num_failures for each in left):
            must(node_id not in world.node_ids, "L2", f"{node_id} is in {_shown(world)} still")

    def expect_limits(self) -> None:
        """Expect no node that has failed too often, unless something hid that."""
        settings = self._settings
        counted = [
            node.num_failures
            for node in self.nodes.values()
            if node.is_counted and not node.has_ended and node.is_in_reached_world()
        ]
        if settings.failure_window_s < self._universe.now or not counted:
            return
        if settings.max_node_failures is not None:
            must(max(counted) <= settings.max_node_failures, "L35", f"failed so often: {counted}")
        if settings.max_run_failures is not None:
            must(sum(counted) <= settings.max_run_failures, "L34", f"failed so often: {counted}")

    # -- what lighthouses decide -----------------------------------------------------------------

    def check_report(self, report: Report, by: Maker) -> None:
        """Check what a lighthouse reports."""
        if isinstance(report, ReportWorld):
            self._check_world(report, by)
        elif isinstance(report, ReportRunMoved):
            self._forget_states()
            for node in self.nodes.values():
                node.is_counted = False  # the next lighthouse begins to count anew

    def _check_world(self, report: ReportWorld, by: Maker) -> None:
        world, now = report.world, self._universe.now
        least, most = self._settings.min_nodes, self._settings.max_nodes
        number = len(world.nodes)
        must(least <= number <= most, "L9", f"{_shown(world)} is not within {least}:{most}")
        must(len(set(world.node_ids)) == number, "L5", f"a node is twice in {_shown(world)}")
        # On a list an agent may know more, from another lighthouse, and enters no older world.
        known = by.highest_reported if self._is_list() else self._highest_known(world)
        must(world.round > known, "L8", f"{_shown(world)} is made though {known} is known")
        store = (world.node_ids[0], world.master_port)
        must(store not in self._stores, "L7", f"{_shown(world)} has a store that was used")
        if report.cause is Cause.LOSS:
            self._check_losses(report, by)
        elif report.cause is Cause.JOIN:
            self._check_join(report)
        self.num_worlds += 1
        most_rounds = 1 + ROUNDS_PER_CAUSE * self.num_causes
        must(
            self.num_worlds <= most_rounds,
            "L3",
            f"{self.num_worlds} worlds for {self.num_causes} causes",
        )
        self.last_world = self._newest = world
        self._made_at[world], self._makers[world] = now, by.name

    def _is_list(self) -> bool:
        """Whether two lighthouses may make worlds at one time."""
        return self._scenario.num_lighthouses > 1 and not self._scenario.is_elected

    def _highest_known(self, world: World) -> int:
        """The highest round that its nodes have received."""
        known = [self.nodes[each].machine.state.round for each in world.node_ids]
        return max(known, default=0)

    def _check_losses(self, report: ReportWorld, by: Maker) -> None:
        grace_s = self._scenario.heartbeat_timeout_s + MAX_KEEPALIVE_S + SLACK_S
        is_paused = self._lighthouse_troubled_at + grace_s >= self._universe.now  # for one before
        must(
            bool(report.lost) or is_paused,
            "L2",
            f"{_shown(report.world)} follows a loss of nobody",
        )
        # A paused run may have been waiting since the loss for other nodes.
        since = self._made_at[self._newest] if self._newest else self._universe.now

        def was_troubled(node_id: str) -> bool:
            return self.nodes[node_id].troubled_until + grace_s >= since

        # A node that reaches only another lighthouse of a list waits in vain there for the others.
        is_apart = self._is_list() and any(map(was_troubled, report.world.node_ids))
        for node_id in report.lost:
            is_elsewhere = is_apart and node_id not in by.met
            has_reason = was_troubled(node_id) or is_elsewhere or self._is_over(node_id)
            must(has_reason, "L2", f"{node_id} was lost, but is well")

    def _check_join(self, report: ReportWorld) -> None:
        world, now = report.world, self._universe.now
        entered = [each for each in self._entered if each.round < world.round]
        before = max(entered, key=lambda each: each.round, default=None)
        survivors = set(world.node_ids) - set(report.joined)
        if before and before == self._newest:  # and not by a lighthouse that is gone
            reached = self._reached.get(before, set())
            is_reached = survivors & set(before.node_ids) <= reached
            is_old = now >= self._made_at[before] + self._settings.join_timeout_s
            what = f"{_shown(world)} is made before {before.round} is reached"
            must(is_reached or is_old, "L3", what)
        joined = [self.nodes[each] for each in report.joined]
        is_clear = all(each.troubled_until < 0 for each in joined)  # what they know is no older
        times = [each.waiting_since for each in joined if each.waiting_since and is_clear]
        since = min(times, default=-math.inf)
        is_full = len(world.nodes) == self._settings.max_nodes
        must(
            is_full or now >= since + self._settings.join_window_s - SLACK_S * 0.01,
            "L3",
            f"{_shown(world)} is made {now - since:.2f} s after the first one came",
        )

    # -- what agents do --------------------------------------------------------------------------

    def check_agent(self, node: NodeLedger) -> None:
        """Check an agent after each of its inputs."""
        machine, state, now = node.machine, node.machine.state, self._universe.now
        if state.reached and machine.entered is not None and not node.is_paused:
            self._record_reached(node.node_id, machine.entered)
        if node.is_waiting():
            if node.waiting_since is None:
                node.waiting_since = now
        else:
            node.waiting_since = None
        budget = machine.config.max_restarts
        must(
            machine.num_restarts <= min(budget, node.num_failures + 100 * node.was_hung),
            "L16",
            f"{node.node_id} has restarted {machine.num_restarts} times of {budget}, "
            f"after {node.num_failures} failures",
        )

    def _record_reached(self, node_id: str, world: World) -> None:
        reached = self._reached.setdefault(world, set())
        reached.add(node_id)
        nodes = [self.nodes[each] for each in world.node_ids]
        are_there = all(
            node.machine.entered == world
            and node.machine.state.status is AgentStatus.WORKING
            and node.has_workers
            and not node.has_ended
            for node in nodes
        )
        if are_there and reached >= set(world.node_ids):  # they train from now on
            if world == self._newest:
                self._knows_states = world in self._reported_as_reached
            for node in nodes:
                node.has_state = True

    def check_waits(self, is_awake: dict[str, float]) -> None:
        """Check that no node waits beyond its deadline.

        ``is_awake``: the nodes that run, and since when.
        """
        longest_s = self._settings.join_timeout_s + WAIT_SLACK_S + SLACK_S
        for node_id, since in is_awake.items():
            node = self.nodes[node_id]
            if node.waiting_since is None or node.has_ended:
                continue
            waits_s = self._universe.now - max(node.waiting_since, since)
            must(waits_s <= longest_s, "L18", f"{node_id} has waited for {waits_s:.1f} s")

    def check_news(self, node: NodeLedger, news: WorldNews) -> None:
        """Check what an agent receives."""
        if isinstance(news, RunClosed):
            node.was_closed = True
        entered = node.machine.entered
        if isinstance(news, WorldReached) and entered and entered.round == news.round:
            self._reported_as_reached.add(entered)
            for each in entered.node_ids:
                is_there = self._is_over(each) or each in self._entered[entered]
                must(
                    is_there,
                    "L8",
                    f"{_shown(entered)} is reported as reached, {each} was not in it",
                )

    def check_start(self, node: NodeLedger, order: StartWorkers) -> None:
        """Check that workers start alone, and in the newest world."""
        must(not node.has_workers, "L15", f"{node.node_id} starts workers beside others")
        node.has_workers, node.has_state = True, False
        node.num_handled = node.num_failures
        node.is_paused = order.is_expected
        must(
            order.is_expected or order.world is node.machine.world,
            "L8",
            f"{node.node_id} starts in {_shown(order.world)}, which is over",
        )
        if not order.is_expected:
            self._check_entry(node, order.world)

    def check_replacement(self, node: NodeLedger, order: ReplaceWorkers) -> None:
        """Check that a worker is replaced."""
        must(bool(order.local_ranks), "L15", f"{node.node_id} replaces nobody")
        node.has_state = False
        node.num_handled = node.num_failures

    def check_stop(self, node: NodeLedger, order: StopWorkers) -> None:
        """Check that under a soft policy workers end only for a reason of their own node."""
        node.has_workers = node.has_state = False
        has_reason = (
            node.num_failures > node.num_handled
            or node.was_hung
            or node.was_stopped
            or node.was_closed
        )
        if self._scenario.policy.is_soft and not has_reason:
            waited_s = self._universe.now - node.last_healthy_at
            is_over = waited_s >= self._settings.join_timeout_s + WAIT_SLACK_S - SLACK_S
            must(is_over, "L15", f"{node.node_id} ends its workers: {order.reason}")

    def check_broadcast(self, node: NodeLedger, order: Broadcast) -> None:
        """Check that workers are paused before they get another world."""
        if order.state is WorkerState.PAUSED:
            must(not node.is_paused, "L15", f"{node.node_id} pauses its workers twice")
            node.is_paused = True
            return
        must(node.is_paused, "L15", f"{node.node_id} sends a world without a pause")
        must(self._scenario.policy.is_soft, "L15", "a hard policy sends workers a world")
        must(isinstance(order.change, WorldChangeEvent), "L15", f"{node.node_id} sends no change")
        self._check_entry(node, order.world)

    def _check_entry(self, node: NodeLedger, world: World) -> None:
        must(world in self._makers, "L8", f"nobody has made {_shown(world)}")
        for other, entered in self._entered.items():
            is_like = other.round == world.round and self._makers[other] == self._makers[world]
            if is_like and other != world:
                there = [each for each in entered if not self._is_over(each)]
                is_apart = not set(there) & set(world.node_ids)  # its maker has forgotten the run
                must(is_apart, "L8", f"{_shown(world)} and {_shown(other)} have one round")
        must(world.round > node.last_round, "L8", f"{node.node_id} goes back to {_shown(world)}")
        must(node.node_id in world.node_ids, "L5", f"{node.node_id} is not in {_shown(world)}")
        store = (world.node_ids[0], world.master_port)
        used = self._stores.setdefault(store, world)
        must(used == world, "L7", f"{_shown(world)} has the store of {_shown(used)}")
        node.last_round, node.is_paused = world.round, False
        node.last_healthy_at = self._universe.now
        entered = self._entered.setdefault(world, {})
        entered[node.node_id] = node.has_state
        if self._knows_states and not entered.get(world.node_ids[0], True):
            must(
                not any(entered.values()),
                "L6",
                f"rank 0 of {_shown(world)} has no state, others have: {entered}",
            )

    def _is_over(self, node_id: str) -> bool:
        return self.nodes[node_id].has_ended

    def check_end(self, node: NodeLedger, end: End) -> None:
        """Check that an agent ends for the right reason."""
        node.has_ended = True
        outcome, machine = end.outcome, node.machine
        if outcome is Outcome.SUCCEEDED:
            must(node.has_finished, "L11", f"{node.node_id} has not finished")
        elif outcome is Outcome.RUN_CLOSED:
            must(node.was_closed, "L11", f"{node.node_id} did not receive that the run is over")
        elif outcome is Outcome.WORKERS_FAILED:
            never_restarts = self._scenario.policy is RestartPolicy.SOFT_NO_REPLACE
            must(
                never_restarts or machine.num_restarts_left == 0,
                "L16",
                f"{node.node_id} ends with {machine.num_restarts_left} restarts left",
            )
        if node.has_finished:
            must(outcome is Outcome.SUCCEEDED or node.was_stopped, "L11", f"it had finished: {end}")


def _shown(world: World) -> str:
    return f"world {world.round} of {', '.join(world.node_ids)}"
