"""Every benchmark runs in a tiny size, prints its table and writes its JSON; no time is judged."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click import Command
from click.testing import CliRunner
from support.warm import Warm

from tools.benchmarks import (
    buddy,
    dashboard,
    fleet,
    isolation,
    launcher,
    meeting,
    memory,
    quorum_rounds,
    recovery,
    replica_groups,
    stall,
    start,
    step_time,
    striping,
    trainer,
    under_failures,
)
from tools.benchmarks.children.phases import PARTS, PHASES
from tools.benchmarks.processes import PEER_VARIABLE, ROOT

Run = Callable[..., tuple[str, dict[str, Any]]]
pytestmark = [pytest.mark.processes]


@pytest.fixture(name="run")
def run_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a benchmark without the public release; its output, and its JSON.

    Its processes have imported torch before they are started.
    """
    monkeypatch.delenv(PEER_VARIABLE, raising=False)
    forked = functools.partial(Warm, drops_memory=True)
    monkeypatch.setattr("tools.benchmarks.processes.Popen", forked)

    def run(benchmark: Command, *flags: str) -> tuple[str, dict[str, Any]]:
        json_file = tmp_path / "results" / "result.json"
        outcome = CliRunner().invoke(
            benchmark, [*flags, f"--json={json_file}"], catch_exceptions=False
        )
        assert outcome.exit_code == 0, outcome.output
        result = json.loads(json_file.read_text())
        assert result.keys() >= {"benchmark", "date", "machine", "settings", "rows", "notes"}
        return outcome.output, result

    return run


def test_dashboard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "_PAUSE_S", 0.5)
    monkeypatch.setattr(dashboard, "_NUM_REQUESTS", 3)
    flags = ["--groups=70", "--readers=2", "--seconds=1", "--repeat=1", "--load-processes=1"]
    output, result = run(dashboard.main, *flags)
    assert "server ms an update" in output
    rows = {row["what"]: row for row in result["rows"]}
    assert rows["2 readers"]["update_kb"] > 0
    assert rows["GET /metrics"]["median_ms"] > 0
    assert "first paint" in rows or not shutil.which("chromium")


def test_quorum_rounds(run: Run) -> None:
    output, result = run(
        quorum_rounds.main, "--callers=1", "--callers=5", "--seconds=0.05", "--blocks=2"
    )
    assert "server CPU ms" in output
    rows = [(row["callers"], row["over"]) for row in result["rows"]]
    assert rows == [(1, "sessions"), (1, "unary"), (5, "sessions"), (5, "unary")]
    for row in result["rows"]:
        assert row["rounds"] >= 2
        assert row.keys() >= {"wall_ms", "wall_worst_ms", "server_cpu_ms", "load_cpu_ms"}
        assert row["wall_ms"] > 0


def test_meeting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "")  # it is set for all that follow
    tiny = ("--members=5", "--processes=2", "--repeat=1", "--late-s=0")
    _, result = run(meeting.main, *tiny)
    clients, processes = result["rows"]
    assert (clients["members"], clients["requests"] < 10) == (5, True)
    assert processes["members"] == 2
    assert min(processes["meet_ms"], processes["gloo_ms"]) > 0


def test_buddy(run: Run) -> None:
    tiny = ("--gb=0.01", "--step-s=0.02", "--every=2", "--blocks=3")
    output, result = run(buddy.main, *tiny)
    assert "to off" in output
    off, idle, held = result["rows"]
    assert [row["way"] for row in (off, idle, held)] == list(buddy.WAYS)
    assert off["ratio"] == 1.0
    assert min(idle["ratio"], held["ratio"]) > 0
    assert all(len(row["ratios"]) == 3 and row["longest_ms"] > 0 for row in result["rows"])
    assert held["behind"] >= 0
    assert held["holder_gb"] > 0
    assert idle["holder_gb"] is None


def test_fleet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_PAUSE_S", 0.2)
    tiny = ("--groups=4", "--seconds=0.3", "--joins=1", "--load-processes=1")
    _, result = run(fleet.main, *tiny)
    assert [row["mode"] for row in result["rows"]] == ["asking in each step", "steady"]
    for row in result["rows"]:
        assert row["steps_per_s"] > 0
        assert min(row["join_s"], row["news_s"], row["loss_s"]) > 0
    _, result = run(fleet.main, *tiny, "--steady", "--deaf=2")
    (row,) = result["rows"]
    assert (row["deaf"], row["join_s"] > 0) == (2, True)


def test_fleet_with_a_virtual_clock(run: Run) -> None:
    output, result = run(fleet.main, "--simulated=20", "--seconds=6", "--joins=2")
    assert "encoded once" in output
    counts = {row["event"]: row["count"] for row in result["rows"]}
    assert counts["group killed"] == counts["session of a newcomer"] == 2
    assert min(counts["beat"], counts["tick"], counts["quorum"]) > 0


def test_step_time(run: Run) -> None:
    tiny = ("--width=16", "--depth=1", "--batch=2", "--steps=2", "--blocks=2")
    output, result = run(step_time.main, *tiny, f"--before={ROOT}")
    assert "Where our step spends its time" in output
    plain, ours, before = result["rows"]
    assert [row["trainer"] for row in (plain, ours, before)] == [
        "plain DDP",
        "ours",
        "ours, before",
    ]
    assert ours["before_ratio"] > 0
    for row in (plain, ours):
        assert row.keys() >= {f"{phase}_ms" for phase in (*PHASES, "total")}
        assert len(row["ratios"]) == 2
    assert ours.keys() >= {f"{part}_ms" for part in PARTS}
    # Each part was really timed: the method that does it still has the name that is wrapped. These
    # steps ask nobody.
    assert all((ours[f"{part}_ms"] > 0) is (part != "ask") for part in PARTS)


@pytest.mark.parametrize("wrapper", ["torch", "none"])
def test_step_time_of_other_wrappers(run: Run, wrapper: str) -> None:
    tiny = ("--width=16", "--depth=1", "--batch=2", "--steps=2", "--blocks=1")
    _, result = run(step_time.main, *tiny, f"--wrapper={wrapper}")
    assert all(row["total_ms"] > 0 for row in result["rows"])


def test_step_time_of_groups_of_two_workers(run: Run) -> None:
    tiny = ("--width=16", "--depth=1", "--batch=2", "--steps=2", "--blocks=1", "--group-size=2")
    _, result = run(step_time.main, *tiny)
    plain, ours = result["rows"]
    assert min(plain["total_ms"], ours["total_ms"], ours["vote_ms"]) > 0


def test_recovery(run: Run) -> None:
    tiny = ("--groups=2", "--kind=trainer and manager", "--kills=1", "--width=8", "--depth=1")
    output, result = run(recovery.main, *tiny, "--early")
    assert "imports" in output
    assert [row["trainer"] for row in result["rows"]] == ["ours", "ours, early manager"]
    for row in result["rows"]:
        assert (row["killed"], row["kills"]) == ("trainer and manager", 1)
        assert row["pause_ms"] > 0
        assert row["rejoin_s"] > row["built_s"] > 0
        assert row["rest_s"] == pytest.approx(row["ready_s"] + row["heal_s"])


def test_under_failures(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "runs.png"
    # A killed trainer is back before the next kill: when all are lost, their work begins anew. Both
    # groups could not do more than 80 batches in two intervals.
    tiny = ("--groups=2", "--every=3", "--step-s=0.15", "--steps=41", "--calm-steps=10")
    output, result = run(
        under_failures.main, *tiny, "--seeds=1", "--side=ours", f"--picture={picture}"
    )
    assert "goodput" in output
    calm, killed = result["rows"]
    assert (calm["every"], calm["kills"], calm["goodput"]) == ("no kills", 0, 1)
    assert (killed["side"], killed["every"], killed["crashes"]) == ("ours", "3 s", 0)
    assert killed["kills"] >= 2
    assert killed["standstill_s"] > 0
    (each,) = killed["each"]
    assert each["batches"] >= 82
    assert each["curve"][-1] == [round(each["wall_s"], 2), each["batches"]]
    assert picture.stat().st_size > 10_000


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest of a launched run that loses one: the workers of each import torch."""
    monkeypatch.setattr(launcher, "NUM_NODES", 2)


@pytest.mark.usefixtures("two_nodes")
def test_launcher(run: Run) -> None:
    tiny = ("--kills=1", "--init-kills=0", "--killed=worker", "--idle")
    output, result = run(launcher.main, *tiny, "--side=torchft-run, soft")
    assert "ended by a kill" in output
    (row,) = result["rows"]
    assert (row["killed"], row["kills"], row["ended"]) == ("a worker", 1, 0)
    assert row["launcher"] == "torchft-run, soft, idle"
    assert row["back_s"] > row["pause_s"] > 0


@pytest.mark.usefixtures("two_nodes")
def test_launcher_of_a_frozen_node(run: Run) -> None:
    tiny = ("--kills=1", "--init-kills=0", "--killed=frozen", "--heartbeat-timeout-s=2")
    output, result = run(launcher.main, *tiny, "--side=torchft-run, soft", "--side=torchrun")
    assert "heartbeat timeout, 2 s" in output
    (row,) = result["rows"]
    assert (row["killed"], row["ended"]) == ("a node, frozen", 0)
    assert row["launcher"] == "torchft-run, soft"
    # Nobody misses it earlier, and it is in that world only after it was woken.
    assert row["back_s"] > row["pause_s"] > 1
    assert row["intake_s"] > 0


def test_replica_groups(run: Run) -> None:
    tiny = ("--kills=1", "--rank=1", "--step-s=0.5")
    output, result = run(replica_groups.main, *tiny, "--side=hard")
    assert "group trains again" in output
    (row,) = result["rows"]
    assert (row["killed"], row["kills"], row["ended"]) == ("rank 1", 1, 0)
    assert row["back_s"] > 0
    assert row["gain"] == 1


def test_trainer(run: Run) -> None:
    output, result = run(trainer.main, "--kills=1", "--workers=2", "--killed=the leader")
    assert "steps lost" in output
    for row, mode in zip(result["rows"], ("restart", "per-step"), strict=True):
        assert (row["mode"], row["killed"], row["kills"]) == (mode, "the leader", 1)
        assert row["lost_steps"] == 0
        assert row["back_s"] >= row["pause_s"] > 0


def test_start(run: Run) -> None:
    output, result = run(start.main, "--starts=1", "--only=killed trainer")
    assert "ready, and in which stage" in output
    plain, ours = result["rows"]
    assert (plain["what"], ours["what"]) == ("plain trainer", "killed trainer")
    assert ours["over_plain_s"] == pytest.approx(ours["ready_s"] - plain["ready_s"])
    stages = ("torch", "client", "model", "manager", "quorum", "commit")
    assert sum(ours[f"{stage}_s"] for stage in stages) == pytest.approx(ours["ready_s"])


def test_isolation(run: Run) -> None:
    output, result = run(isolation.main, "--megabytes=0.1", "--blocks=1")
    assert "isolated / in process" in output
    (row,) = result["rows"]
    assert row["in process"] > 0
    assert row["isolated"] > 0
    assert row["shared"] > 0


def test_striping(run: Run) -> None:
    tiny = ("--gb=0.13", "--repeat=1", "--sources=1", "--sources=2", "--mb-per-s=200")
    output, result = run(striping.main, *tiny)
    assert "Healing 0.13 GB from several groups" in output
    rows = [(row["link"], row["num_sources"]) for row in result["rows"]]
    assert rows == [("200 MB/s", 1), ("200 MB/s", 2), ("loopback", 1), ("loopback", 2)]
    for row in result["rows"]:
        assert min(row["wall_s"], row["speedup"], row["receiver_cpu_s"]) > 0


@pytest.mark.timeout(300)  # four processes import torch, one of them at the end
def test_stall(run: Run) -> None:
    output, result = run(stall.main, "--gb=0.07", "--mb-per-s=100", "--join-timeout-s=30")
    assert "0.07 GB are healed from" in output
    (row,) = result["rows"]
    assert row.keys() >= {"ordinary_ms", "clone_ms", "heal_ms", "update_ms", "next_wait_ms"}
    assert [step["groups"] for step in row["steps"]] == [2] * 5
    # What a link carries no faster is not waited for in the step of the heal.
    assert row["transfer_ms"] > 500


@pytest.mark.timeout(300)  # four trainers, one after the other
def test_memory(run: Run) -> None:
    tiny = ("--mb=16", "--width=512", "--steps=4", "--repeat=1")
    output, result = run(memory.main, *tiny)
    assert "17 MB of parameters" in output
    names = [row["trainer"] for row in result["rows"]]
    assert names == ["plain", "DDP", "DDP, views", "ours"]
    for row in result["rows"]:
        # The parameters and their gradients are there after each step, whatever holds them.
        assert row["whole_mb"] > row["peak_mb"] >= row["plateau_mb"] > 2 * 16
        for other in ("plain", "ddp", "ddp_views"):
            assert min(row[f"peak_of_{other}"], row[f"plateau_of_{other}"]) > 0
    ours = result["rows"][-1]
    assert ours["others_mb"] > 0, "the manager is a process of its own"
