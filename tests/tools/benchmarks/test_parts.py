"""The benchmarks' own arithmetic and processes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from tools.benchmarks.courses import Course
from tools.benchmarks.processes import Child, ChildError
from tools.benchmarks.quorum_rounds import add_ratios, shares
from tools.benchmarks.table import Column, Result, show
from tools.benchmarks.under_failures import Commit, Run, row_of


def test_shares_give_each_caller_to_one_process() -> None:
    assert shares(10, 3) == [(0, 3), (3, 3), (6, 4)]
    assert shares(1, 2) == [(0, 1)]


def test_ratios_are_those_to_the_public_release_and_to_the_package_before() -> None:
    def row(lighthouse: str, over: str, wall_ms: float, cpu_ms: float = 0.0) -> dict[str, object]:
        return {
            "lighthouse": lighthouse,
            "over": over,
            "wall_ms": wall_ms,
            "server_cpu_ms": cpu_ms,
        }

    rows = [
        row("ours", "sessions", 2.0, 3.0),
        row("ours, before", "sessions", 1.0, 2.0),
        row("ours", "unary", 8.0),
        row("public", "unary", 4.0),
    ]
    add_ratios(rows)
    assert [row["wall_ratio"] for row in rows] == [0.5, 0.25, 2.0, 1.0]
    assert [row["cpu_ratio"] for row in rows] == [None] * 4  # nothing to be related to
    assert (rows[0]["before_wall_ratio"], rows[0]["before_cpu_ratio"]) == (2.0, 1.5)
    assert not any("before_wall_ratio" in row for row in rows[1:])


class Jobs(Course[int]):
    """Jobs, of which those that start after ``may_start`` fail; every second kill ends a job."""

    name = "a job"

    def __init__(self, num_kills: int, may_start: int) -> None:
        super().__init__(num_kills)
        self.num_started, self.may_start = 0, may_start

    @contextlib.contextmanager
    def start(self) -> Iterator[int]:
        self.num_started += 1
        if self.num_started > self.may_start:
            raise ChildError("it does not start")
        yield self.num_started

    def wait(self, job: int) -> None:
        assert job == self.num_started

    def hit(self, job: int) -> str:
        if self.num_hits % 2 == 0:
            raise ChildError(f"job {job} has ended")
        return f"job {job} goes on"


def test_a_job_that_a_kill_has_ended_is_started_again() -> None:
    jobs = Jobs(5, may_start=10)
    jobs.run()
    assert (jobs.num_hits, jobs.num_ended, jobs.num_started) == (5, 2, 3)


def test_a_job_that_does_not_start_is_given_up() -> None:
    jobs = Jobs(5, may_start=1)
    jobs.run()
    assert (jobs.num_hits, jobs.num_started) == (2, 4)


@pytest.mark.processes
def test_a_child_is_read_line_by_line_and_its_failure_has_its_last_words() -> None:
    code = "import sys; print(input()); print('next'); sys.exit('went wrong')"
    with Child([sys.executable, "-c", code]) as child:
        child.send("hello")
        assert [child.read_line(20.0), child.read_line(20.0)] == ["hello", "next"]
        with pytest.raises(ChildError, match=r"(?s)ended.*went wrong"):
            child.read_line(20.0)


@pytest.mark.processes
def test_a_silent_child_is_given_up_and_ended() -> None:
    with Child([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        with pytest.raises(ChildError, match="said nothing"):
            child.read_line(0.05)
        child.stop()
        child.stop()  # may be called twice


def test_the_plain_table_lines_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    columns = (Column("name", "name"), Column("time_ms", "time, ms", 2))
    rows = [{"name": "a", "time_ms": 1.239}, {"name": "long", "time_ms": None}]
    show(Result("x", "Title", columns, {}, rows=rows, notes=["a note"]))
    assert capsys.readouterr().out == (
        "Title\nname  time, ms\na         1.24\nlong         -\n  a note\n"
    )


def run_of(*commits: tuple[int, int, float], kills_s: tuple[float, ...] = ()) -> Run:
    """A run that began after a second, from (step, batches, seconds since the begin)."""
    second = 10**9
    run = Run("ours", 20.0, second, [int((1 + at) * second) for at in kills_s])
    for step, batches, at_s in commits:
        run.record(Commit(step, batches, int((1 + at_s) * second)))
    return run


def test_work_that_is_done_again_does_not_count_twice() -> None:
    again = run_of((4, 3, -0.5), (5, 3, 1.0), (6, 3, 2.0), (5, 2, 4.0), (6, 2, 5.0), (7, 2, 6.0))
    assert (again.num_steps, again.num_batches, again.wall_s) == (3, 8, 6.0)
    assert again.curve() == [(0.0, 0), (1.0, 3), (2.0, 6), (6.0, 8)]


def test_a_standstill_lasts_until_new_work_and_belongs_to_the_kill_before_it() -> None:
    steps = ((1, 3, 1.0), (2, 3, 2.0), (3, 2, 5.0), (4, 3, 6.0), (5, 3, 7.0), (6, 3, 8.5))
    assert run_of(*steps, kills_s=(2.5, 7.2)).standstills_s() == [3.0, 1.5]
    given_up = run_of(*steps, kills_s=(7.2,))
    given_up.gave_up_ns = int(21e9)
    assert given_up.standstills_s() == [11.5]
    assert given_up.wall_s == 20.0
    assert run_of(*steps).standstills_s() == []


def test_goodput_compares_the_rates_of_batches() -> None:
    calm = run_of(*((step, 3, step / 10) for step in range(1, 11)))
    killed = run_of(*((step, 2, step / 5) for step in range(1, 11)), kills_s=(0.5,))
    row = row_of([killed, killed], calm, 20)
    assert (row["runs"], row["kills"], row["wall_s"]) == (2, 2, 2.0)
    assert (row["goodput"], row["steps_ratio"]) == pytest.approx((1 / 3, 1 / 2))
