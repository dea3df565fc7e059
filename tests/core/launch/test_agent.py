"""Tests what an agent does with its workers: inputs, and the orders that come out of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.core.launch import Agent, Launch

from torchft_svc.core.launch.agent import (
    WAIT_SLACK_S,
    AgentConfig,
    AgentMachine,
    Broadcast,
    End,
    OpenStore,
    Order,
    Outcome,
    ReplaceWorkers,
    SendLeave,
    SendState,
    StartWorkers,
    StopWorkers,
)
from torchft_svc.core.launch.restart import REACTIONS, RestartPolicy, RunEvent
from torchft_svc.core.launch.worker_events import WorkerState, WorldChangeEvent
from torchft_svc.core.launch.world import (
    AgentLeave,
    AgentState,
    AgentStatus,
    AgentWelcome,
    Node,
    RunClosed,
    RunSettings,
    RunWaiting,
    WarmUp,
    World,
    WorldPaused,
)
from torchft_svc.errors import ConfigError

ME = Node(node_id="me", host="here", num_workers=2)
OTHER = Node(node_id="other", host="there", num_workers=2)
SETTINGS = RunSettings(min_nodes=1, max_nodes=4, join_timeout_s=60.0)
NO_ANSWER = (
    "workers did not answer within 10 s: they have to call get_worker_info() and "
    "get_pg_parameters()"
)
ALONE, BOTH = World(1, (ME,), 2000), World(2, (OTHER, ME), 3000)
UP, DOWN = WorldChangeEvent.SCALE_UP, WorldChangeEvent.SCALE_DOWN
SOFT = [policy for policy in RestartPolicy if policy.is_soft]


def config(policy: RestartPolicy = RestartPolicy.SOFT, **more: Any) -> AgentConfig:
    return AgentConfig(node=ME, settings=SETTINGS, policy=policy, **more)


class Play:
    """An agent, whose orders are looked at one after the other."""

    def __init__(self, policy: RestartPolicy = RestartPolicy.SOFT, **more: Any) -> None:
        self.now = 0.0
        self.machine = AgentMachine(config(policy, **more), 0.0)
        self.state: AgentState | None = None
        self.does("started", None, OpenStore())

    def does(self, what: str, argument: Any, *expected: Order, **more: Any) -> None:
        """Check that this input leads to these orders, besides the state for the lighthouse."""
        take = getattr(self.machine, what)
        given = take(self.now) if argument is None else take(*argument, self.now, **more)
        sent = [order for order in given if isinstance(order, SendState)]
        assert len(sent) <= 1
        if sent:
            assert given[-1] is sent[0], "it sends its state when all is done"
            self.state = sent[0].state
        assert tuple(order for order in given if not isinstance(order, SendState)) == expected

    def receives(self, news: Any, *expected: Order) -> None:
        self.does("news_received", (news,), *expected)

    def reports(self, status: AgentStatus, **more: Any) -> None:
        assert self.state is not None
        shown = {"status": status, **more}
        assert {key: getattr(self.state, key) for key in shown} == shown

    def passes(self, seconds: float, *expected: Order) -> None:
        """Time passes, with ticks when they are asked for; the last ones give these orders."""
        until, given = self.now + seconds, ()
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            given = self.machine.tick(self.now)
            if given:
                break
        else:
            self.now = until
        for order in given:
            if isinstance(order, SendState):
                self.state = order.state
        assert tuple(order for order in given if not isinstance(order, SendState)) == expected


def working(policy: RestartPolicy = RestartPolicy.SOFT, **more: Any) -> Play:
    """A node whose workers have reached the world of round 1."""
    play = Play(policy, **more)
    play.does("store_opened", (2000,))
    play.receives(ALONE, OpenStore(), StartWorkers(ALONE, False, 0))
    play.does("workers_ready", None)
    play.does("workers_reached", (1,))
    play.reports(AgentStatus.WORKING, round=1, reached=True)
    return play


# -- the beginning -------------------------------------------------------------------------------


def test_a_cold_start() -> None:
    play = Play()
    play.reports(AgentStatus.JOINING, round=0, store_port=0, can_warm_up=True)
    play.does("store_opened", (2000,))
    play.reports(AgentStatus.JOINING, store_port=2000)
    play.receives(RunWaiting("more nodes may join"))
    play.receives(ALONE, OpenStore(), StartWorkers(ALONE, False, 0))
    play.reports(AgentStatus.WORKING, round=1, reached=False, store_port=0)
    play.does("workers_reached", (1,))
    play.reports(AgentStatus.WORKING, reached=True)
    assert play.machine.world == ALONE


def test_a_warm_start() -> None:
    play = Play()
    expected = World(7, (OTHER, ME), 3000)
    play.receives(WarmUp(expected), StartWorkers(expected, True, 0))
    play.reports(AgentStatus.WARMING, round=0)
    play.does("workers_ready", None)
    play.reports(AgentStatus.READY)
    world = dataclasses.replace(expected, round=8)
    play.receives(world, Broadcast(WorkerState.HEALTHY, world, UP))
    play.reports(AgentStatus.WORKING, round=8, reached=False)


def test_a_world_that_comes_too_early_is_passed_by() -> None:
    """The nodes of the world do not wait until these workers are ready (rule L17)."""
    play = Play()
    play.receives(WarmUp(BOTH), StartWorkers(BOTH, True, 0))
    play.receives(BOTH)
    play.reports(AgentStatus.WARMING, round=2)
    play.does("workers_ready", None)
    world = dataclasses.replace(BOTH, round=3)
    play.receives(world, Broadcast(WorkerState.HEALTHY, world, UP))


def test_worlds_that_are_old_or_of_others_are_ignored() -> None:
    play = working()
    play.receives(ALONE)
    play.receives(World(9, (OTHER,), 3000))
    play.reports(AgentStatus.WORKING, round=1, reached=True)


# -- changes (rule L15) --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SOFT)
def test_soft_scale_up_and_down(policy: RestartPolicy) -> None:
    play = working(policy)
    play.receives(
        BOTH, Broadcast(WorkerState.PAUSED, ALONE, UP), Broadcast(WorkerState.HEALTHY, BOTH, UP)
    )
    play.reports(AgentStatus.WORKING, round=2, reached=False)
    play.does("workers_reached", (1,))
    play.reports(AgentStatus.WORKING, reached=False)
    play.does("workers_reached", (2,))
    play.reports(AgentStatus.WORKING, reached=True)
    smaller = World(3, (ME,), 2001)
    play.receives(
        smaller,
        Broadcast(WorkerState.PAUSED, BOTH, DOWN),
        Broadcast(WorkerState.HEALTHY, smaller, DOWN),
    )


@pytest.mark.parametrize("news", [WorldPaused("too few"), RunWaiting("it goes on without you")])
def test_soft_workers_pause_until_there_is_another_world(news: Any) -> None:
    play = working()
    play.receives(news, Broadcast(WorkerState.PAUSED, ALONE, DOWN))
    play.receives(news)
    play.reports(AgentStatus.WORKING, round=1)
    play.receives(BOTH, Broadcast(WorkerState.HEALTHY, BOTH, UP))


def test_a_node_that_was_left_out_opens_another_store() -> None:
    """The world that it was not sent may have used its store (rule L7)."""
    play = working()
    play.does("store_opened", (2001,))
    play.receives(RunWaiting("it goes on"), OpenStore(), Broadcast(WorkerState.PAUSED, ALONE, DOWN))
    play.reports(AgentStatus.WORKING, store_port=0)


def test_a_node_that_has_connected_again_and_is_left_out_opens_another_store() -> None:
    """The node opens one even while it waits for another world anyway (rule L7)."""
    play = working()
    play.does("store_opened", (2001,))
    play.receives(AgentWelcome(1.0))
    play.receives(WorldPaused("few are left"), Broadcast(WorkerState.PAUSED, ALONE, DOWN))
    play.receives(RunWaiting("it is in no world yet"))
    play.receives(AgentWelcome(1.0))
    play.receives(RunWaiting("it is in no world yet"), OpenStore())
    play.does("store_opened", (2002,))
    play.receives(RunWaiting("more nodes may join"))
    play.reports(AgentStatus.WORKING, store_port=2002)


def test_hard_restarts_for_each_change_and_uses_no_restart() -> None:
    play = working(RestartPolicy.HARD, max_restarts=1)
    play.receives(BOTH, StopWorkers("the world changes"))
    play.reports(AgentStatus.WORKING, round=2, reached=False)
    newer = dataclasses.replace(BOTH, round=3)
    play.receives(newer)
    play.does("workers_stopped", None, StartWorkers(newer, False, 0))
    play.receives(WorldPaused("too few"), StopWorkers("the world changes"))
    play.does("workers_stopped", None)
    assert play.machine.num_restarts_left == 1


# -- failures (rules L16 and L17) ----------------------------------------------------------------


def test_soft_failure() -> None:
    play = working(max_restarts=1)
    play.does("workers_failed", ("it died", (1,)), StopWorkers("it died"))
    play.reports(AgentStatus.WARMING, round=1, num_restarts=1, reached=False)
    play.does("workers_failed", ("ended", (0,)))
    play.does("workers_stopped", None, StartWorkers(ALONE, True, 1))
    play.receives(RunWaiting("it is in no world yet", num_failures=1))
    play.does("workers_ready", None)
    play.reports(AgentStatus.READY, round=1)
    play.receives(BOTH, Broadcast(WorkerState.HEALTHY, BOTH, UP))
    play.does("workers_failed", ("again", (1,)), SendLeave(AgentLeave("again", failed=True)),
              StopWorkers("again"))  # fmt: skip
    play.does("workers_stopped", None, End(Outcome.WORKERS_FAILED, "again"))
    play.receives(World(3, (ME,), 2001))
    assert play.machine.next_deadline() is None


def test_a_world_that_was_made_for_workers_that_have_failed_is_not_entered() -> None:
    """The workers start before the lighthouse has received news of the failure (rule L17).

    What it has sent before may be on its way for long.
    """
    play = working(max_restarts=1)
    play.does("workers_failed", ("it died", (1,)), StopWorkers("it died"))
    play.does("workers_stopped", None, StartWorkers(ALONE, True, 1))
    play.does("workers_ready", None)
    play.receives(RunWaiting("a sign of life is missing"))
    play.receives(BOTH)
    play.reports(AgentStatus.READY, round=2, reached=False)
    play.receives(RunWaiting("it is in no world yet", num_failures=1))
    newer = dataclasses.replace(BOTH, round=3)
    play.receives(newer, Broadcast(WorkerState.HEALTHY, newer, UP))


def test_hard_failure() -> None:
    play = working(RestartPolicy.HARD, max_restarts=1)
    play.does("workers_failed", ("it died", (1,)), StopWorkers("it died"))
    play.reports(AgentStatus.JOINING, round=1, num_restarts=1)
    play.receives(BOTH)
    play.reports(AgentStatus.WORKING, round=2, reached=False)
    play.does("workers_stopped", None, StartWorkers(BOTH, False, 1))
    leave = SendLeave(AgentLeave("again", failed=True, closes=True))
    play.does("workers_failed", ("again", (0,)), leave, StopWorkers("again"))
    play.does("workers_stopped", None, End(Outcome.WORKERS_FAILED, "again"))


@pytest.mark.parametrize("policy", RestartPolicy)
def test_a_failure_that_no_restart_mends_uses_none(policy: RestartPolicy) -> None:
    play = working(policy, max_restarts=5)
    closes = policy is RestartPolicy.HARD
    leave = SendLeave(AgentLeave("bad settings", failed=True, closes=closes, final=True))
    stop = StopWorkers("bad settings")
    play.does("workers_failed", ("bad settings", (1,)), leave, stop, is_final=True)
    play.does("workers_stopped", None, End(Outcome.WORKERS_FAILED, "bad settings", final=True))


def test_after_a_final_failure_that_a_policy_restarts_the_next_one_is_judged_by_itself() -> None:
    policy = RestartPolicy.SOFT_REPLACE
    own = {RunEvent.FINAL_FAILURE: REACTIONS[policy][RunEvent.WORKER_FAILURE]}
    play = working(policy, ready_timeout_s=10.0, max_restarts=1, reactions=own)
    play.does(
        "workers_failed",
        ("bad settings", (1,)),
        Broadcast(WorkerState.PAUSED, ALONE, DOWN),
        ReplaceWorkers((1,), ALONE, 1),
        is_final=True,
    )
    leave = SendLeave(AgentLeave(NO_ANSWER, failed=True))
    play.passes(11.0, leave, StopWorkers(NO_ANSWER))


@pytest.mark.parametrize("policy", [RestartPolicy.HARD, RestartPolicy.SOFT])
def test_restarts_that_never_get_beyond_a_step_end_the_run(policy: RestartPolicy) -> None:
    play = working(policy, max_restarts=5, max_restarts_without_progress=1)
    play.does("workers_failed", ("it died", (1,)), StopWorkers("it died"), step=7)
    if policy is RestartPolicy.HARD:
        play.receives(BOTH)
        play.does("workers_stopped", None, StartWorkers(BOTH, False, 1))
    else:
        play.does("workers_stopped", None, StartWorkers(ALONE, True, 1))
    reason = "1 restart has not got beyond step 7: again"
    leave = SendLeave(AgentLeave(reason, failed=True, closes=True, final=True))
    play.does("workers_failed", ("again", (0,)), leave, StopWorkers(reason), step=7)
    play.does("workers_stopped", None, End(Outcome.WORKERS_FAILED, reason, final=True))


def test_a_run_that_is_closed_for_good_ends_so_on_all_nodes() -> None:
    play = working()
    play.receives(RunClosed("in vain", failed=True, final=True), StopWorkers("in vain"))
    play.does("workers_stopped", None, End(Outcome.RUN_CLOSED, "in vain", final=True))


def test_soft_no_replace_leaves_with_its_first_failure() -> None:
    play = working(RestartPolicy.SOFT_NO_REPLACE, max_restarts=5)
    leave = SendLeave(AgentLeave("it died", failed=True))
    play.does("workers_failed", ("it died", (1,)), leave, StopWorkers("it died"))
    play.does("workers_stopped", None, End(Outcome.WORKERS_FAILED, "it died"))
    assert play.machine.num_restarts_left == 5


def test_soft_replace_starts_only_the_dead_worker_and_escalates() -> None:
    play = working(RestartPolicy.SOFT_REPLACE, max_restarts=5, max_soft_failures=1)
    play.does(
        "workers_failed",
        ("it died", (1,)),
        Broadcast(WorkerState.PAUSED, ALONE, DOWN),
        ReplaceWorkers((1,), ALONE, 1),
    )
    play.reports(AgentStatus.WARMING, round=1, num_restarts=1)
    play.receives(RunWaiting("it is in no world yet", num_failures=1))
    play.does("workers_ready", None)
    world = World(2, (ME,), 2001)
    play.receives(world, Broadcast(WorkerState.HEALTHY, world, DOWN))
    play.does("workers_failed", ("again", (0,)), StopWorkers("again"))
    play.does("workers_stopped", None, StartWorkers(world, True, 2))
    assert play.machine.num_restarts_left == 3


def test_soft_replace_leaves_workers_alone_that_are_being_started_anew() -> None:
    play = working(RestartPolicy.SOFT_REPLACE, max_restarts=5)
    play.does(
        "workers_failed",
        ("it died", (1,)),
        Broadcast(WorkerState.PAUSED, ALONE, DOWN),
        ReplaceWorkers((1,), ALONE, 1),
    )
    play.does("workers_failed", ("so did its peer", (0,)), ReplaceWorkers((0,), ALONE, 2))
    play.does("workers_failed", ("again", (1,)), ReplaceWorkers((1,), ALONE, 3))
    play.reports(AgentStatus.WARMING, round=1, num_restarts=3)


@pytest.mark.parametrize(("pause_s", "is_soft"), [(59.0, False), (61.0, True)])
def test_soft_replace_forgets_failures_after_a_while(pause_s: float, is_soft: bool) -> None:
    play = working(
        RestartPolicy.SOFT_REPLACE, max_restarts=5, max_soft_failures=1, failure_window_s=60.0
    )
    replaces = Broadcast(WorkerState.PAUSED, ALONE, DOWN), ReplaceWorkers((1,), ALONE, 1)
    play.does("workers_failed", ("it died", (1,)), *replaces)
    play.receives(RunWaiting("it is in no world yet", num_failures=1))
    play.does("workers_ready", None)
    world = World(2, (ME,), 2001)
    play.receives(world, Broadcast(WorkerState.HEALTHY, world, DOWN))
    play.does("workers_reached", (2,))
    play.now += pause_s
    again = Broadcast(WorkerState.PAUSED, world, DOWN), ReplaceWorkers((0,), world, 2)
    play.does("workers_failed", ("again", (0,)), *(again if is_soft else [StopWorkers("again")]))


def test_a_worker_that_fails_while_it_is_started_early_uses_a_restart() -> None:
    play = Play(max_restarts=1)
    play.receives(WarmUp(BOTH), StartWorkers(BOTH, True, 0))
    play.does("workers_failed", ("no script", (0, 1)), StopWorkers("no script"))
    play.does("workers_stopped", None, StartWorkers(BOTH, True, 1))
    play.reports(AgentStatus.WARMING, num_restarts=1)


# -- deadlines (rule L18) ------------------------------------------------------------------------


def test_workers_that_do_not_reach_a_world_have_failed() -> None:
    play = working(ready_timeout_s=10.0, max_restarts=1)
    assert play.machine.next_deadline() is None
    play.receives(
        BOTH, Broadcast(WorkerState.PAUSED, ALONE, UP), Broadcast(WorkerState.HEALTHY, BOTH, UP)
    )
    play.passes(9.0)
    play.passes(2.0, StopWorkers(NO_ANSWER))
    play.reports(AgentStatus.WARMING, round=2, num_restarts=1)
    assert play.now == pytest.approx(10.0)


def test_a_missed_deadline_is_answered_by_a_restart_of_all_workers() -> None:
    play = working(RestartPolicy.SOFT_REPLACE, ready_timeout_s=10.0, max_restarts=5)
    play.does(
        "workers_failed",
        ("it died", (1,)),
        Broadcast(WorkerState.PAUSED, ALONE, DOWN),
        ReplaceWorkers((1,), ALONE, 1),
    )
    play.passes(11.0, StopWorkers(NO_ANSWER))
    play.does("workers_stopped", None, StartWorkers(ALONE, True, 2))


def test_without_a_ready_timeout_workers_are_asked_nothing() -> None:
    play = Play(ready_timeout_s=0.0, max_restarts=1)
    play.receives(ALONE, StartWorkers(ALONE, False, 0))
    play.reports(AgentStatus.WORKING, reached=True)
    assert play.machine.next_deadline() is None
    play.does("workers_failed", ("it died", (1,)), StopWorkers("it died"))
    play.does("workers_stopped", None, StartWorkers(ALONE, True, 1))
    play.reports(AgentStatus.READY)


def test_workers_that_cannot_be_sent_a_world_are_restarted_before_they_are_late() -> None:
    play = working(RestartPolicy.SOFT_REPLACE, max_restarts=1)
    play.receives(
        BOTH, Broadcast(WorkerState.PAUSED, ALONE, UP), Broadcast(WorkerState.HEALTHY, BOTH, UP)
    )
    play.does("workers_cut_off", ("no channel",), StopWorkers("no channel"))
    play.does("workers_stopped", None, StartWorkers(BOTH, True, 1))


def test_a_worker_that_cannot_say_that_it_is_in_its_first_world_is_restarted() -> None:
    play = Play(max_restarts=1)
    play.receives(ALONE, StartWorkers(ALONE, False, 0))
    play.does("workers_cut_off", ("no channel",), StopWorkers("no channel"))


def test_workers_that_have_answered_may_be_cut_off() -> None:
    play = working(max_restarts=1)
    play.does("workers_cut_off", ("no channel",))


def test_workers_that_are_asked_nothing_may_be_cut_off() -> None:
    play = Play(ready_timeout_s=0.0, max_restarts=1)
    play.receives(ALONE, StartWorkers(ALONE, False, 0))
    play.does("workers_cut_off", ("no channel",))


def test_time_in_which_the_agent_stood_still_is_no_delay_of_its_workers() -> None:
    play = working(ready_timeout_s=10.0)
    play.receives(
        BOTH, Broadcast(WorkerState.PAUSED, ALONE, UP), Broadcast(WorkerState.HEALTHY, BOTH, UP)
    )
    play.now += 100.0
    play.does("tick", None)
    play.does("workers_reached", (2,))
    play.reports(AgentStatus.WORKING, round=2, reached=True)


def test_a_node_without_a_world_ends_though_it_receives_nothing() -> None:
    play = Play()
    waited_s = SETTINGS.join_timeout_s + WAIT_SLACK_S
    reason = f"there was no world within {waited_s:g} s"
    leave = SendLeave(AgentLeave(reason))
    play.passes(waited_s + 1.0, leave, End(Outcome.RENDEZVOUS_FAILED, reason))
    assert play.now == pytest.approx(waited_s)


def test_the_exit_barrier() -> None:
    play = working(exit_barrier_timeout_s=20.0)
    play.does("workers_succeeded", None)
    play.reports(AgentStatus.FINISHED, round=1)
    play.receives(BOTH)
    reason = "it finished 20 s ago, the others did not"
    play.passes(21.0, SendLeave(AgentLeave(reason, closes=True)), End(Outcome.SUCCEEDED, reason))
    assert play.now == pytest.approx(20.0)


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failed", [True, False])
def test_a_closed_run_ends_workers_but_not_the_success_of_those_that_have_finished(
    failed: bool,
) -> None:
    play = working()
    play.receives(RunClosed("enough", failed), StopWorkers("enough"))
    play.does("workers_stopped", None, End(Outcome.RUN_CLOSED, "enough"))
    finished = working()
    finished.does("workers_succeeded", None)
    finished.receives(RunClosed("enough", failed), End(Outcome.SUCCEEDED, "enough"))


def test_a_signal_is_reported_to_the_others_before_it_ends_the_workers() -> None:
    play = working()
    leave = SendLeave(AgentLeave("SIGTERM"))
    play.does("stop_requested", ("SIGTERM",), leave, StopWorkers("SIGTERM"))
    play.does("stop_requested", ("SIGTERM",))
    play.receives(RunClosed("enough", True))
    play.does("workers_stopped", None, End(Outcome.STOPPED, "SIGTERM"))


def test_a_signal_while_workers_are_ended_for_another_reason() -> None:
    play = working(max_restarts=1)
    play.does("workers_failed", ("it died", (1,)), StopWorkers("it died"))
    play.does("stop_requested", ("SIGTERM",), SendLeave(AgentLeave("SIGTERM")))
    play.does("workers_stopped", None, End(Outcome.STOPPED, "SIGTERM"))


def test_workers_that_left_a_broken_world_keep_their_state() -> None:
    play = working()
    play.does("world_over", None, Broadcast(WorkerState.PAUSED, ALONE, UP))
    play.reports(AgentStatus.READY, round=1, reached=True, num_restarts=0)
    play.receives(BOTH, Broadcast(WorkerState.HEALTHY, BOTH, UP))


@pytest.mark.parametrize(
    "field",
    [
        "max_restarts",
        "ready_timeout_s",
        "exit_barrier_timeout_s",
        "max_soft_failures",
        "failure_window_s",
    ],
)
def test_a_setting_that_cannot_work_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        config(**{field: -1})


# -- whole runs: who is restarted, and what it costs ---------------------------------------------


@pytest.mark.parametrize("policy", SOFT)
def test_survivors_are_never_restarted(policy: RestartPolicy) -> None:
    launch = Launch("1:4", policy, max_restarts=1)
    for name in "abc":
        launch.start(name)
    launch.passes(2.0)
    launch.fail("c", 1)
    launch.kill("b")
    launch.passes(2.0)
    launch.start("d")
    launch.passes(2.0)
    survivor: Agent = launch.agents["a"]
    assert not [name for name in survivor.names[1:] if "start" in name or "stop" in name]
    stays = "ad" if policy is RestartPolicy.SOFT_NO_REPLACE else "acd"
    assert sorted(launch.world.node_ids) == list(stays)


def test_one_node_fails_again_and_again_and_the_others_go_on_without_it() -> None:
    launch = Launch("1:2", max_restarts=2)
    launch.start("a")
    launch.start("b")
    launch.passes(2.0)
    for _ in range(3):
        launch.fail("b")
        launch.passes(2.0)
    end = launch.agents["b"].end
    assert end is not None
    assert end.outcome is Outcome.WORKERS_FAILED
    assert launch.worlds[-1] == ("a",)
    assert launch.agents["a"].end is None
    assert launch.agents["a"].machine.num_restarts == 0


def test_under_the_hard_policy_that_node_ends_the_run() -> None:
    launch = Launch("1:2", RestartPolicy.HARD, max_restarts=1)
    launch.start("a")
    launch.start("b")
    launch.passes(2.0)
    for _ in range(2):
        launch.fail("b")
        launch.passes(2.0)
    end = launch.agents["a"].end
    assert end is not None
    assert end.outcome is Outcome.RUN_CLOSED
    assert "'b'" in end.reason
    assert launch.agents["a"].machine.num_restarts == 0
