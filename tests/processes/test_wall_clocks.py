"""Wall clocks jump while groups train: nobody is lost, no step is discarded, no id comes twice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from support.etcd_server import ETCD, etcd_server
from support.running import ROOT, FreshProcess, Process, steady_address

from tools.chaos.fleet import Fleet
from tools.chaos.fork_server import worker_server
from tools.demo.events import Committed, Discarded

LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        LIBRARY is None, reason="needs libfaketime (Debian: apt-get install faketime)"
    ),
]
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
GROUPS = {0, 1}
DEADLINE_S = 60.0


# Since 3.11 Python sleeps until an instant of the monotonic clock, which the library (0.9.10) takes
# for one of the wall clock, and refuses. The interpreter runs this when it starts.
OTHER_SLEEP = """
import select, time
time.sleep = lambda secs: select.select([], [], [], secs) and None
"""


class WallClock:
    """The wall clock of processes with its ``variables``; their monotonic clocks go on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        first_of_all = file.with_suffix(".site")
        first_of_all.mkdir()
        (first_of_all / "sitecustomize.py").write_text(OTHER_SLEEP)
        self.variables = {
            "PYTHONPATH": f"{first_of_all}:{ROOT}",
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.jump(timedelta())

    def jump(self, away: timedelta) -> None:
        """Show a time so far from the true one, at once and for all of them."""
        beside = self._file.with_suffix(".new")
        beside.write_text(f"{away.total_seconds():+.0f}")
        beside.replace(self._file)


@pytest.fixture
def election(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Flags for a lighthouse that leads as long as its lease lasts; none where there is no etcd."""
    if ETCD is None:
        yield ()
        return
    with etcd_server(tmp_path / "etcd") as etcd:
        yield f"--leader-election=etcd://{etcd.address}/torchft", "--lease-ttl-s=60"


def test_clocks_jump_while_groups_train(tmp_path: Path, election: tuple[str, ...]) -> None:
    at_lighthouse, at_groups = (WallClock(tmp_path / name) for name in ("lighthouse", "groups"))
    address = steady_address()

    def lighthouse() -> Process:
        flags = ("--min-replicas=2", *election)
        return FreshProcess(
            "lighthouse_server", f"--bind={address}", *flags, **at_lighthouse.variables
        )

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(lighthouse())
        fork_server = stack.enter_context(worker_server(**at_groups.variables))
        fleet = Fleet(fork_server, tmp_path, address)
        stack.callback(fleet.end)
        for group in GROUPS:
            fleet.start(group)
        fleet.all_meet(GROUPS)
        met_at = time.monotonic()
        for away in (HOUR, timedelta(), -DAY):
            for clock in (at_lighthouse, at_groups):
                clock.jump(away)
                fleet.await_commits(GROUPS, DEADLINE_S, since=time.monotonic(), num_members=2)
        assert all("lost the lighthouse" not in each.output() for each in fleet.lives), (
            fleet.summary()
        )
        discarded = [fleet.of(group, Discarded, since=met_at) for group in GROUPS]
        assert discarded == [[], []], fleet.summary()
        log = first.errors()
        assert "group lost" not in log
        first.end()
        second = stack.enter_context(lighthouse())
        fleet.all_meet(GROUPS)
        fleet.start(2)  # until then the quorum of the first lighthouse stays in force
        fleet.all_meet({*GROUPS, 2})

        assert all(worker.is_running for worker in fleet.lives), fleet.summary()
        assert all(len(fleet.of(group, Discarded)) <= 1 for group in GROUPS), fleet.summary()
        check_ids_and_weights(fleet)
        assert logged_at(second.errors(), "quorum changed") < datetime.now() - DAY / 2
        assert logged_at(fleet.lives[0].output(), "lost the lighthouse") < datetime.now() - DAY / 2


def check_ids_and_weights(fleet: Fleet) -> None:
    commits = {group: fleet.of(group, Committed) for group in GROUPS}
    members: dict[int, str] = {}
    digests: dict[int, str] = {}
    for mine in commits.values():
        ids = [commit.quorum_id for commit in mine]
        assert ids == sorted(ids), "I1"
        for commit in mine:
            assert members.setdefault(commit.quorum_id, commit.members) == commit.members, "I1"
            assert digests.setdefault(commit.step, commit.digest) == commit.digest, "I3"
    assert len(members) > 1, "the second lighthouse has given out one of its own"


def logged_at(log: str, text: str) -> datetime:
    """What the clock showed when a line with ``text`` was written last."""
    (*_, line) = (line for line in log.splitlines() if text in line)
    return datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
