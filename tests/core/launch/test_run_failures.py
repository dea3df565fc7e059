"""Tests the limits on the failures of a run (rules L34 and L35)."""

from __future__ import annotations

from support.core.launch import Launch, started

from torchft_svc.core.launch.agent import Outcome
from torchft_svc.core.launch.launched_run import ReportRunClosed


def limited(names: str, **limits: float) -> Launch:
    return started(f"1:{len(names)}", names, limits=limits, max_restarts=100)


def test_l34_too_many_failures_of_all_nodes_close_the_run() -> None:
    launch = limited("abc", max_run_failures=2, failure_window_s=60.0)
    launch.fail("a")
    launch.passes(2.0)
    launch.fail("b")
    launch.passes(2.0)
    launch.kill("c")  # a lost node is a failure, too
    launch.passes(0.2)
    [closed] = [each for each in launch.reports if isinstance(each, ReportRunClosed)]
    assert closed.failed
    assert closed.reason == (
        "its nodes have failed 3 times within 60 s, --max-run-failures is 2; 'c' was the last one"
    )
    assert {agent.end.outcome for agent in launch.agents.values() if agent.end} == {
        Outcome.RUN_CLOSED
    }


def test_l34_failures_of_long_ago_do_not_count() -> None:
    launch = limited("ab", max_run_failures=1, max_node_failures=1, failure_window_s=10.0)
    for _ in range(4):
        launch.fail("a")
        launch.passes(11.0, step_s=0.1)
    assert launch.world.node_ids == ("b", "a")


def test_l35_a_node_that_fails_again_and_again_is_excluded() -> None:
    launch = limited("ab", max_node_failures=1, failure_window_s=60.0)
    launch.fail("b")
    launch.passes(2.0)
    assert launch.world.node_ids == ("a", "b")
    launch.fail("b")
    launch.passes(2.0)
    assert launch.world.node_ids == ("a",)
    end = launch.agents["b"].end
    assert end is not None
    assert end.reason == (
        "node 'b' on host-b is excluded for 58 s: it has failed 2 times within 60 s, "
        "--max-node-failures is 1"
    )
    assert "excluded for" in str(launch.start("b2", host="host-b").refused)
    assert launch.start("c", host="host-c").refused is None
    launch.passes(60.0, step_s=0.1)
    assert launch.start("b3", host="host-b").refused is None


def test_l35_a_node_that_comes_and_goes_is_excluded() -> None:
    launch = limited("ab", max_node_failures=1)
    for _ in range(2):
        launch.disconnect("b")
        launch.passes(1.5)
        launch.connect("b")
        launch.passes(1.5)
    assert launch.world.node_ids == ("a",)
    assert "excluded" in str(launch.agents["b"].refused)


def test_l35_who_leaves_in_good_order_or_is_back_at_once_has_not_failed() -> None:
    launch = limited("ab", max_node_failures=0, max_run_failures=0)
    launch.disconnect("b")
    launch.passes(0.03)
    launch.connect("b")
    launch.passes(1.0)
    launch.stop("b")
    launch.passes(1.0)
    assert launch.world.node_ids == ("a",)
    assert launch.start("c", host="host-b").refused is None
