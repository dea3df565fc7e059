"""Runs a scenario of the launcher: its nodes, its faults, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tools.sim.invariants import first_violation, must
from tools.sim.launch_agent import LaunchAgent
from tools.sim.launch_checks import LOSS_S, LaunchChecks
from tools.sim.launch_lighthouse import LaunchLighthouse
from tools.sim.launch_scenario import PLAIN_FAULTS, LaunchScenario
from tools.sim.network import MAX_KEEPALIVE_S, MEAN_LATENCY_S, Network
from tools.sim.scenario import Fault
from tools.sim.trace import Trace
from tools.sim.world import Process, VirtualWorld
from torchft_svc.core.launch.agent import AgentConfig
from torchft_svc.core.launch.world import Node

LAG_FACTOR = 2000.0
# How long an elected leader may be dead or frozen before another one is elected.
LEASE_S = 2.0
LOOK_S = 1.0
# How long nothing may change after all have come together, and those that finish differ.
STABLE_S = 30.0
FINISH_SPREAD_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """How a run ended: well, unless ``fell`` names a rule."""

    scenario: LaunchScenario
    fell: str | None
    what: str
    trace: tuple[str, ...]
    num_events: int
    num_worlds: int
    virtual_s: float


@dataclass(slots=True)
class _Site:
    """A host on which one agent runs after the other."""

    number: int
    num_lives: int = 0
    agent: LaunchAgent | None = None
    is_starting: bool = False


class LaunchFleet:
    """One run."""

    def __init__(self, scenario: LaunchScenario) -> None:
        self._scenario = scenario
        self.world = VirtualWorld(scenario.seed)
        self.network = Network(self.world)
        self.trace = Trace(self.world)
        self.checks = LaunchChecks(self.world, scenario)
        self.lighthouses = {
            f"lighthouse{number}": LaunchLighthouse(
                f"lighthouse{number}",
                not (scenario.is_elected and number),
                self.world,
                scenario.heartbeat_timeout_s,
                self.checks,
                self.trace,
            )
            for number in range(scenario.num_lighthouses)
        }
        self._leader = self.lighthouses["lighthouse0"]  # or the first of the list
        self._nature = self.world.process("nature")
        self.sites = [_Site(number) for number in range(scenario.num_nodes)]
        self._frozen_until: dict[str, float] = {}
        self._was_well = True  # the node to which something happens, before that

    def run(self) -> LaunchOutcome:
        """Run to the end: all that can are in one world, or have ended; or a rule is violated."""
        fell, what = first_violation(self._run)
        return LaunchOutcome(
            scenario=self._scenario,
            fell=fell,
            what=what,
            trace=tuple(self.trace.lines()),
            num_events=self.world.num_events,
            num_worlds=self.checks.num_worlds,
            virtual_s=self.world.now,
        )

    def _run(self) -> None:
        scenario = self._scenario
        chance = self.world.chance("begin")
        for site in self.sites:
            self._start_after(site, chance.uniform(0.0, scenario.start_spread_s))
        for fault in scenario.faults:
            self._nature.after(fault.at, self._cause_fault, fault)
        self._nature.after(LOOK_S, self._check_sites)
        self.world.run(scenario.quiet_at, lambda: False)
        for agent in self._up():
            agent.wants_next_start_to_fail = False
        for is_last in (False, True):
            if not self.world.run(self.world.now + scenario.patience_s, self._is_settled):
                self._explain()
            self.checks.expect_limits()
            num_worlds = self.checks.num_worlds
            self.world.run(self.world.now + STABLE_S, lambda: False)
            must(
                self.checks.num_worlds == num_worlds,
                "L3",
                "another world is made though nothing happens",
            )
            if is_last or not scenario.finishes:
                return
            self.trace.record("FAULT", "the workers come to their end")
            for agent in self._up():
                agent.process.after(chance.uniform(0.0, FINISH_SPREAD_S), agent.finish_workers)
            self.world.run(self.world.now + FINISH_SPREAD_S + 1.0, lambda: False)

    # -- agents ----------------------------------------------------------------------------------

    def _start_after(self, site: _Site, delay_s: float) -> None:
        if not site.is_starting:
            site.is_starting = True
            self._nature.after(delay_s, self._start, site)

    def _start(self, site: _Site) -> None:
        scenario = self._scenario
        site.is_starting = False
        site.num_lives += 1
        node_id = f"n{site.number}.{site.num_lives}"
        is_ranked = scenario.is_ranked and site.number < scenario.settings.max_nodes
        config = AgentConfig(
            node=Node(
                node_id=node_id,
                host=f"host{site.number}",
                num_workers=1 + site.number % 3,
                rank=site.number if is_ranked else None,
            ),
            settings=scenario.settings,
            policy=scenario.policy,
            max_restarts=scenario.max_restarts,
            ready_timeout_s=scenario.ready_timeout_s,
            exit_barrier_timeout_s=scenario.exit_barrier_timeout_s,
            max_soft_failures=scenario.max_soft_failures,
        )
        self.trace.record(node_id, "begins")
        site.agent = LaunchAgent(
            config,
            self.world,
            self.network,
            self.lighthouses,
            self.checks,
            self.trace,
            scenario.worker_start_s,
        )

    def _up(self) -> list[LaunchAgent]:
        return [site.agent for site in self.sites if site.agent is not None and site.agent.is_up]

    def _check_sites(self) -> None:
        now = self.world.now
        awake = {}
        for site in self.sites:
            agent = site.agent
            if agent is None:
                continue
            if not agent.is_up:
                after_s = self._scenario.returns_after_s
                if after_s and now + after_s < self._scenario.quiet_at:
                    self._start_after(site, after_s)
            elif not agent.process.is_frozen:
                awake[agent.node_id] = self._frozen_until.get(agent.node_id, 0.0)
        self.checks.check_waits(awake)
        self._nature.after(LOOK_S, self._check_sites)

    # -- faults ----------------------------------------------------------------------------------

    def _cause_fault(self, fault: Fault) -> None:
        self.trace.record("FAULT", str(fault).split("s  ", 1)[1])
        if fault.kind in ("lighthouse_crash", "lighthouse_freeze", "change_leader"):
            are_well = all(agent.ledger.troubled_until < self.world.now for agent in self._up())
            are_well &= not any(map(self.network.is_cut, self.checks.nodes))  # nor not missed yet
            self.checks.record_trouble_of_all(fault.seconds + MAX_KEEPALIVE_S)
            if are_well and self._is_settled():
                back_s = fault.seconds + LEASE_S + self._scenario.heartbeat_timeout_s + LOSS_S
                self._nature.after(back_s, self.checks.expect_same, self.checks.counts)
            getattr(self, f"_{fault.kind}")(fault)
            return
        agent = self.sites[fault.target % len(self.sites)].agent
        if agent is not None and agent.is_up:
            self._was_well = self.checks.nodes[agent.node_id].troubled_until <= self.world.now
            self.checks.record_trouble(agent.node_id, fault.seconds)
            agent.ledger.is_counted &= fault.kind in PLAIN_FAULTS
            getattr(self, f"_{fault.kind}")(agent, fault)

    def _kill_agent(self, agent: LaunchAgent, fault: Fault) -> None:
        is_plain = not (agent.process.is_frozen or self.network.is_cut(agent.node_id))
        agent.kill()
        self.checks.nodes[agent.node_id].has_ended = True
        if is_plain and self._was_well:
            self._nature.after(LOSS_S, self.checks.expect_loss, agent.node_id)

    def _kill_worker(self, agent: LaunchAgent, fault: Fault) -> None:
        agent.kill_worker()

    def _fail_start(self, agent: LaunchAgent, fault: Fault) -> None:
        agent.wants_next_start_to_fail = True
        agent.kill_worker()

    def _leave_world(self, agent: LaunchAgent, fault: Fault) -> None:
        agent.break_process_group()

    def _hang_workers(self, agent: LaunchAgent, fault: Fault) -> None:
        self.checks.record_trouble(
            agent.node_id, fault.seconds + 2 * self._scenario.ready_timeout_s
        )
        agent.ledger.was_hung = True
        agent.workers.hung_until = self.world.now + fault.seconds

    def _freeze(self, agent: LaunchAgent, fault: Fault) -> None:
        self._stop_processes(agent, agent.processes(), fault.seconds)

    def _freeze_agent(self, agent: LaunchAgent, fault: Fault) -> None:
        self._stop_processes(agent, [agent.process], fault.seconds)

    def _stop_processes(
        self, agent: LaunchAgent, processes: Iterable[Process], seconds: float
    ) -> None:
        until = self.world.now + seconds
        self._frozen_until[agent.node_id] = max(self._frozen_until.get(agent.node_id, 0.0), until)
        for process in processes:
            process.freeze()
        self._nature.after(seconds, self._thaw, agent)
        noticed_s = self._scenario.heartbeat_timeout_s + LOSS_S
        if seconds > noticed_s and self._was_well:
            self._nature.after(noticed_s, self._expect_frozen, agent, self.world.now)

    def _thaw(self, agent: LaunchAgent) -> None:
        """Let it go on, if it was not frozen again meanwhile, for longer."""
        if self.world.now >= self._frozen_until[agent.node_id]:
            for process in agent.processes():
                process.thaw()

    def _expect_frozen(self, agent: LaunchAgent, since: float) -> None:
        """Expect its loss, as it was silent for longer than the heartbeat timeout."""
        if agent.is_up and agent.process.is_frozen and agent.process.thawed_at < since:
            self.checks.expect_loss(agent.node_id)

    def _cut(self, agent: LaunchAgent, fault: Fault) -> None:
        self.checks.record_trouble(agent.node_id, fault.seconds + MAX_KEEPALIVE_S)
        self.network.cut(agent.node_id)
        self._nature.after(fault.seconds, self.network.mend, agent.node_id)

    def _reset(self, agent: LaunchAgent, fault: Fault) -> None:
        self.network.break_streams(agent.node_id)

    def _half_open(self, agent: LaunchAgent, fault: Fault) -> None:
        self.checks.record_trouble(agent.node_id, MAX_KEEPALIVE_S)
        self.network.half_open(agent.node_id)

    def _lag(self, agent: LaunchAgent, fault: Fault) -> None:
        factor = LAG_FACTOR * fault.value
        seconds = fault.seconds + 10.0 * factor * MEAN_LATENCY_S
        num_timeouts = math.ceil(seconds / self._scenario.heartbeat_timeout_s)
        self.checks.record_trouble(agent.node_id, seconds, num_timeouts)
        self.network.set_lag(agent.node_id, factor)
        self._nature.after(fault.seconds, self.network.set_lag, agent.node_id, 1.0)

    def _stop(self, agent: LaunchAgent, fault: Fault) -> None:
        agent.stop()

    def _lighthouse_crash(self, fault: Fault) -> None:
        lighthouse = self._afflicted(fault)
        lighthouse.crash(fault.seconds)
        if self._scenario.is_elected:
            self._nature.after(LEASE_S, self._elect, lighthouse)

    def _lighthouse_freeze(self, fault: Fault) -> None:
        lighthouse = self._afflicted(fault)
        until = max(self._frozen_until.get(lighthouse.name, 0.0), self.world.now + fault.seconds)
        self._frozen_until[lighthouse.name] = until
        lighthouse.process.freeze()
        self._nature.after(fault.seconds, self._thaw_lighthouse, lighthouse)
        for agent in self._up():
            agent.await_frozen(lighthouse)
        if self._scenario.is_elected:
            self._nature.after(LEASE_S, self._elect, lighthouse)
        else:
            self.checks.forget_lighthouse()

    def _thaw_lighthouse(self, lighthouse: LaunchLighthouse) -> None:
        if self.world.now >= self._frozen_until[lighthouse.name]:
            lighthouse.process.thaw()
            if not self._scenario.is_elected:
                self.checks.forget_lighthouse()

    def _afflicted(self, fault: Fault) -> LaunchLighthouse:
        """The lighthouse that has this fault."""
        hosts = list(self.lighthouses.values())
        return self._leader if self._scenario.is_elected else hosts[fault.target % len(hosts)]

    def _change_leader(self, fault: Fault) -> None:
        self._elect(self._leader, is_forced=True)

    def _elect(self, before: LaunchLighthouse, is_forced: bool = False) -> None:
        """Let another one lead, if the leader cannot."""
        is_up = not (before.process.is_dead or before.process.is_frozen)
        able = [
            each
            for each in self.lighthouses.values()
            if each is not before and not (each.process.is_dead or each.process.is_frozen)
        ]
        if before is not self._leader or not able or (is_up and not is_forced):
            if is_forced and is_up:
                before.end_lead("")
                self._nature.after(0.1, self._lead_again, before)
            return
        self._leader = able[0]
        before.end_lead(able[0].name)
        able[0].leads = True

    def _lead_again(self, lighthouse: LaunchLighthouse) -> None:
        lighthouse.leads = lighthouse is self._leader

    # -- how it goes -----------------------------------------------------------------------------

    def _is_settled(self) -> bool:
        """Whether all that can are in one world, and know it, or all have ended."""
        agents = self._up()
        if not agents:
            return True
        if any(agent.ledger.has_finished or agent.workers.are_failing for agent in agents):
            return False
        settings = self._scenario.settings
        wanted = min(len(agents), settings.max_nodes)
        if wanted < settings.min_nodes:
            return False
        world = max(
            (agent.machine.entered for agent in agents if agent.machine.entered is not None),
            key=lambda each: each.round,
            default=None,
        )
        if world is None or len(world.nodes) != wanted:
            return False
        members = [agent for agent in agents if agent.node_id in world.node_ids]
        is_known = len(members) == wanted and all(
            agent.machine.entered == world and agent.ledger.is_in_reached_world()
            for agent in members
        )
        return is_known and self._is_known_to_leader(world.round, wanted)

    def _is_known_to_leader(self, round_: int, num_nodes: int) -> bool:
        """Whether the lighthouse knows as well that so many nodes are in this world."""
        if self._leader.process.is_dead or self._leader.process.is_frozen:
            return False
        runs = self._leader.core.status("", self.world.now)
        return any(
            run.round == round_ and sum(node.reached for node in run.nodes) == num_nodes
            for run in runs
        )

    def _explain(self) -> None:
        """Fail with what each node waits for."""
        waits = [
            f"{agent.node_id} {agent.machine.state.status.value} in round "
            f"{agent.machine.state.round}{' paused' if agent.ledger.is_paused else ''}"
            for agent in self._up()
        ]
        why = [str(each) for each in self._leader.core.status("", self.world.now)]
        quiet_s = self.world.now - self._scenario.quiet_at
        must(False, "I5", f"it has not settled after {quiet_s:.0f} s: {waits}; {why}")
