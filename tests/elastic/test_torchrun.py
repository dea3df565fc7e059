"""Tests plain torchrun with its rendezvous at a lighthouse: real agents, workers and signals."""

from __future__ import annotations

import signal
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from support.launches import Launch
from support.running import eventually, lighthouse_process, line_to, refusing, steady_address

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        "lighthouse" not in entry_points(group="torchrun.handlers").names,
        reason="the package was installed before it had this entry point: install it again",
    ),
]

TOKEN = "a-very-secret-token"  # noqa: S105 - a token for these tests


def flags(address: str, nnodes: str, run: str = "run", window_s: float = 1.0) -> list[str]:
    return [
        "--rdzv-backend=lighthouse",
        f"--rdzv-endpoint={address}",
        f"--rdzv-id={run}",
        f"--nnodes={nnodes}",
        f"--rdzv-conf=last_call_timeout={window_s},join_timeout=100",
    ]


def test_workers_of_two_nodes_train_together(tmp_path: Path) -> None:
    """At the second lighthouse of a list, with a token, and a manager's job beside them."""
    with (
        refusing() as nobody,
        lighthouse_process(TORCHFT_TOKEN=TOKEN) as lighthouse,
        Launch(
            tmp_path,
            *flags(f"{nobody},{lighthouse.address}", "2"),
            script="launched_trainer.py",
            TORCHFT_TOKEN=TOKEN,
        ) as launch,
    ):
        launch.node("--nproc-per-node=1")
        launch.node("--nproc-per-node=2")
        statuses = [agent.wait(90) for agent in launch.agents]
        assert statuses == [0, 0], [launch.log(agent) for agent in launch.agents]
        told = {path.name: path.read_text() for path in tmp_path.glob("sum-*")}
        assert told == {f"sum-{rank}": "3 of 3" for rank in range(3)}


def test_nodes_come_and_go_and_no_restart_is_used(tmp_path: Path) -> None:
    """Also while the lighthouse is restarted, and beside a job and another run on it."""
    address = steady_address()
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    with (
        Launch(run, *flags(address, "1:3")) as launch,
        Launch(other, *flags(address, "1:1", run="other")) as alone,
    ):
        with lighthouse_process(bind=address) as lighthouse, line_to(address) as line:
            launch.node("--nproc-per-node=1")
            second = launch.node("--nproc-per-node=2")
            alone.node("--nproc-per-node=1")
            assert line.quorum("group:1", timeout_s=20).result().quorum.quorum_id
            before = launch.await_world(1, 2)
            alone.await_world(1)
            second.kill()
            after = launch.await_world(1)
            assert {each["MASTER_PORT"] for each in (*before, *after)} > {before[0]["MASTER_PORT"]}
            assert "world formed run=run" in lighthouse.errors()
            lighthouse.kill()
        with lighthouse_process(bind=address):
            launch.node("--nproc-per-node=2")
            joined = launch.await_world(1, 2)
            assert {each["TORCHELASTIC_RESTART_COUNT"] for each in joined} == {"0"}
            assert {each["TORCHELASTIC_USE_AGENT_STORE"] for each in joined} == {"True"}
            (untouched,) = alone.workers()
            assert untouched["RANK"] == "0"
            launch.agents.remove(second)
            assert launch.end() == [0, 0]
            assert alone.end() == [0]


def test_only_the_node_whose_worker_fails_uses_a_restart(tmp_path: Path) -> None:
    with (
        lighthouse_process() as lighthouse,
        Launch(
            tmp_path, *flags(lighthouse.address, "2"), "--nproc-per-node=1", "--max-restarts=1"
        ) as launch,
    ):
        launch.node()
        launch.node()
        first, _ = launch.await_world(1, 1)
        (tmp_path / f"fail-{first['pid']}").touch()
        again = launch.await_world(1, 1, holds=lambda each: each["pid"] != first["pid"])
        counts = {each["agent"]: each["TORCHELASTIC_RESTART_COUNT"] for each in again}
        assert counts.pop(first["agent"]) == "1"
        assert set(counts.values()) == {"0"}
        failed = next(each for each in again if each["agent"] == first["agent"])
        (tmp_path / f"fail-{failed['pid']}").touch()
        assert [agent.wait(90) for agent in launch.agents] == [1, 1]
        logs = "".join(launch.log(agent) for agent in launch.agents)
        assert "is over" in logs, "the run is closed for the other node, too"


def test_a_frozen_node_is_left_out_until_it_goes_on(tmp_path: Path) -> None:
    with (
        lighthouse_process("--heartbeat-timeout-ms=2000") as lighthouse,
        Launch(tmp_path, *flags(lighthouse.address, "1:2"), "--nproc-per-node=1") as launch,
    ):
        living, frozen = launch.node(), launch.node()
        launch.await_world(1, 1)
        frozen.send_signal(signal.SIGSTOP)
        eventually(lambda: alone(launch, living.pid), 90)
        frozen.send_signal(signal.SIGCONT)
        again = launch.await_world(1, 1)
        assert {each["TORCHELASTIC_RESTART_COUNT"] for each in again} == {"0"}
        assert launch.end() == [0, 0]


def alone(launch: Launch, agent: int) -> bool:
    """Whether the worker of this agent is in a world of its own; another agent is frozen."""
    return [each["WORLD_SIZE"] for each in launch.workers() if each["agent"] == agent] == ["1"]


def test_mistakes_are_told_in_a_sentence(tmp_path: Path) -> None:
    with lighthouse_process(TORCHFT_TOKEN=TOKEN) as lighthouse:
        where = flags(lighthouse.address, "1:2")
        with Launch(tmp_path, *where, "--nproc-per-node=1") as launch:
            stranger = launch.node()
            mistaken = launch.node("--rdzv-conf=keep_alive=3")
            assert [agent.wait(90) for agent in launch.agents] == [1, 1]
            assert "this service requires a token: set TORCHFT_TOKEN" in launch.log(stranger)
            assert "rdzv_conf keep_alive='3' cannot work: the lighthouse knows" in launch.log(
                mistaken
            )
