"""Tests the worlds that a launched run gets: the machines of both ends, as a play."""

from __future__ import annotations

import pytest
from support.core.launch import RUN, Launch, started

from torchft_svc.core.launch.launched_run import Cause, ReportWorld
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.streams import ReportStandstill


def causes(launch: Launch) -> list[Cause]:
    return [each.cause for each in launch.reports if isinstance(each, ReportWorld)]


# -- the first world (rule L1) -----------------------------------------------------------------


def test_a_cold_start_a_loss_and_a_warm_join() -> None:
    launch = started("1:3", "abc")
    assert launch.agents["b"].names == ["start 1"]
    launch.kill("a")
    launch.passes(0.1)
    assert launch.worlds[1:] == [("c", "b")]
    assert launch.world.master_addr == "host-c"
    assert launch.agents["b"].names == ["start 1", "PAUSED 1 SCALE_DOWN", "HEALTHY 2 SCALE_DOWN"]
    newcomer = launch.start("d", is_slow=True)
    launch.passes(3.0)
    assert newcomer.names == ["start expected 3"]
    assert len(launch.worlds) == 2
    launch.answer("d")
    launch.passes(0.1)
    assert launch.worlds[2:] == [("c", "b", "d")]
    assert newcomer.names == ["start expected 3", "HEALTHY 3 SCALE_UP"]
    assert launch.agents["b"].names[-2:] == ["PAUSED 2 SCALE_UP", "HEALTHY 3 SCALE_UP"]
    assert causes(launch) == [Cause.START, Cause.LOSS, Cause.JOIN]


def test_l1_all_max_nodes_begin_at_once_fewer_after_the_window() -> None:
    launch = Launch("2:3", settle_in_s=0.0)
    launch.start("a")
    launch.passes(5.0, step_s=0.1)
    launch.start("b")
    launch.passes(0.4)
    assert launch.worlds == []
    launch.start("c")
    assert launch.worlds == [("a", "b", "c")]
    other = Launch("2:3", settle_in_s=0.0)
    other.start("a")
    other.start("b")
    other.passes(0.6)
    assert other.worlds == [("a", "b")]


def test_l1_nodes_that_start_workers_are_waited_for_if_nobody_is_left() -> None:
    """Two nodes of which each failed because of the other."""
    launch = started("1:2", "ab", max_restarts=1)
    for agent in launch.agents.values():
        agent.is_slow = True
    launch.fail("a")
    launch.fail("b")
    launch.passes(3.0)
    assert len(launch.worlds) == 1
    launch.answer("a")
    launch.passes(5.0, step_s=0.1)
    assert len(launch.worlds) == 1
    launch.answer("b")
    launch.passes(0.1)
    assert launch.worlds[1:] == [("a", "b")]


# -- losses (rule L2) --------------------------------------------------------------------------


def test_l2_what_breaks_at_one_moment_is_one_loss() -> None:
    launch = started("1:4", "abcd")
    launch.kill("b")
    launch.passes(0.02)
    launch.kill("d")
    launch.passes(1.0)
    assert launch.worlds[1:] == [("a", "c")]


def test_l2_a_node_that_comes_back_at_once_was_not_lost() -> None:
    launch = started("1:3", "abc")
    launch.disconnect("b")
    launch.passes(0.03)
    launch.connect("b")
    launch.passes(3.0)
    assert len(launch.worlds) == 1
    assert launch.agents["b"].names == ["start 1"]


def test_l2_a_node_that_comes_back_later_keeps_its_workers() -> None:
    launch = started("1:4", "abc")
    launch.disconnect("b")
    launch.passes(1.0)
    launch.connect("b")
    assert launch.agents["b"].names[1:] == ["PAUSED 1 SCALE_DOWN"]
    launch.passes(1.0)
    assert launch.worlds[1:] == [("a", "c"), ("a", "c", "b")]
    assert launch.agents["b"].names[2:] == ["HEALTHY 3 SCALE_DOWN"]


def test_l2_the_losses_of_a_second_make_three_worlds() -> None:
    launch = started("1:8", "abcdefgh")
    sizes = []
    for name in "bcdefg":
        launch.kill(name)
        launch.passes(0.15)
        sizes.append(len(launch.worlds[-1]))
    assert sizes == [7, 6, 6, 4, 4, 4]
    launch.passes(2.0)
    assert [len(world) for world in launch.worlds[1:]] == [7, 6, 4, 2]


def test_l2_a_second_loss_is_acted_on_nearly_at_once() -> None:
    launch = started("1:4", "abcd")
    launch.kill("b")
    launch.passes(0.06)
    launch.kill("c")
    launch.passes(0.06)
    assert launch.worlds[1:] == [("a", "d", "c")]
    launch.passes(0.04)
    assert launch.worlds[2:] == [("a", "d")]


def test_l2_a_loss_a_join_and_a_loss_in_a_second_make_two_worlds() -> None:
    launch = started("1:4", "abcd")
    launch.kill("b")
    launch.passes(0.3)
    launch.start("e")
    launch.passes(0.3)
    launch.kill("c")
    launch.passes(2.0)
    assert launch.worlds[1:] == [("a", "d", "c"), ("a", "d", "e")]


def test_l2_a_loss_after_a_calm_second_is_acted_on_at_once() -> None:
    launch = started("1:4", "abcd")
    for name, left in (("b", ("a", "d", "c")), ("c", ("a", "d"))):
        launch.kill(name)
        launch.passes(0.06)
        assert launch.worlds[-1] == left
        launch.passes(1.0)


def test_l2_who_comes_back_before_the_next_losses_are_acted_on_was_not_lost() -> None:
    launch = started("1:4", "abcd")
    for name in "cd":
        launch.kill(name)
        launch.passes(0.1)
    launch.disconnect("b")
    launch.passes(0.3)
    launch.connect("b")
    launch.passes(2.0)
    assert launch.worlds[1:] == [("a", "b", "d"), ("a", "b")]


def test_l2_a_silent_node_is_lost_after_the_heartbeat_timeout() -> None:
    launch = started("1:2", "ab", heartbeat_timeout_s=3.0)
    launch.agents["b"].is_silent = True
    launch.passes(2.9)
    assert len(launch.worlds) == 1
    launch.passes(0.3)
    assert launch.worlds[1:] == [("a",)]
    assert launch.agents["b"].stream == 0
    launch.agents["b"].is_silent = False
    launch.connect("b")
    launch.passes(1.0)
    assert launch.worlds[2:] == [("a", "b")]
    assert "stop" not in launch.agents["b"].names


def test_l2_time_in_which_the_lighthouse_stood_still_makes_nobody_silent() -> None:
    launch = started("1:2", "ab")
    launch.now += 30.0
    launch.execute(launch.rendezvous.tick(launch.now))
    launch.passes(2.0)
    assert len(launch.worlds) == 1
    assert any(isinstance(each, ReportStandstill) for each in launch.reports)


def test_l13_agents_that_were_elsewhere_while_the_lighthouse_stood_still_go_on() -> None:
    launch = started("1:3", "ab")
    launch.now += 30.0
    for name in "ab":
        launch.disconnect(name)
    launch.start("c")  # a newcomer finds it first
    launch.passes(1.5)
    launch.connect("a")
    launch.connect("b")
    launch.passes(0.4)
    assert len(launch.worlds) == 1
    launch.passes(3.0)
    assert launch.worlds[1:] == [("a", "b", "c")]
    assert not any("stop" in agent.names for agent in launch.agents.values())


def test_l2_newcomers_that_are_ready_come_along_with_a_loss() -> None:
    launch = started("1:5", "abc")
    launch.start("d")
    launch.kill("b")
    launch.passes(0.1)
    assert launch.worlds[1:] == [("a", "d", "c")]


# -- joins (rules L3 and L4) -------------------------------------------------------------------


def test_l3_three_changes_in_a_second_make_one_world() -> None:
    launch = started("1:8", "ab")
    for name in "cde":
        launch.start(name)
        launch.passes(0.15)
    launch.passes(1.0)
    assert launch.worlds[1:] == [("a", "b", "c", "d", "e")]


def test_l3_no_world_is_replaced_by_a_join_before_it_is_reached() -> None:
    launch = started("1:8", "ab")
    launch.agents["b"].is_slow = True
    launch.start("c")
    launch.passes(0.6)
    assert len(launch.worlds) == 2
    launch.start("d")
    launch.passes(5.0, step_s=0.1)
    assert len(launch.worlds) == 2
    launch.answer("b")
    launch.passes(0.1)
    assert launch.worlds[2:] == [("a", "b", "c", "d")]


def test_l3_a_world_that_is_never_reached_does_not_keep_others_out_forever() -> None:
    launch = started("1:8", "ab", ready_timeout_s=1000.0)
    launch.agents["b"].is_slow = True
    launch.start("c")
    launch.passes(0.6)
    launch.start("d")
    launch.passes(60.0, step_s=0.25)
    assert launch.worlds[2:] == [("a", "b", "c", "d")]


def test_l4_under_the_hard_policy_nobody_starts_workers_early() -> None:
    launch = Launch("1:3", RestartPolicy.HARD)
    launch.start("a")
    launch.passes(2.0)
    launch.start("b")
    launch.passes(1.0)
    assert launch.worlds == [("a",), ("a", "b")]
    assert launch.agents["a"].names == ["start 1", "stop", "start 2"]
    assert launch.agents["b"].names == ["start 2"]


# -- ranks and stores (rules L5 to L8) ---------------------------------------------------------


def test_l5_ranks_stay_and_gaps_are_filled() -> None:
    launch = started("1:4", "abcd")
    launch.kill("b")
    launch.passes(0.1)
    assert launch.worlds[1:] == [("a", "d", "c")]
    launch.start("e")
    launch.passes(1.0)
    assert launch.worlds[2:] == [("a", "d", "c", "e")]


def test_l5_ranks_that_were_given_by_hand() -> None:
    launch = Launch("3")
    launch.start("x", rank=2)
    launch.start("y", rank=0)
    launch.start("z", rank=1)
    launch.passes(1.1)
    assert launch.worlds == [("y", "z", "x")]


def test_l5_the_second_of_two_nodes_with_one_rank_is_refused() -> None:
    launch = Launch("2")
    launch.start("a", rank=1)
    refused = launch.start("b", rank=1).refused
    assert refused is not None
    assert "'a'" in str(refused)
    assert "'b'" in str(refused)
    assert "node rank 1" in str(refused)


def test_l6_a_node_that_joined_last_does_not_become_rank_0_before_it_has_trained() -> None:
    launch = started("1:4", "abc")
    launch.agents["b"].is_slow = True
    launch.start("d")
    launch.passes(0.6)
    assert launch.world.node_ids == ("a", "b", "c", "d")
    launch.kill("a")
    launch.passes(0.1)
    assert launch.world.node_ids[0] in "bc"


def test_l6_a_newcomer_with_rank_0_by_hand_is_not_rank_0_of_those_that_have_the_state() -> None:
    launch = Launch("1:2")
    launch.start("a", rank=0)
    launch.start("b", rank=1)
    launch.passes(2.0)
    launch.kill("a")
    launch.passes(1.0)
    launch.start("c", rank=0)
    launch.passes(1.0)
    assert launch.worlds == [("a", "b"), ("b",), ("b", "c")]


def test_l6_a_node_that_was_away_has_the_state_that_restarted_workers_have_not() -> None:
    launch = started("1:4", "ab", max_restarts=1)
    launch.disconnect("b")
    launch.passes(1.0)
    launch.agents["a"].is_slow = True
    launch.fail("a")
    launch.connect("b")
    launch.passes(1.0)
    launch.answer("a")
    launch.passes(1.0)
    assert launch.worlds == [("a", "b"), ("a",), ("b",), ("b", "a")]


def test_l6_where_nobody_has_trained_who_reached_an_earlier_world_is_rank_0() -> None:
    launch = Launch("1:4")
    for name in "abc":
        launch.start(name, is_slow=name == "c")
    launch.passes(2.0)  # in a world that only two of three have reached
    launch.start("d")
    for name in "ab":
        launch.agents[name].is_slow = True
    launch.kill("c")
    launch.passes(0.1)
    launch.kill("b")
    launch.passes(1.5)
    assert launch.worlds == [("a", "b", "c"), ("a", "b", "d"), ("a", "d")]


def test_l6_nodes_report_to_the_next_lighthouse_since_when_they_have_trained() -> None:
    """The lighthouse learns first of a world that a newcomer has reached, and others have not."""
    launch = started("1:3", "ab")
    assert launch.agents["b"].machine.state.trained_since == 1
    for name in "ab":
        launch.agents[name].is_slow = True
    launch.start("c")
    launch.passes(0.6)
    assert launch.world.node_ids == ("a", "b", "c")
    launch.restart_lighthouse()
    for name in "cb":
        launch.connect(name)
    launch.passes(6.0, step_s=0.1)
    assert launch.worlds[-1] == ("b", "c")


def test_l6_a_new_lighthouse_believes_who_was_in_a_world() -> None:
    launch = started("2:2", "ab", max_restarts=1)
    launch.restart_lighthouse()
    launch.agents["a"].is_slow = True
    launch.fail("a")  # its new workers have no state
    launch.leave_world("b")
    launch.connect("a")
    launch.answer("a")
    launch.agents["a"].is_slow = False
    launch.agents["b"].is_slow = True
    launch.connect("b")
    launch.passes(2.0)
    launch.disconnect("b")
    launch.passes(0.5)
    launch.connect("b")
    launch.passes(1.0)
    assert [world[0] for world in launch.worlds[1:]] == ["b", "b"]


def test_l7_each_world_has_a_store_of_its_own() -> None:
    launch = started("1:3", "abc")
    for name in "de":
        launch.kill("b" if name == "d" else "c")
        launch.passes(0.5)
        launch.start(name)
        launch.passes(1.0)
    worlds = [each.world for each in launch.reports if isinstance(each, ReportWorld)]
    stores = [(world.master_addr, world.master_port) for world in worlds]
    assert len(set(stores)) == len(stores) == 5


def test_l7_a_world_waits_for_the_store_of_rank_0() -> None:
    launch = Launch("1", has_stores=False)
    launch.start("a")
    launch.passes(2.0)
    assert launch.worlds == []
    assert "no store" in launch.rendezvous.status(RUN, launch.now)[0].why
    launch.has_stores = True
    launch.open_store("a")
    assert launch.worlds == [("a",)]


def test_l8_a_run_that_all_have_left_goes_on_counting() -> None:
    launch = started("1", "a")
    launch.kill("a")
    launch.passes(1.0)
    launch.start("b")
    launch.passes(1.0)
    assert launch.world.round == 2
    launch.kill("b")
    launch.passes(61.0, step_s=0.25)
    assert launch.rendezvous.status("", launch.now) == []


def begin_apart(launch: Launch, elsewhere: Launch, *others: str) -> None:
    """Make node b, of round 1 of ``launch``, begin ``elsewhere`` with ``others``.

    It does not learn of that round, as at another lighthouse of its list; then it is back.
    """
    launch.start("a")
    b = launch.start("b")
    b.is_silent = True
    launch.passes(1.5)
    b.is_silent = False
    elsewhere.agents["b"] = launch.agents.pop("b")
    elsewhere.connect("b")
    for name in others:
        elsewhere.start(name, is_slow=True)
    elsewhere.passes(2.0)
    assert (launch.worlds, elsewhere.worlds) == ([("a", "b")], [("b", *others)])
    launch.agents["b"] = b
    launch.connect("b")
    launch.passes(1.0)


@pytest.mark.parametrize("policy", [RestartPolicy.SOFT, RestartPolicy.HARD])
def test_l8_a_node_in_another_world_of_this_round_is_not_in_the_present_one(
    policy: RestartPolicy,
) -> None:
    launch = Launch("1:2", policy)
    begin_apart(launch, Launch("1:2", policy))
    assert len(launch.worlds) == 2
    assert {agent.machine.entered for agent in launch.agents.values()} == {launch.world}


def test_l6_who_has_reached_another_world_of_this_round_has_reached_an_earlier_one() -> None:
    launch = Launch("1:2")
    begin_apart(launch, Launch("1:2"), "c")
    assert launch.worlds == [("a", "b"), ("b", "a")]
