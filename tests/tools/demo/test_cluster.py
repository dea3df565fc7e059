"""Tests the demo's cluster and director with real processes: kills, restarts, the way out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.bounds import check
from support.running import ROOT, SCRIPTS, TESTS, eventually, is_alive
from support.scripts.clockwork_trainer import STEP_S

from tools.demo import cluster as cluster_module
from tools.demo import director
from tools.demo.cluster import Cluster, ClusterError
from tools.demo.director import Director, Script
from tools.demo.events import Committed, Event, Exited, Started
from tools.demo.promises import Outcome, Run, judge
from tools.demo.screen import PlainScreen

pytestmark = pytest.mark.processes

TRAINER = SCRIPTS / "clockwork_trainer.py"
DEADLINE_S = 30.0
# Of what does not end by itself.
SHORT_GRACE_S = 0.3


def clockwork(fault: str = "well") -> Callable[[int, int, Path], list[str]]:
    def command(group: int, incarnation: int, events: Path) -> list[str]:
        return [str(TRAINER), str(group), str(incarnation), str(events), fault]

    return command


@pytest.fixture(autouse=True)
def _demo_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{TESTS}")


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left over on purpose is not waited for."""
    monkeypatch.setattr(cluster_module, "_LEFTOVER_GRACE_S", SHORT_GRACE_S)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, clockwork()) as cluster:
        yield cluster


def read_until(cluster: Cluster, wanted: Callable[[Event], bool]) -> list[Event]:
    """The events up to the first that is ``wanted``, which must come."""
    events: list[Event] = []

    def is_there() -> bool:
        events.extend(new := cluster.read_events())
        return any(map(wanted, new))

    eventually(is_there, DEADLINE_S)
    return events


class TestCluster:
    def test_the_lighthouse_reports_its_address(self, cluster: Cluster) -> None:
        host, port = cluster.start_lighthouse().rsplit(":", 1)
        assert host == "127.0.0.1"
        assert int(port) > 0

    def test_a_lighthouse_that_does_not_start_is_an_error(self, tmp_path: Path) -> None:
        with (
            Cluster(tmp_path, clockwork(), ["--no-such-flag"]) as cluster,
            pytest.raises(ClusterError, match=r"did not start: .*no-such-flag"),
        ):
            cluster.start_lighthouse()

    def test_a_killed_trainer_is_seen_and_its_next_life_has_the_next_number(
        self, cluster: Cluster
    ) -> None:
        cluster.start_group(0)
        read_until(cluster, lambda event: isinstance(event, Committed))
        cluster.kill(0, whole_group=False)
        events = read_until(cluster, lambda event: isinstance(event, Exited))
        (exited,) = [event for event in events if isinstance(event, Exited)]
        assert (exited.status, exited.expected) == (-signal.SIGKILL, True)
        cluster.start_group(0)
        events = read_until(cluster, lambda event: isinstance(event, Committed))
        assert {event.incarnation for event in events} == {1}

    @pytest.mark.parametrize("whole_group", [True, False])
    def test_children_die_with_their_trainer_only_if_the_whole_group_is_killed(
        self, tmp_path: Path, request: pytest.FixtureRequest, *, whole_group: bool
    ) -> None:
        if not whole_group:
            request.getfixturevalue("short_grace")
        with Cluster(tmp_path, clockwork("child")) as cluster:
            cluster.start_group(0)
            read_until(cluster, lambda event: isinstance(event, Committed))
            cluster.kill(0, whole_group=whole_group)
            read_until(cluster, lambda event: isinstance(event, Exited))
            left = [line.split(": ")[1].split()[1] for line in cluster.end_leftovers()]
            assert left == ([] if whole_group else ["-c"])
            assert cluster.end_leftovers() == []

    def test_a_trainer_that_dies_by_itself_was_not_expected_to(self, tmp_path: Path) -> None:
        with Cluster(tmp_path, clockwork("dies")) as cluster:
            cluster.start_group(0)
            events = read_until(cluster, lambda event: isinstance(event, Exited))
        (exited,) = [event for event in events if isinstance(event, Exited)]
        assert (exited.status, exited.expected) == (3, False)

    def test_stop_forces_those_that_do_not_listen(self, tmp_path: Path) -> None:
        with Cluster(tmp_path, clockwork("deaf")) as cluster:
            cluster.start_group(0)
            events = read_until(cluster, lambda event: isinstance(event, Committed))
            (pid,) = [event.pid for event in events if isinstance(event, Started)]
            assert cluster.stop(grace_s=0.2) == ["group 0"]
            assert not is_alive(pid)

    def test_processes_die_with_a_demo_that_is_killed(self, tmp_path: Path) -> None:
        code = (
            "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
            "from test_cluster import clockwork; from tools.demo.cluster import Cluster;"
            "cluster = Cluster(Path(sys.argv[2]), clockwork('deaf')); cluster.start_group(0);"
            "print(cluster.read_events()[0].pid, flush=True); time.sleep(60)"
        )
        demo = subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)],
            stdout=subprocess.PIPE,
        )
        assert demo.stdout is not None
        pid = int(demo.stdout.readline())
        assert is_alive(pid)
        demo.kill()
        demo.wait()
        demo.stdout.close()
        eventually(lambda: not is_alive(pid), DEADLINE_S)


def script(**changes: object) -> Script:
    usual: dict[str, object] = {
        "num_groups": 2, "seconds": 1.5, "steps": None, "num_kills": 1, "min_kills": 1,
        "kill_interval_s": 0.5, "seed": 3, "max_stall_s": 15.0,
    }  # fmt: skip
    return Script(**(usual | changes))  # type: ignore[arg-type]


@pytest.fixture
def short_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """These trainers' losses fall faster than the demo's."""
    monkeypatch.setattr(director, "_CALM_END_S", 30 * STEP_S)


def direct(folder: Path, fault: str = "well", **changes: object) -> tuple[Run, str]:
    """Run a short demo; the result, and what was on the screen."""
    output = StringIO()
    with Cluster(folder, clockwork(fault)) as cluster:
        run = Director(script(**changes), cluster, PlainScreen(Console(file=output))).run()
        assert cluster.end_leftovers() == []
    return run, output.getvalue()


def fresh(folder: Path) -> Path:
    """A new folder, for a test that may be done again."""
    return Path(tempfile.mkdtemp(dir=folder))


def num_commits(events: Path) -> int:
    return events.read_text().count('"Committed"')


def missed(run: Run) -> list[str]:
    return [v.promise for v in judge(run) if v.outcome is Outcome.FAIL]


@pytest.mark.usefixtures("short_ends")
class TestDirector:
    def test_a_good_run_keeps_every_promise_and_shows_it(self, tmp_path: Path) -> None:
        run, output = direct(tmp_path, num_kills=2, min_kills=2)
        assert missed(run) == []
        assert output.count("SIGKILL") >= 2  # one may be killed once more while it heals
        assert output.count("trains with the others") >= 4
        assert "step " in output

    def test_kills_that_do_not_fit_into_the_time_are_left_out(self, tmp_path: Path) -> None:
        run, output = direct(tmp_path, num_kills=50, min_kills=1)
        assert missed(run) == []
        assert 1 <= output.count("SIGKILL") <= 2

    def test_it_ends_at_the_number_of_steps(self, tmp_path: Path) -> None:
        steps = int(time.monotonic() / STEP_S) + 60
        run, _ = direct(fresh(tmp_path), seconds=None, steps=steps, num_kills=0, min_kills=0)
        assert missed(run) == []
        after = [commit.at for commit in run.commits() if commit.step >= steps]
        check("a run ends at its number of steps", max(after) - min(after), 1.5)

    def test_groups_that_differ_are_found(self, tmp_path: Path) -> None:
        run, _ = direct(tmp_path, "differs", num_kills=0, min_kills=0)
        assert missed(run) == ["groups that committed the same step are identical, bit for bit"]

    @pytest.mark.usefixtures("short_grace")
    def test_a_process_left_over_is_found_and_ended(self, tmp_path: Path) -> None:
        run, _ = direct(tmp_path, "child", num_kills=0, min_kills=0)
        assert missed(run) == ["no process was left over"]
        assert len(run.leftovers) == 2

    def test_a_trainer_that_does_not_leave_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(director, "_LEAVE_GRACE_S", SHORT_GRACE_S)
        run, _ = direct(tmp_path, "deaf", num_kills=0, min_kills=0)
        assert missed(run) == ["no process was left over"]
        assert run.leftovers == [
            "group 0 did not end when asked to",
            "group 1 did not end when asked to",
        ]

    def test_a_trainer_that_dies_ends_the_run(self, tmp_path: Path) -> None:
        run, _ = direct(tmp_path, "dies", num_kills=0, min_kills=0, seconds=60.0)
        assert "ended by itself with status 3" in run.failure
        assert "no trainer died by itself" in missed(run)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_all_within_two_seconds_and_the_run_is_kept(
        self, tmp_path: Path, number: signal.Signals
    ) -> None:
        folder, sent_at = fresh(tmp_path), list[float]()

        def interrupt() -> None:
            eventually(lambda: sum(map(num_commits, folder.glob("*.jsonl"))) > 10, DEADLINE_S)
            sent_at.append(time.monotonic())
            os.kill(os.getpid(), number)

        watcher = threading.Thread(target=interrupt)
        watcher.start()
        run, _ = direct(
            folder, "deaf", seconds=60.0, num_kills=5, min_kills=5, kill_interval_s=30.0
        )
        watcher.join()
        check("a signal ends all", time.monotonic() - sent_at[0], 2.0)
        assert run.interrupted
        assert len(run.commits()) > 10
        assert missed(run) == []
