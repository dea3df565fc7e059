"""Tests plain torchrun with its rendezvous at a lighthouse: real agents, workers and signals."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.running import eventually, lighthouse_process, line_to, refusing, steady_address
from support.torchrun import WAIT_S, Nodes, needs_entry_point

pytestmark = [pytest.mark.processes, needs_entry_point]

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
    """The workers train at the second lighthouse of a list, with a token."""
    with (
        refusing() as nobody,
        lighthouse_process(TORCHFT_TOKEN=TOKEN) as lighthouse,
        Nodes(
            tmp_path,
            *flags(f"{nobody},{lighthouse.address}", "2"),
            "--nproc-per-node=1",
            script="torchrun_trainer.py",
            TORCHFT_TOKEN=TOKEN,
        ) as nodes,
    ):
        nodes.start()
        nodes.start()
        assert nodes.statuses() == [0, 0], [each.lines for each in nodes.agents]
        sums = {path.name: path.read_text() for path in tmp_path.glob("sum-*")}
        assert sums == {f"sum-{rank}": "1 of 2" for rank in range(2)}


def test_nodes_come_and_go_and_no_restart_is_used(tmp_path: Path) -> None:
    """The lighthouse is restarted meanwhile, and has a job and another run beside this one."""
    address = steady_address()
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    with (
        Nodes(run, *flags(address, "1:3")) as nodes,
        Nodes(other, *flags(address, "1:1", run="other")) as alone,
    ):
        with lighthouse_process(bind=address) as lighthouse, line_to(address) as line:
            nodes.start("--nproc-per-node=1")
            second = nodes.start("--nproc-per-node=2")
            alone.start("--nproc-per-node=1")
            assert line.quorum("group:1", timeout_s=20).result().quorum.quorum_id
            before = nodes.await_world(1, 2)
            alone.await_world(1)
            second.signal(signal.SIGKILL)
            after = nodes.await_world(1)
            assert after[0]["MASTER_PORT"] != before[0]["MASTER_PORT"]
            assert "world formed run=run" in lighthouse.errors()
            lighthouse.kill()
        with lighthouse_process(bind=address):
            nodes.start("--nproc-per-node=2")
            joined = nodes.await_world(1, 2)
            assert {each["TORCHELASTIC_RESTART_COUNT"] for each in joined} == {"0"}
            assert {each["TORCHELASTIC_USE_AGENT_STORE"] for each in joined} == {"True"}
            assert nodes.finish() == [0, -signal.SIGKILL, 0]
            assert alone.finish() == [0]
            assert len(list(other.glob("*.json"))) == 1, "nobody has restarted its worker"


def test_only_the_node_whose_worker_fails_uses_a_restart(tmp_path: Path) -> None:
    with (
        lighthouse_process() as lighthouse,
        Nodes(
            tmp_path, *flags(lighthouse.address, "2"), "--nproc-per-node=1", "--max-restarts=1"
        ) as nodes,
    ):
        nodes.start()
        nodes.start()
        first, _ = nodes.await_world(1, 1)
        (tmp_path / f"fail-{first['pid']}").touch()
        again = nodes.await_world(1, 1, holds=lambda each: each["pid"] != first["pid"])
        counts = {each["agent"]: each["TORCHELASTIC_RESTART_COUNT"] for each in again}
        assert counts.pop(first["agent"]) == "1"
        assert set(counts.values()) == {"0"}
        failed = next(each for each in again if each["agent"] == first["agent"])
        (tmp_path / f"fail-{failed['pid']}").touch()
        assert nodes.statuses() == [1, 1]
        lines = [line for each in nodes.agents for line in each.lines]
        assert any("is over" in line for line in lines), "it is closed for the other node, too"


def test_a_frozen_node_is_left_out_until_it_goes_on(tmp_path: Path) -> None:
    with (
        lighthouse_process("--heartbeat-timeout-ms=2000") as lighthouse,
        Nodes(tmp_path, *flags(lighthouse.address, "1:2"), "--nproc-per-node=1") as nodes,
    ):
        living, frozen = nodes.start(), nodes.start()
        nodes.await_world(1, 1)
        frozen.signal(signal.SIGSTOP)
        eventually(lambda: sizes(nodes, living.pid) == ["1"], WAIT_S)
        frozen.signal(signal.SIGCONT)
        again = nodes.await_world(1, 1)
        assert {each["TORCHELASTIC_RESTART_COUNT"] for each in again} == {"0"}
        assert nodes.finish() == [0, 0]


def sizes(nodes: Nodes, agent: int) -> list[str]:
    """Sizes of the worlds in which the workers of this agent are."""
    return [each["WORLD_SIZE"] for each in nodes.workers() if each["agent"] == agent]


def test_mistakes_are_explained_in_a_sentence(tmp_path: Path) -> None:
    with (
        lighthouse_process(TORCHFT_TOKEN=TOKEN) as lighthouse,
        Nodes(tmp_path, *flags(lighthouse.address, "1:2"), "--nproc-per-node=1") as nodes,
    ):
        stranger = nodes.start()
        mistaken = nodes.start("--rdzv-conf=keep_alive=3")
        assert nodes.statuses() == [1, 1]
        assert "this service requires a token: set TORCHFT_TOKEN" in "\n".join(stranger.lines)
        assert "rdzv_conf keep_alive='3' cannot work: the lighthouse knows" in "\n".join(
            mistaken.lines
        )
