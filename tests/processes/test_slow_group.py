"""A group is slower than the others: it is found, named, and drained if the policy says so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.running import lighthouse_process

from tools.chaos.fleet import Fleet
from tools.demo.events import Discarded, Exited

pytestmark = pytest.mark.processes

FAST_S, SLOW_S = 0.02, 0.2
# The mean of a slow step is there after 10 steps, and then it lasts.
AFTER_S = 1.0
LONG_S = 60.0


def ask(lighthouse: str, command: str, *flags: str) -> str:
    """The answer to an operator's command."""
    program = [sys.executable, "-m", "torchft_svc.lighthouse_server", command, *flags]
    return subprocess.run(
        [*program, f"--lighthouse={lighthouse}"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=True,
    ).stdout


def slow_records(lighthouse: str) -> list[dict[str, Any]]:
    found = json.loads(ask(lighthouse, "incidents", "--json"))
    return [each for each in found["incidents"] if each["kind"] in ("slow", "evicted")]


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.2)
    return found


def test_a_group_that_sleeps_in_its_forward_pass_is_named_and_evicted(
    make_fleet: Callable[..., Fleet],
) -> None:
    """The others go on without a lost step; it ends with status 0, and says why. Started again,
    without what made it slow, it is as welcome as any."""
    flags = ("--min-replicas=1", "--on-slow=evict", f"--slow-after-ms={AFTER_S * 1000:.0f}")
    with lighthouse_process(*flags) as lighthouse:
        fleet = make_fleet(lighthouse.address, step_s=FAST_S)
        fleet.start(0)
        fleet.start(1)
        (slow,) = fleet.start(2, step_s=SLOW_S)
        fleet.all_meet({0, 1, 2})
        met_at = time.monotonic()
        exited = fleet.await_event(Exited, LONG_S, wanted=lambda event: event.group == 2)
        assert (exited.status, exited.expected) == (0, True)
        assert "draining" in slow.output()
        assert "it is evicted because it is slow: its own work takes 0.2" in slow.output()
        fleet.await_commits({0, 1}, LONG_S, since=exited.at, num_members=2)
        assert not fleet.of(0, Discarded, since=met_at)
        (record,) = wait_for(
            lambda: [each for each in slow_records(lighthouse.address) if not each["is_open"]]
        )
        assert record["kind"] == "evicted"
        assert [each.split(":")[0] for each in record["groups"]] == ["group-2"]
        assert "times that of group" in record["cause"]
        assert "phase training, by group rank 0" in record["cause"]
        shown = ask(lighthouse.address, "status")
        assert "left" in shown
        assert "it is evicted because it is slow" in shown
        fleet.start(2)
        fleet.all_meet({0, 1, 2})


def test_by_default_a_slow_group_is_only_shown(make_fleet: Callable[..., Fleet]) -> None:
    """The log, the records and the status name it, and say in which phase it is slow."""
    with lighthouse_process(
        "--min-replicas=1", f"--slow-after-ms={AFTER_S * 1000:.0f}"
    ) as lighthouse:
        fleet = make_fleet(lighthouse.address, step_s=FAST_S)
        fleet.start(0)
        fleet.start(1, step_s=SLOW_S)
        fleet.all_meet({0, 1})
        (record,) = wait_for(lambda: slow_records(lighthouse.address))
        assert (record["kind"], record["is_open"]) == ("slow", True)
        (job,) = json.loads(ask(lighthouse.address, "status", "--json"))
        fast, slow = job["groups"]
        assert (fast["slow"], slow["slow"]) == (False, True)
        assert [each["phase"] for each in slow["paces"]] == [
            "step",
            "training",
            "updating",
            "between",
        ]
        assert fast["paces"][0]["to_best"] == 1.0
        assert fast["paces"][0]["seconds"] < SLOW_S / 2, "although its steps take as long"
        assert slow["paces"][1]["seconds"] >= SLOW_S
        assert slow["paces"][1]["to_best"] > 2
        shown = ask(lighthouse.address, "status")
        assert "SLOW" in shown
        assert "slow: group-1, group rank 0: training 0.2" in shown
        lines = [line for line in lighthouse.errors().splitlines() if "group slow job=" in line]
        assert len(lines) == 1
        assert "replica=group-1:" in lines[0]
