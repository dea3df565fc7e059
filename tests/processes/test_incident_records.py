"""The ledger of a job with real faults: each is one record with its cause, and the goodput is what
an observer measures."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.bounds import Late
from support.running import Process, command, eventually, lighthouse_process, steady_address

from tools.chaos.fleet import Fleet, Worker
from tools.chaos.observed import observe
from tools.demo.events import Committed, Discarded, Joined, SumFailed

pytestmark = pytest.mark.processes

GROUPS = {0, 1, 2}
SETTINGS = (
    "--min-replicas=1",
    "--join-timeout-ms=1000",
    "--heartbeat-timeout-ms=1500",
    "--hang-timeout-ms=3000",
    "--on-hang=evict",
)
LONG_S = 30.0
WITHIN = 0.02


class Ledger:
    """What `lighthouse incidents` shows of a job, since the last call of `mark`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._last = 0

    def read(self, after: int = 0) -> dict[str, Any]:
        flags = ("--lighthouse", self.address, "--json", f"--after={after}")
        found = command("lighthouse_server", "incidents", *flags)
        assert found.returncode == 0, found.stderr
        shown: dict[str, Any] = json.loads(found.stdout)
        return shown

    def mark(self) -> None:
        """Forget all records so far."""
        numbers = [each["number"] for each in self.read()["incidents"]]
        self._last = max(numbers, default=0)

    def await_kinds(self, *kinds: str, or_else: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """Wait until the records since `mark` are of these kinds, or of others, and completed."""
        wanted = [list(kinds), list(or_else or kinds)]
        found: list[dict[str, Any]] = []

        def are_there() -> bool:
            found[:] = self.read(self._last)["incidents"]
            is_complete = not any(each["is_open"] for each in found)
            return is_complete and [each["kind"] for each in found] in wanted

        try:
            eventually(are_there, LONG_S)
        except AssertionError:
            shown = json.dumps(found, indent=1)
            raise AssertionError(f"wanted: {', '.join(kinds)}; found: {shown}") from None
        return found


def names(record: dict[str, Any]) -> list[str]:
    return [each.split(":")[0] for each in record["groups"]]


def test_each_fault_is_one_record_with_its_cause(
    tmp_path: Path, make_fleet: Callable[..., Fleet]
) -> None:
    event_log, address = tmp_path / f"{time.monotonic()}.jsonl", steady_address()
    with lighthouse_process(*SETTINGS, f"--event-log={event_log}", bind=address) as lighthouse:
        _check_all(lighthouse, event_log, make_fleet(address))


def _check_all(lighthouse: Process, event_log: Path, fleet: Fleet) -> None:
    ledger = Ledger(lighthouse.address)
    workers = [fleet.start(group)[0] for group in sorted(GROUPS)]
    fleet.all_meet(GROUPS)
    first = ledger.read()["incidents"]
    assert {each["kind"] for each in first} == {"joined"}
    assert {name for each in first for name in names(each)} == {"group-0", "group-1", "group-2"}

    _kill(ledger, fleet, workers)
    _freeze(ledger, fleet, workers)
    _drain(ledger, fleet, workers)
    _hang(ledger, fleet, workers)
    _hang_between_steps(ledger, fleet, workers)
    _discard(ledger, fleet, workers)
    _kill_manager(ledger, fleet, workers)
    _check_goodput(ledger, fleet)
    _check_file(ledger, event_log)
    _restart_lighthouse(ledger, fleet, lighthouse)


def _kill(ledger: Ledger, fleet: Fleet, workers: list[Worker]) -> None:
    ledger.mark()
    fleet.kill(workers[2], with_manager=True)
    fleet.await_commits({0, 1}, LONG_S, since=time.monotonic(), num_members=2)
    (workers[2],) = fleet.start(2)
    fleet.all_meet(GROUPS)
    lost, joined = ledger.await_kinds("lost", "joined")
    assert names(lost) == names(joined) == ["group-2"]
    assert lost["groups"] != joined["groups"]
    assert lost["steps_discarded"] <= 1
    assert 0 < lost["first_commit_after_s"] < LONG_S
    assert lost["paused_s"] is not None, "0 if that took no longer than a step of a busy machine"
    assert lost["reconfigured_s"] > 0
    assert joined["healed_bytes"] > 1000
    assert joined["healed_s"] > 0


def _freeze(ledger: Ledger, fleet: Fleet, workers: list[Worker]) -> None:
    ledger.mark()
    frozen_at = workers[1].signal_all(signal.SIGSTOP)
    fleet.await_commits({0, 2}, LONG_S, since=frozen_at, num_members=2)
    workers[1].signal_all(signal.SIGCONT)
    fleet.all_meet(GROUPS)
    lost, joined = ledger.await_kinds("lost", "joined")
    assert "no sign of life" in lost["cause"] or "did not" in lost["cause"], lost
    assert names(lost) == names(joined) == ["group-1"]
    assert lost["detected_after_s"] >= 1.0


def _drain(ledger: Ledger, fleet: Fleet, workers: list[Worker]) -> None:
    ledger.mark()
    workers[2].asked_to_end = True
    workers[2].signal(signal.SIGTERM)
    fleet.await_commits({0, 1}, LONG_S, since=time.monotonic(), num_members=2)
    (drained,) = ledger.await_kinds("drained")
    assert names(drained) == ["group-2"]
    assert "SIGTERM" in drained["cause"]
    assert drained["steps_discarded"] == 0
    ledger.mark()
    (workers[2],) = fleet.start(2)
    fleet.all_meet(GROUPS)
    ledger.await_kinds("joined")


def _hang(ledger: Ledger, fleet: Fleet, workers: list[Worker]) -> None:
    ledger.mark()
    hung_at = time.monotonic()
    workers[1].command(f"hang_inside {LONG_S}")
    fleet.await_commits({0, 2}, LONG_S, since=hung_at, num_members=2)
    workers[1].command("wake")
    fleet.all_meet(GROUPS)
    (evicted,) = ledger.await_kinds("evicted")
    assert names(evicted) == ["group-1"]
    assert "it hangs: training" in evicted["cause"]
    assert evicted["detected_after_s"] >= 3.0


def _hang_between_steps(ledger: Ledger, fleet: Fleet, workers: list[Worker]) -> None:
    ledger.mark()
    hung_at = time.monotonic()
    workers[2].command(f"hang {LONG_S}")
    fleet.await_commits({0, 1}, LONG_S, since=hung_at, num_members=2)
    workers[2].command("wake")
    fleet.all_meet(GROUPS)
    (straggled,) = ledger.await_kinds("straggled")
    assert names(straggled) == ["group-2"]


def _discard(ledger: Ledger, fleet: Fleet, workers: list[Worker]) -> None:
    """The step is discarded, or summed again (E9) if another group asks first: then it is none."""
    ledger.mark()
    workers[1].command("fail")
    failed = fleet.await_event(SumFailed, LONG_S)
    fleet.await_commits(GROUPS, LONG_S, since=failed.at, num_members=3)
    fleet.all_meet(GROUPS)
    if not any(fleet.of(group, Discarded, since=failed.at) for group in GROUPS):
        ledger.await_kinds()
        return
    (discarded,) = ledger.await_kinds("discarded")
    assert discarded["steps_discarded"] == 1
    if fleet.of(1, Discarded, since=failed.at):
        assert names(discarded) == ["group-1"]
        assert "fails on purpose" in discarded["cause"]


def _kill_manager(ledger: Ledger, fleet: Fleet, workers: list[Worker]) -> None:
    ledger.mark()
    managers = [
        child
        for child in psutil.Process(workers[1].pid).children()
        if any("manager_server" in word for word in child.cmdline())
    ]
    assert managers
    for each in managers:  # the one that serves, and maybe one that waits to follow
        each.kill()
    fleet.all_meet(GROUPS)
    # A group whose next manager is late is lost, and comes back.
    found = ledger.await_kinds("manager_died", or_else=("manager_died", "joined"))
    assert all(names(each) == ["group-1"] for each in found)


def _check_goodput(ledger: Ledger, fleet: Fleet) -> dict[str, Any]:
    """The job's time begins with its first question, as the first trainer's does."""
    found: dict[str, Any] = ledger.read()["goodput"]
    read_at = time.monotonic()
    fleet.read()
    since = min(event.at for event in fleet.events if isinstance(event, Joined))
    seen = observe((each for each in fleet.events if isinstance(each, Committed)), since, read_at)
    print(f"goodput {found}, observed {seen.committed_s:.2f} s of {read_at - since:.2f} s")
    assert 0 < found["ratio"] < 1
    assert found["wall_s"] == pytest.approx(found["committed_s"] + sum(found["lost_s"].values()))
    difference_s = abs(found["committed_s"] - seen.committed_s)
    if difference_s > WITHIN * found["wall_s"]:
        raise Late(f"goodput {found}, observed {seen}")
    return found


def _check_file(ledger: Ledger, event_log: Path) -> None:
    """The last line with a number is the record's latest state."""
    records = {each["number"]: each for each in ledger.read()["incidents"]}
    lines = [json.loads(line) for line in event_log.read_text().splitlines()]
    assert {each["number"]: each for each in lines} == records
    assert len(lines) > len(records)


def _restart_lighthouse(ledger: Ledger, fleet: Fleet, lighthouse: Process) -> None:
    before = ledger.read()
    lighthouse.kill()
    killed_at = time.monotonic()
    fleet.await_commits(GROUPS, LONG_S, since=killed_at + 1.0, num_members=3)
    with lighthouse_process(*SETTINGS, bind=lighthouse.address):
        fleet.all_meet(GROUPS)
        try:
            (away,) = eventually(lambda: _all_report(ledger), LONG_S)
        except AssertionError:
            raise AssertionError(ledger.read()) from None
        assert names(away) == ["group-0", "group-1", "group-2"]
        assert "could not be reached" in away["cause"]
        assert away["number"] > max(each["number"] for each in before["incidents"])
        found = _check_goodput(ledger, fleet)
        assert found["lost_s"]["lighthouse_away"] < 1.0, "steps in a term need no lighthouse"
        assert found["wall_s"] > before["goodput"]["wall_s"], "group 0 knows the time before"


def _all_report(ledger: Ledger) -> list[dict[str, Any]]:
    found = _records_or_none(ledger, "lighthouse_away")
    return found if found and len(found[0]["groups"]) == len(GROUPS) else []


def _records_or_none(ledger: Ledger, kind: str) -> list[dict[str, Any]]:
    found = command("lighthouse_server", "incidents", "--lighthouse", ledger.address, "--json")
    if found.returncode:  # the job has not come back yet
        return []
    return [each for each in json.loads(found.stdout)["incidents"] if each["kind"] == kind]
