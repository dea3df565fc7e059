"""Tests the limits and the ends of launched runs: the machines of both ends, as a play."""

from __future__ import annotations

import dataclasses

import pytest
from support.core.launch import RUN, Launch, started

from torchft_svc.core.launch.agent import End, Outcome
from torchft_svc.core.launch.launched_run import (
    ReportRunClosed,
    ReportRunMoved,
    ReportRunPaused,
    ReportWorld,
    SendNews,
)
from torchft_svc.core.launch.rendezvous import Rendezvous, RendezvousRules
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.launch.world import (
    AgentHello,
    AgentLeave,
    AgentState,
    AgentStatus,
    AgentWelcome,
    Node,
    RunClosed,
    RunMove,
    RunSettings,
    World,
)
from torchft_svc.core.streams import EndStream
from torchft_svc.errors import ConfigError, NotLeader, RequestRefused, Unreachable

# -- limits (rules L9 and L10) -----------------------------------------------------------------


def test_l8_a_round_that_leaves_no_room_for_others_is_refused() -> None:
    launch = started("1:2", "a")
    poisoned = AgentState(status=AgentStatus.WORKING, round=2**53 - 1)
    with pytest.raises(RequestRefused, match="leaves no room"):
        launch.rendezvous.received(launch.agents["a"].stream, poisoned, launch.now)
    first = hello("x")
    with pytest.raises(RequestRefused, match="leaves no room"):
        launch.rendezvous.opened(
            99,
            RUN,
            dataclasses.replace(first, settings=launch.settings, state=poisoned),
            launch.now,
        )
    launch.start("b")
    launch.passes(1.0)
    assert launch.worlds[1:] == [("a", "b")]


def test_l8_a_run_goes_on_above_the_highest_round_that_may_be_reported() -> None:
    launch = Launch("1:2")
    reported = AgentState(status=AgentStatus.JOINING, round=2**52)
    launch.execute(
        launch.rendezvous.opened(
            99,
            RUN,
            dataclasses.replace(hello("x"), settings=launch.settings, state=reported),
            launch.now,
        )
    )
    launch.start("a")
    launch.execute(launch.rendezvous.closed(99, launch.now))
    launch.passes(3.0)
    launch.start("b")
    launch.passes(3.0)
    assert launch.worlds == [("a",), ("a", "b")]
    assert launch.world.round == 2**52 + 2


def test_l9_with_too_few_nodes_the_members_pause_and_go_on_when_another_one_comes() -> None:
    launch = started("2:3", "ab")
    launch.kill("b")
    launch.passes(1.0)
    assert launch.agents["a"].names[1:] == ["PAUSED 1 SCALE_DOWN"]
    assert [each for each in launch.reports if isinstance(each, ReportRunPaused)]
    launch.start("c")
    launch.passes(0.1)
    assert launch.worlds[1:] == [("a", "c")]
    assert launch.agents["a"].names[2:] == ["HEALTHY 2 SCALE_DOWN"]


def test_l9_with_too_few_nodes_for_too_long_the_run_fails() -> None:
    launch = started("2:3", "ab")
    launch.kill("b")
    launch.passes(61.0, step_s=0.25)
    end = launch.agents["a"].end
    assert end is not None
    assert end.outcome is Outcome.RUN_CLOSED
    assert "fewer than 2 nodes" in end.reason
    assert launch.agents["a"].names[-1] == "stop"
    [closed] = [each for each in launch.reports if isinstance(each, ReportRunClosed)]
    assert closed.failed


def test_l9_above_max_nodes_wait_and_get_a_place_when_one_is_free() -> None:
    launch = started("1:2", "ab")
    waiting = launch.start("c")
    launch.passes(3.0)
    assert waiting.names == []
    launch.kill("a")
    launch.passes(1.2)
    assert launch.worlds[1:] == [("b",), ("b", "c")]


def test_l9_a_node_that_starts_its_workers_anew_keeps_its_place() -> None:
    launch = started("1:2", "ab", max_restarts=1)
    waiting = launch.start("c")
    launch.agents["b"].is_slow = True
    launch.fail("b")
    launch.passes(3.0)
    launch.answer("b")
    launch.passes(1.0)
    assert launch.worlds[1:] == [("a",), ("a", "b")]
    assert waiting.names == []


def test_l10_a_node_without_a_place_gives_up() -> None:
    launch = started("1:2", "ab")
    waiting = launch.start("c")
    launch.passes(61.0, step_s=0.25)
    assert waiting.end is not None
    assert waiting.end.outcome is Outcome.RUN_CLOSED
    assert "joining run 'r' timed out" in waiting.end.reason
    assert len(launch.worlds) == 1


@pytest.mark.parametrize("join_timeout_s", [0.0, 0.2, 0.5])
def test_l10_a_short_join_timeout_begins_with_the_run(join_timeout_s: float) -> None:
    """A new lighthouse begins no run for a second, and the window may be longer, too."""
    for nodes, names in (("1", "a"), ("2", "ab"), ("1:3", "ab")):
        launch = Launch(nodes, join_timeout_s=join_timeout_s)
        for name in names:
            launch.start(name)
        launch.passes(2.0)
        assert launch.worlds == [tuple(names)]


def test_l10_too_few_nodes_give_up_after_a_short_join_timeout() -> None:
    launch = Launch("2", join_timeout_s=0.2)
    a = launch.start("a")
    launch.passes(1.9)
    assert a.end is None
    launch.passes(0.2)
    assert a.end is not None
    assert "fewer than 2 nodes" in a.end.reason


@pytest.mark.parametrize("node", ["b", "host-b"])
def test_l36_a_drained_node_ends_and_the_others_go_on(node: str) -> None:
    launch = started("1:2", "ab")
    launch.execute(launch.rendezvous.drain(RUN, node, "maintenance", launch.now, 60.0))
    assert launch.agents["b"].end == End(Outcome.DRAINED, "maintenance", within_s=60.0)
    launch.passes(0.1)
    assert launch.worlds[1:] == [("a",)]
    with pytest.raises(RequestRefused, match="no node 'c'"):
        launch.rendezvous.drain(RUN, "c", "", launch.now)
    with pytest.raises(RequestRefused, match="no run 'other'"):
        launch.rendezvous.drain("other", "a", "", launch.now)


@pytest.mark.parametrize("final", [True, False])
def test_l15_who_closes_a_run_says_whether_a_restart_would_help(final: bool) -> None:
    launch = started("2", "ab")
    leave = AgentLeave("it failed", failed=True, closes=True, final=final)
    launch.agents["a"].send_leave(leave)
    assert launch.agents["b"].end is not None
    assert launch.agents["b"].end.final is final


def test_limits_on_runs_and_nodes() -> None:
    rendezvous = Rendezvous(RendezvousRules(max_runs=1, max_nodes_per_run=2), 0.0)
    rendezvous.opened(1, "x", hello("a"), 0.0)
    with pytest.raises(RequestRefused, match="1 runs are going on"):
        rendezvous.opened(2, "y", hello("b"), 0.0)
    rendezvous.opened(3, "x", hello("b"), 0.0)
    with pytest.raises(RequestRefused, match="2 nodes"):
        rendezvous.opened(4, "x", hello("c"), 0.0)
    with pytest.raises(ConfigError, match="max_runs"):
        RendezvousRules(max_runs=0)
    with pytest.raises(ConfigError, match="settle_in_s"):
        RendezvousRules(settle_in_s=-1.0)


# -- ends (rules L11 and L12) ------------------------------------------------------------------


def test_l11_when_all_have_finished_the_run_is_closed() -> None:
    launch = started("1:3", "ab")
    launch.succeed("a")
    launch.passes(1.0)
    assert launch.agents["a"].end is None
    launch.succeed("b")
    for name in "ab":
        end = launch.agents[name].end
        assert end is not None
        assert end.outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("waits_for_lost", [False, True])
def test_l11_the_exit_barrier_may_wait_for_lost_nodes(waits_for_lost: bool) -> None:
    limits = {"waits_for_lost": waits_for_lost}
    launch = started("1:3", "abc", limits=limits, exit_barrier_timeout_s=20.0)
    launch.succeed("a")
    launch.kill("c")
    launch.passes(1.0)
    launch.succeed("b")
    launch.passes(1.0)
    ended = [agent.end is not None for agent in launch.agents.values()]
    assert ended == [not waits_for_lost] * 2
    launch.passes(20.0, step_s=0.1)
    ends = [agent.end for agent in launch.agents.values()]
    assert {end.outcome for end in ends if end} == {Outcome.SUCCEEDED}


def test_l11_after_one_has_finished_losses_and_joins_make_no_world() -> None:
    launch = started("1:4", "abc", exit_barrier_timeout_s=20.0)
    launch.succeed("a")
    newcomer = launch.start("d")
    launch.passes(3.0)
    assert newcomer.names == []
    launch.kill("b")
    launch.passes(3.0)
    assert launch.agents["c"].names == ["start 1"]
    launch.succeed("c")
    launch.passes(0.1)
    assert launch.worlds == [("a", "b", "c")]
    assert newcomer.end is not None
    assert newcomer.end.outcome is Outcome.RUN_CLOSED


def test_l11_the_exit_barrier_ends_those_that_take_too_long() -> None:
    launch = started("1:2", "ab", exit_barrier_timeout_s=20.0)
    launch.succeed("a")
    launch.passes(21.0, step_s=0.25)
    first, second = launch.agents["a"].end, launch.agents["b"].end
    assert first is not None
    assert first.outcome is Outcome.SUCCEEDED
    assert second is not None
    assert second.outcome is Outcome.RUN_CLOSED
    assert launch.agents["b"].names[-1] == "stop"


def test_l12_a_closed_run_stays_closed_for_those_that_knew_it() -> None:
    launch = started("1:2", "ab", policy=RestartPolicy.HARD)
    launch.disconnect("b")
    launch.fail("a")
    launch.passes(1.0)
    launch.connect("b")
    end = launch.agents["b"].end
    assert end is not None
    assert end.outcome is Outcome.RUN_CLOSED
    launch.disconnect("b")
    launch.start("c")
    launch.passes(1.0)
    assert launch.worlds[-1] == ("c",)


def test_l12_a_node_that_missed_the_close_does_not_bring_its_world_to_the_next_run() -> None:
    launch = started("1:2", "ab", policy=RestartPolicy.HARD)
    launch.disconnect("b")
    launch.fail("a")
    launch.passes(1.0)
    launch.kill("a")
    launch.start("c")
    launch.passes(1.0)
    assert launch.worlds[-1] == ("c",)
    launch.connect("b")
    assert "was closed while node 'b' was away" in str(launch.agents["b"].refused)
    assert launch.worlds[-1] == ("c",)


# -- a new lighthouse (rule L13) ---------------------------------------------------------------


def test_l13_all_that_come_back_go_on_in_their_world() -> None:
    launch = started("1:3", "abc")
    launch.restart_lighthouse()
    for name in "bca":
        launch.passes(0.5)
        launch.connect(name)
    launch.passes(8.0, step_s=0.1)
    assert len(launch.worlds) == 1
    assert launch.rendezvous.status(RUN, launch.now)[0].round == 1


def test_l13_who_does_not_come_back_is_lost() -> None:
    launch = started("1:3", "abc")
    launch.restart_lighthouse()
    launch.connect("a")
    launch.connect("c")
    launch.passes(4.9)
    assert len(launch.worlds) == 1
    launch.passes(0.3)
    assert launch.worlds[1:] == [("a", "c")]
    assert launch.world.round == 2


def test_l13_lost_nodes_are_reported_by_rank() -> None:
    """Two runs of one simulator seed are the same run (rule X2)."""
    launch = started("1:8", "hgfedcba")
    launch.restart_lighthouse()
    launch.connect("a")
    launch.passes(6.0, step_s=0.1)
    [report] = [each for each in launch.reports[1:] if isinstance(each, ReportWorld)]
    assert report.lost == tuple("hgfedcb")


def test_l13_a_node_that_waits_and_is_back_first_takes_no_place() -> None:
    launch = started("1:1", "a")
    waiting = launch.start("b")
    launch.restart_lighthouse()
    launch.connect("b")
    launch.passes(0.5)
    launch.connect("a")
    launch.passes(3.0)
    assert len(launch.worlds) == 1
    assert waiting.names == []


def test_l13_a_member_that_is_in_a_newer_world_is_in_no_older_one() -> None:
    launch = started("1:2", "ab", heartbeat_timeout_s=1.0)
    launch.agents["a"].is_silent = True
    launch.passes(2.0)
    assert launch.worlds[-1] == ("b",)
    launch.restart_lighthouse()
    launch.agents["a"].is_silent = False
    launch.connect("a")
    launch.passes(1.9)
    launch.connect("b")  # too late for its world to be taken over
    launch.passes(3.0)
    assert set(launch.worlds[-1]) == {"a", "b"}
    entered = {launch.agents[name].machine.entered for name in "ab"}
    assert entered == {launch.world}


def test_l13_the_newest_world_counts() -> None:
    launch = started("1:3", "abc")
    launch.agents["b"].is_silent = True  # it does not learn of the next world
    launch.kill("c")
    launch.passes(0.1)
    assert launch.worlds[1:] == [("a", "b")]
    launch.restart_lighthouse()
    launch.agents["b"].is_silent = False
    launch.connect("b")
    launch.connect("a")
    launch.passes(3.0)
    assert len(launch.worlds) == 2
    assert launch.agents["b"].names[1:] == ["PAUSED 1 SCALE_DOWN", "HEALTHY 2 SCALE_DOWN"]


def test_l13_a_run_that_has_begun_anew_elsewhere_is_taken_over_where_nobody_is_left() -> None:
    launch = started("1:1", "a")
    launch.kill("a")
    launch.passes(1.0)
    anew = started("1:1", "b")
    assert anew.agents["b"].round == 1
    launch.agents["b"] = anew.agents["b"]
    launch.connect("b")
    launch.passes(3.0)
    assert launch.worlds == [("a",)]
    assert launch.agents["b"].names == ["start 1"]


@pytest.mark.parametrize("policy", [RestartPolicy.SOFT, RestartPolicy.HARD])
def test_l13_a_world_that_was_paused_is_replaced_though_all_come_back(
    policy: RestartPolicy,
) -> None:
    launch = started("3:3", "abc", policy=policy)
    launch.agents["c"].is_silent = True
    launch.passes(5.5)
    assert launch.agents["a"].names[-1] in ("PAUSED 1 SCALE_DOWN", "stop")
    launch.restart_lighthouse()
    launch.agents["c"].is_silent = False
    for name in "abc":
        launch.connect(name)
    launch.passes(1.0)
    assert len(launch.worlds) == 2
    assert {agent.round for agent in launch.agents.values()} == {2}


def test_the_end_of_a_term_ends_all_streams() -> None:
    launch = started("1:2", "ab")
    error = NotLeader("elsewhere")
    orders = launch.rendezvous.lead_ended(error, launch.now)
    assert orders == tuple(EndStream(launch.agents[name].stream, error) for name in "ab")
    assert launch.rendezvous.next_deadline() is None
    assert launch.rendezvous.status("", launch.now) == []


# -- back to an earlier lighthouse of the list (rule L21) --------------------------------------


def test_l21_all_are_sent_to_the_lighthouse_that_one_has_found() -> None:
    launch = started("1:3", "ab")
    a, b = (launch.agents[name].stream for name in "ab")
    move = RunMove("first:29510")
    assert launch.rendezvous.received(b, move, launch.now) == (
        SendNews((a, b), move),
        EndStream(a),
        EndStream(b),
        ReportRunMoved(RUN, move.address),
    )
    assert launch.rendezvous.closed(a, launch.now) == ()
    [status] = launch.rendezvous.status("", launch.now)
    assert status.nodes == ()
    assert status.why == "its agents have gone to lighthouse first:29510"
    launch.passes(10.0, step_s=0.1)  # the stream of b ends late
    assert len(launch.worlds) == 1
    assert launch.rendezvous.closed(b, launch.now) == ()
    launch.passes(60.0, step_s=1.0)
    assert launch.rendezvous.status("", launch.now) == []


def test_l21_a_node_that_waits_and_did_not_learn_of_the_move_begins_no_world_at_once() -> None:
    launch = started("1:1", "a")
    waiting = launch.start("b")
    launch.execute(launch.rendezvous.received(waiting.stream, RunMove("first"), launch.now))
    launch.connect("b")
    launch.passes(4.9)
    assert len(launch.worlds) == 1
    launch.passes(0.5)
    assert launch.worlds[1:] == [("b",)]
    assert launch.world.round == 2


def test_l21_an_agent_that_comes_back_goes_on_in_its_world_or_a_newer_one() -> None:
    def move(launch: Launch) -> None:
        stream = launch.agents["a"].stream
        launch.execute(launch.rendezvous.received(stream, RunMove("first"), launch.now))

    launch = started("1:3", "ab")
    move(launch)
    launch.connect("b")
    launch.connect("a")
    launch.passes(6.0)
    assert len(launch.worlds) == 1
    elsewhere = started("1:3", "cd")
    elsewhere.kill("d")
    elsewhere.passes(1.0)
    move(launch)
    launch.agents = {"c": elsewhere.agents["c"]}
    launch.connect("c")
    launch.passes(6.0)
    assert len(launch.worlds) == 1
    assert launch.rendezvous.status(RUN, launch.now)[0].round == 2


def test_l21_a_run_that_is_closed_does_not_move() -> None:
    launch = started("1:2", "ab", policy=RestartPolicy.HARD)
    launch.fail("a")
    stream = launch.agents["b"].stream
    assert launch.rendezvous.received(stream, RunMove("first"), launch.now) == ()
    assert launch.rendezvous.status(RUN, launch.now)[0].phase == "closed"


# -- who may say what (rule L14) ---------------------------------------------------------------


def hello(name: str, world: World | None = None, **settings: float) -> AgentHello:
    node = Node(node_id=name, host="h", num_workers=1)
    bounds = {"min_nodes": 1, "max_nodes": 2, **settings}
    return AgentHello(
        node,
        RunSettings(**bounds),
        AgentState(status=AgentStatus.JOINING),
        world,  # type: ignore[arg-type]
    )


def test_l14_an_agent_with_other_settings_is_refused_and_both_are_named() -> None:
    rendezvous = Rendezvous(RendezvousRules(), 0.0)
    rendezvous.opened(1, "x", hello("a"), 0.0)
    with pytest.raises(RequestRefused) as refused:
        rendezvous.opened(2, "x", hello("b", max_nodes=3), 0.0)
    for part in ("'a'", "'b'", "max_nodes=2", "max_nodes=3"):
        assert part in str(refused.value)
    assert "min_nodes" not in str(refused.value)
    assert rendezvous.received(2, AgentState(status=AgentStatus.JOINING), 0.1) == ()
    assert len(rendezvous.status("x", 0.1)[0].nodes) == 1


def test_l14_of_two_streams_of_a_node_the_newer_is_valid() -> None:
    rendezvous = Rendezvous(RendezvousRules(), 0.0)
    rendezvous.opened(1, "x", hello("a"), 0.0)
    orders = rendezvous.opened(2, "x", hello("a"), 0.0)
    [ended] = [each for each in orders if isinstance(each, EndStream)]
    assert ended.stream == 1
    assert isinstance(ended.error, Unreachable)  # it may try again
    assert rendezvous.closed(1, 0.0) == ()
    assert len(rendezvous.status("x", 0.0)[0].nodes) == 1


def test_bad_input_is_refused_and_changes_nothing() -> None:
    rendezvous = Rendezvous(RendezvousRules(), 0.0)
    strange = World(3, (Node(node_id="b", host="h", num_workers=1),), 1234)
    twice = dataclasses.replace(strange, nodes=strange.nodes * 2)
    for bad in (hello("a", strange), hello("b", twice), hello("c", min_nodes=3), hello("")):
        with pytest.raises(RequestRefused):
            rendezvous.opened(1, "x", bad, 0.0)
    with pytest.raises(RequestRefused):
        rendezvous.opened(1, "", hello("a"), 0.0)
    assert rendezvous.status("", 0.0) == []
    rendezvous.opened(2, "x", hello("a"), 0.0)
    with pytest.raises(RequestRefused):
        rendezvous.received(2, AgentState(status=AgentStatus.JOINING, store_port=-1), 0.0)
    with pytest.raises(RequestRefused):
        rendezvous.received(2, AgentLeave("x" * 5000), 0.0)
    with pytest.raises(RequestRefused, match="no run 'y'"):
        rendezvous.status("y", 0.0)


def test_the_first_news_is_a_welcome_and_the_last_one_that_the_run_is_over() -> None:
    rendezvous = Rendezvous(RendezvousRules(heartbeat_timeout_s=5.0), 0.0)
    first = rendezvous.opened(1, "x", hello("a"), 0.0)
    assert first[0] == SendNews((1,), AgentWelcome(1.0))
    rendezvous.opened(2, "x", hello("b"), 0.0)
    orders = rendezvous.received(1, AgentLeave("enough", closes=True), 0.0)
    assert EndStream(1) in orders
    assert SendNews((2,), RunClosed("node 'a': enough", failed=False)) in orders
    assert rendezvous.status("x", 0.0)[0].phase == "closed"


def test_the_status_shows_agents_worlds_and_who_waits() -> None:
    launch = started("1:2", "ab")
    launch.start("c")
    launch.passes(3.0)
    [run] = launch.rendezvous.status(RUN, launch.now)
    assert (run.run, run.round, run.min_nodes, run.max_nodes) == (RUN, 1, 1, 2)
    assert (run.phase, run.why) == ("running", "")
    shown = [(node.node_id, node.node_rank, node.status, node.reached) for node in run.nodes]
    assert shown == [
        ("a", 0, AgentStatus.WORKING, True),
        ("b", 1, AgentStatus.WORKING, True),
        ("c", None, AgentStatus.JOINING, False),
    ]
    assert run.nodes[2].waits_for_s == pytest.approx(3.0)
    assert run.nodes[0].waits_for_s is None
    launch.succeed("a")
    assert launch.rendezvous.status("", launch.now)[0].phase == "finishing"
