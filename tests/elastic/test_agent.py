"""Agents under soft policies: who survives a change keeps its process, and is sent its world."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launched import Launch, are_gone, launch

pytestmark = pytest.mark.processes

CUT_OFF = "worker 0 cannot answer, or receive a world: its channel is gone"


def test_a_killed_worker_of_one_node_leaves_the_others_alone(tmp_path: Path) -> None:
    with launch(tmp_path, "--max-restarts=2", "--nproc-per-node=2", nnodes="1:2") as run:
        run.start("a")
        run.start("b")
        before = run.await_world(a=2, b=2)
        os.kill(before["b"][0], signal.SIGKILL)
        run.until(lambda: are_gone(before["b"]), "the workers beside it are ended")
        after = run.await_world(a=2, b=2)
        assert after["a"] == before["a"]
        assert {worker.attempt for worker in run.workers("a")} == {0}
        assert {worker.attempt for worker in run.workers("b")} == {1}
        assert all(worker.num_worlds >= 3 for worker in run.workers("a"))
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


def test_a_killed_agent_leaves_no_worker_and_the_others_go_on(tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="1:2") as run:
        run.start("a")
        run.start("b")
        before = run.await_world(a=1, b=1)
        run.nodes["b"].signal(signal.SIGKILL)
        run.until(lambda: are_gone(before["b"]), "its workers are ended")
        assert run.await_world(a=1)["a"] == before["a"]
        run.finish()
        assert run.nodes["a"].wait() == 0


def test_a_node_that_joins_gets_a_place_when_its_workers_have_started(tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="1:2") as run:
        run.start("a")
        before = run.await_world(a=1)
        run.start("b")
        assert run.await_world(a=1, b=1)["a"] == before["a"]
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


@pytest.mark.parametrize("policy", ["soft", "soft-no-replace"])
def test_without_restarts_a_node_leaves_and_the_others_go_on(policy: str, tmp_path: Path) -> None:
    restarts = "--max-restarts=0" if policy == "soft" else "--max-restarts=3"
    with launch(tmp_path, restarts, nnodes="1:2", policy=policy) as run:
        run.start("a")
        run.start("b")
        before = run.await_world(a=1, b=1)
        run.fail(before["b"][0])
        assert run.nodes["b"].wait() == 1
        assert any("exitcode  : 5" in line for line in run.nodes["b"].lines)
        assert run.await_world(a=1)["a"] == before["a"]
        run.finish()
        assert run.nodes["a"].wait() == 0


@contextlib.contextmanager
def one_of_two_is_dead(folder: Path) -> Iterator[tuple[Launch, list[int]]]:
    """A run of one node, and its workers before the first of them was killed; it has to finish."""
    options = "--max-restarts=9", "--nproc-per-node=2"
    with launch(folder, *options, nnodes="1", policy="soft-replace") as run:
        run.start("a")
        before = run.await_world(a=2)["a"]
        os.kill(before[0], signal.SIGKILL)
        run.until(lambda: are_gone(before[:1]), "it is dead")
        yield run, before
        run.finish()
        assert run.statuses() == {"a": 0}


def test_soft_replace_starts_only_the_dead_worker_anew(tmp_path: Path) -> None:
    with one_of_two_is_dead(tmp_path) as (run, before):
        after = run.await_world(a=2)["a"]
        assert before[1] in after
        assert before[0] not in after


def test_soft_replace_starts_a_worker_that_dies_while_another_one_is_replaced(
    tmp_path: Path,
) -> None:
    with one_of_two_is_dead(tmp_path) as (run, before):
        os.kill(before[1], signal.SIGKILL)
        after = run.await_world(a=2)["a"]
        assert not set(before) & set(after)


def test_workers_that_never_answer_are_restarted(tmp_path: Path) -> None:
    options = "--max-restarts=1", "--soft-ready-timeout=1"
    with launch(tmp_path, *options, nnodes="1") as run:
        run.start("a", traits=("silent",))
        assert run.nodes["a"].wait() == 1
        attempts = {p.parent.parent.name for p in tmp_path.glob("logs/**/error.json")}
        assert not attempts  # they were ended, and had no error of their own
        ended = [line for line in run.nodes["a"].lines if "ending the workers: workers did" in line]
        assert len(ended) == 2


def test_a_worker_that_ends_without_an_answer_holds_no_world_up(tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="1:2") as run:
        run.start("a", "--nproc-per-node=2", traits=("first-silent",))
        answers = [None, (1, 2)]
        run.until(lambda: [each.world for each in run.workers("a")] == answers, "an answer")
        silent, answering = (worker.pid for worker in run.workers("a"))
        run.finish(silent)
        run.start("b", "--nproc-per-node=1")
        run.until(lambda: any(each.world == (1, 3) for each in run.workers("a")), "another world")
        assert run.pids("a") == [answering]
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


def test_a_worker_that_removes_its_channel_is_reported_once(tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="1") as run:
        run.start("a")
        run.cut_off(*run.await_world(a=1)["a"])
        run.until(lambda: "cannot receive other worlds" in run.output(), "it is reported")
        run.finish()
        assert run.statuses() == {"a": 0}
        output = run.output()
    assert output.count("cannot receive other worlds") == 1, output
    assert "Traceback" not in output


def test_a_worker_that_cannot_be_reached_delays_no_node(tmp_path: Path) -> None:
    """The others would wait for its answer until the deadline."""
    with launch(tmp_path, "--max-restarts=1", "--soft-ready-timeout=600", nnodes="1:2") as run:
        run.start("a")
        first = run.await_world(a=1)["a"]
        run.cut_off(*first)
        run.start("b")
        assert run.await_world(a=1, b=1)["a"] != first
        assert CUT_OFF in run.output()
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


def test_a_worker_that_cannot_say_that_it_is_in_its_world_is_restarted(tmp_path: Path) -> None:
    """The next nodes would wait for its answer until the deadline."""
    with launch(tmp_path, "--max-restarts=1", "--soft-ready-timeout=600", nnodes="1:2") as run:
        run.start("a", traits=("cut-off",))
        run.start("b")
        run.until(lambda: [each.attempt for each in run.workers("a")] == [1], "it is restarted")
        assert CUT_OFF in run.output()
        run.await_world(a=1, b=1)
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


def test_without_a_deadline_workers_need_not_answer(tmp_path: Path) -> None:
    with launch(tmp_path, "--soft-ready-timeout=0", nnodes="1:2") as run:
        run.start("a", traits=("silent",))
        run.until(lambda: run.workers("a"), "the first node's worker")
        before = run.pids("a")
        run.start("b", traits=("silent",))
        run.until(lambda: run.workers("b"), "the second node's worker")
        assert run.pids("a") == before
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


def test_workers_that_leave_their_world_get_another_one(tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="2") as run:
        run.start("a")
        run.start("b")
        before = run.await_world(a=1, b=1)
        first = run.workers("a")[0].notes[-1]["round"]
        run.leave(before["a"][0])
        run.until(lambda: run.workers("a")[0].notes[-1]["round"] > first, "another world")
        assert run.await_world(a=1, b=1) == before
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


def test_many_failures_of_one_worker_restart_its_peers(tmp_path: Path) -> None:
    options = "--max-restarts=9", "--nproc-per-node=2", "--max-soft-failures=1"
    with launch(tmp_path, *options, nnodes="1", policy="soft-replace") as run:
        run.start("a")
        peer = run.await_world(a=2)["a"][1]
        for _ in range(2):
            worker = next(pid for pid in run.await_world(a=2)["a"] if pid != peer)
            run.fail(worker)
            run.until(lambda pid=worker: are_gone([pid]), "it has failed")
        assert peer not in run.await_world(a=2)["a"]
        run.finish()
        assert run.statuses() == {"a": 0}


def test_a_frozen_worker_is_ended_as_soon_as_the_others(tmp_path: Path) -> None:
    options = "--max-restarts=1", "--nproc-per-node=2", "--shutdown-timeout=300"
    with launch(tmp_path, *options, nnodes="1") as run:
        run.start("a")
        before = run.await_world(a=2)["a"]
        os.kill(before[0], signal.SIGSTOP)
        os.kill(before[1], signal.SIGKILL)
        run.until(lambda: are_gone(before), "the frozen one is ended")
        run.await_world(a=2)
        run.finish()
        assert run.statuses() == {"a": 0}


def test_a_worker_that_is_stopped_for_long_is_replaced(tmp_path: Path) -> None:
    """The worker's agent lives, and no connection breaks: nobody else would notice the stop."""
    options = "--max-restarts=1", "--stopped-worker-timeout=2"
    with launch(tmp_path, *options, nnodes="1:2") as run:
        run.start("a")
        run.start("b")
        before = run.await_world(a=1, b=1)
        os.kill(before["b"][0], signal.SIGSTOP)
        run.until(lambda: are_gone(before["b"]), "it is killed")
        after = run.await_world(a=1, b=1)
        assert after["a"] == before["a"]
        assert "has been stopped for 2 s" in run.output()
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


def test_a_second_signal_ends_the_wait_for_workers(tmp_path: Path) -> None:
    with launch(tmp_path, "--shutdown-timeout=300", nnodes="1") as run:
        program = run.start("a", traits=("stubborn",))
        pids = run.await_world(a=1)["a"]
        program.signal(signal.SIGTERM)
        program.wait_for("ending the workers")
        assert not are_gone(pids)
        program.signal(signal.SIGTERM)
        assert program.wait() == 1
        assert are_gone(pids)


@pytest.mark.parametrize("waits", ["wait_for_worker_event()", "leave_world(), get_worker_info()"])
def test_a_worker_that_handles_sigterm_does_not_wait_for_another_world(
    waits: str, tmp_path: Path
) -> None:
    script = tmp_path / "asking.py"
    script.write_text(
        "import signal\n"
        "from torchft_svc.elastic import *\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('received SIGTERM', flush=True))\n"
        "get_worker_info()\n"
        "print('asks', flush=True)\n"
        "while True:\n"
        f"    {waits}\n"
    )
    with launch(tmp_path, "--shutdown-timeout=300", nnodes="1") as run:
        program = run.start("a", script=[str(script)])
        program.wait_for("asks")
        program.signal(signal.SIGTERM)
        assert program.wait() == 1
        output = run.output()
    assert "WorkerEnding: there is no world for this worker" in output
    assert "it received SIGTERM" in output
