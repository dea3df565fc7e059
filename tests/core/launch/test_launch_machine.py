"""Any life that agents can lead around a lighthouse keeps the rules of launched runs."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.core.launch import Agent, Launch

from torchft_svc.core.launch.agent import Outcome
from torchft_svc.core.launch.launched_run import ReportWorld
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.launch.world import AgentStatus

BUSY = [HealthCheck.too_slow]  # on a busy machine, slow is no sign of a fault
NAMES = "abcdef"
MAX_RESTARTS = 2


class Run(RuleBasedStateMachine):
    """Agents of one run start, die, fail, fall silent, and come back; so does the lighthouse."""

    launch: Launch
    num_started: int

    @initialize(
        least=st.integers(1, 2),
        more=st.integers(0, 2),
        policy=st.sampled_from([RestartPolicy.SOFT, *RestartPolicy]),
    )
    def begin(self, least: int, more: int, policy: RestartPolicy) -> None:
        self.launch = Launch(f"{least}:{least + more}", policy, max_restarts=MAX_RESTARTS)
        self.num_started = 0
        self.num_failures: dict[str, int] = {}
        for _ in range(least + 1):
            self.an_agent_starts(is_slow=False)
        self.launch.passes(2.0, step_s=0.05)

    def pick(self, data: st.DataObject, able: Callable[[Agent], bool]) -> str | None:
        found = [key for key, agent in self.launch.agents.items() if not agent.end and able(agent)]
        return data.draw(st.sampled_from(found)) if found else None

    @precondition(lambda self: len(self.launch.agents) < len(NAMES))
    @rule(is_slow=st.booleans())
    def an_agent_starts(self, is_slow: bool) -> None:
        self.num_started += 1
        name = f"n{self.num_started}"
        self.launch.start(name, is_slow=is_slow)
        self.num_failures[name] = 0

    @rule(data=st.data())
    def an_agent_dies(self, data: st.DataObject) -> None:
        name = self.pick(data, lambda agent: True)
        if name is not None:
            self.launch.kill(name)

    @rule(data=st.data())
    def a_stream_breaks(self, data: st.DataObject) -> None:
        name = self.pick(data, lambda agent: bool(agent.stream))
        if name is not None:
            self.launch.disconnect(name)

    @rule(data=st.data())
    def an_agent_connects(self, data: st.DataObject) -> None:
        name = self.pick(data, lambda agent: not agent.stream and not agent.left)
        if name is not None:
            self.launch.connect(name)

    @rule(data=st.data(), is_silent=st.booleans())
    def an_agent_falls_silent(self, data: st.DataObject, is_silent: bool) -> None:
        name = self.pick(data, lambda agent: True)
        if name is not None:
            agent = self.launch.agents[name]
            agent.is_silent = is_silent
            if not is_silent and agent.stream:  # what it missed was never sent, as on a new stream
                self.launch.disconnect(name)

    @rule(data=st.data())
    def a_worker_fails(self, data: st.DataObject) -> None:
        name = self.pick(
            data, lambda agent: bool(agent.worker_orders) and agent.names[-1] != "stop"
        )
        if name is not None:
            self.num_failures[name] += 1
            self.launch.fail(name, 1)

    @rule(data=st.data())
    def slow_workers_answer(self, data: st.DataObject) -> None:
        name = self.pick(data, lambda agent: agent.is_slow)
        if name is not None:
            self.launch.answer(name)

    @rule()
    def the_lighthouse_restarts(self) -> None:
        self.launch.restart_lighthouse()

    @rule(seconds=st.sampled_from([0.03, 0.3, 0.3, 2.0, 2.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.launch.passes(seconds, step_s=min(seconds, 0.05))

    @invariant()
    def worlds_are_within_their_bounds(self) -> None:
        launch = self.launch
        for report in launch.reports:
            if isinstance(report, ReportWorld):
                number = len(report.world.nodes)
                assert launch.settings.min_nodes <= number <= launch.settings.max_nodes
                assert len(set(report.world.node_ids)) == number

    @invariant()
    def all_nodes_of_a_world_receive_the_same(self) -> None:
        entered: dict[int, object] = {}
        for name, agent in self.launch.agents.items():
            world = agent.machine.entered
            if world is not None:
                assert name in world.node_ids
                nodes = set(world.node_ids)
                same = entered.setdefault(world.round, world)
                assert same == world or not nodes & set(same.node_ids)  # type: ignore[attr-defined]

    @invariant()
    def restarts_are_kept_within_their_budget(self) -> None:
        for name, agent in self.launch.agents.items():
            assert agent.machine.num_restarts <= min(MAX_RESTARTS, self.num_failures[name])

    @invariant()
    def survivors_are_not_restarted(self) -> None:
        if self.launch.policy.is_soft:
            for name, agent in self.launch.agents.items():
                assert agent.names.count("stop") <= self.num_failures[name] + bool(
                    (agent.machine.config.policy.is_soft and agent.end) or agent.left
                )

    def teardown(self) -> None:
        """Check that, in the end, all nodes that can are in one world, or have ended."""
        self.come_together()
        self.check_that_it_has_settled()

    def come_together(self) -> None:
        launch = self.launch
        for name, agent in list(launch.agents.items()):
            agent.is_slow = agent.is_silent = False
            if agent.end is None and agent.stream:
                launch.disconnect(name)
        launch.passes(0.01)
        for name, agent in list(launch.agents.items()):
            if agent.end is None and not agent.left:
                launch.connect(name)
        for _ in range(3):
            for name in list(launch.agents):
                launch.answer(name)
            launch.passes(40.0, step_s=0.2)

    def check_that_it_has_settled(self) -> None:
        launch = self.launch
        up = {name: agent for name, agent in launch.agents.items() if agent.end is None}
        if len(up) < launch.settings.min_nodes:
            assert not up
            return
        members = {
            name
            for name, agent in up.items()
            if agent.machine.state.status is AgentStatus.WORKING and agent.machine.state.reached
        }
        assert members
        assert len(members) == min(len(up), launch.settings.max_nodes)
        for name in members:
            entered = up[name].machine.entered
            assert entered is not None
            assert set(entered.node_ids) == members
        for agent in launch.agents.values():
            if agent.end is not None:
                assert agent.end.outcome is not Outcome.SUCCEEDED


TestRun = Run.TestCase
TestRun.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=BUSY
)
