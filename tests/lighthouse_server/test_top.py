"""Tests `lighthouse top` in a real terminal, against a real lighthouse whose groups come and go."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.papers import TOKEN
from support.running import (
    Line,
    Process,
    lighthouse_process,
    line_to,
    run_fresh,
    start_manager,
    steady_address,
)
from support.terminals import Terminal, terminal

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.incidents import Goodput, Incident, IncidentKind
from torchft_svc.core.quorum.lighthouse.overview import GoneGroup, GroupStatus, JobStatus
from torchft_svc.core.quorum.lighthouse.prepared_spares import PreparedSpare
from torchft_svc.lighthouse_server.cli import main
from torchft_svc.lighthouse_server.top.feed import Answer, RecentIncidents, StatusFeed, View
from torchft_svc.lighthouse_server.top.screen import Selection, draw_screen
from torchft_svc.lighthouse_server.top.terminal import Quit, handle_keys

PACKAGE = "torchft_svc.lighthouse_server.top"
TOP = [sys.executable, "-m", "torchft_svc.lighthouse_server", "top"]


def drawn(view: View, selection: Selection | None = None, width: int = 80, height: int = 24) -> str:
    """A frame as a terminal of this size shows it."""
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(draw_screen(view, selection or Selection(), "here:1", width, height))
    return capture.get()


def view_of(*jobs: JobStatus, **parts: object) -> View:
    return View(answer=Answer(jobs=jobs, **parts), answered_at=time.monotonic())  # type: ignore[arg-type]


def fleet(num: int, **changes: GroupStatus) -> JobStatus:
    """A job of ``num`` groups that train, but for those that are given by their names."""
    groups = {
        f"g{index:04}": GroupStatus(
            replica_id=f"g{index:04}:{index:08}-1111-2222-3333-444444444444",
            address=f"10.0.0.1:{index}",
            in_quorum=True,
            step=7,
            phase=Phase.TRAINING,
        )
        for index in range(num)
    }
    return JobStatus(
        job="j", groups=tuple((groups | changes).values()), quorum_id=5, num_expected=num
    )


def test_a_job_shows_who_stands_by() -> None:
    spare = PreparedSpare("s:1", asks=True, silent_s=0.5)
    shown = drawn(view_of(replace(fleet(3), prepared_spares=(spare,), num_places=3)))
    assert "1 spare stands by for 3 places, 1 ready: s:1 (last sign 0.5 s ago)" in shown
    assert "spare" not in drawn(view_of(fleet(3)))


def test_of_a_thousand_groups_those_that_need_somebody_come_first() -> None:
    job = fleet(
        1000,
        g0500=GroupStatus(replica_id="g0500:1", in_quorum=True, hung=True, phase=Phase.VOTING),
        g0600=GroupStatus(replica_id="g0600:1", phase=Phase.IDLE),
        g0700=GroupStatus(
            replica_id="g0700:1",
            in_quorum=True,
            phase=Phase.HEALING,
            phase_s=3.0,
            received_bytes=500,
            state_bytes=2000,
        ),
        g0800=GroupStatus(replica_id="g0800:1", in_quorum=True, silent_s=3.0),
        g0900=GroupStatus(replica_id="g0900:1", in_quorum=True, left_out=True),
    )
    began_at = time.monotonic()
    frame = drawn(view_of(job))
    assert time.monotonic() - began_at < 1.0
    lines = frame.splitlines()
    assert len(lines) == 24
    assert all(len(each) <= 80 for each in lines)
    first = [each.split(":")[0] for each in lines[3:8]]
    assert first == ["g0500", "g0900", "g0600", "g0700", "g0800"]
    assert "HUNG" in lines[3]
    assert "heals" in lines[6]
    assert "healing 25%" in lines[6]
    assert "999 of 1000 groups in quorum 5" in lines[1]
    assert "and 981 more, 981 of them as usual" in frame


def test_how_far_back_the_copies_are_is_shown() -> None:
    job = replace(fleet(2), committed_step=8, num_holders=2, copy_step=5, copy_age_s=3.0)
    assert "2 processes hold copies of the state of step 5, 3 steps back" in drawn(view_of(job))
    assert "copies" not in drawn(view_of(fleet(2)))


def test_every_group_can_be_scrolled_to() -> None:
    job, selection, seen = fleet(100), Selection(), set()
    for _ in range(12):
        frame = drawn(view_of(job), selection)
        seen |= {word.split(":")[0] for word in frame.split() if word.startswith("g0")}
        selection.scroll_groups(15)
    assert len(seen) == 100
    assert "g0099" in frame
    selection.scroll_groups(-1000)
    assert "g0000" in drawn(view_of(job), selection)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (20, 5), (200, 60), (1, 1)])
def test_it_fits_into_every_window(width: int, height: int) -> None:
    jobs = [fleet(30)] + [JobStatus(job=f"job-{number}") for number in range(9)]
    gone = GoneGroup(replica_id="b:1", reason="its session ended\x1b[31m", gone_s=12.0)
    jobs[0] = JobStatus(
        job="a", groups=jobs[0].groups, gone=(gone,), waiting_for="waiting for b", stalled_s=99.0
    )
    frame = drawn(view_of(*jobs), width=width, height=height)
    assert all(len(each) <= width for each in frame.splitlines())
    assert "\x1b" not in frame
    if (width, height) == (80, 24):
        assert len(frame.splitlines()) == 24
        assert "no quorum now: waiting for b" in frame
        assert "its step last rose 99 s ago" in frame
        assert "lost 12 s ago: b:1: its session ended\\x1b[31m" in frame
        assert "and 5 more jobs" in frame


def test_incidents_and_goodput_are_shown() -> None:
    incident = Incident(
        number=1,
        job="j",
        kind=IncidentKind.LOST,
        cause="its session ended",
        groups=("b:1",),
        at=1e9,
        is_open=True,
        paused_s=0.25,
        first_commit_after_s=0.5,
        steps_discarded=1,
    )
    goodput = Goodput(wall_s=100.0, committed_s=90.0, lost_s={"healing": 10.0}, ratio=0.9)
    view = view_of(replace(fleet(2), goodput=goodput), incidents={"j": (incident,)})
    frame = drawn(view, width=120)
    assert "goodput 90.0 % of 100 s; lost: 10 s healing" in frame
    assert "*lost b: its session ended, paused 0.25 s, commit after 0.50 s, 1 discarded" in frame


def test_the_chosen_job_stays_when_another_one_begins_to_wait() -> None:
    calm = [JobStatus(job=name) for name in "abc"]
    waiting = [*calm[:2], replace(calm[2], waiting_for="more groups")]  # it comes first
    selection = Selection()
    for jobs, name in ((calm, "a"), (waiting, "c"), (calm, "a")):
        drawn(view_of(*jobs), selection)
        assert selection.job_name == name, "nothing is chosen: the first one"
    selection.choose_next_job()
    for jobs in (calm, waiting, calm):
        drawn(view_of(*jobs), selection)
        assert selection.job_name == "b"
    selection.choose_next_job()
    drawn(view_of(*waiting), selection)
    assert selection.job_name == "c", "from the last one to the first one"
    drawn(view_of(*calm[:2]), selection)
    assert selection.job_name == "a", "the chosen one is gone"


def test_keys() -> None:
    selection = Selection()
    handle_keys(b"jjj\x1b[B\x1bOB\x1b[Ak\x1b[6~\x1b[5~\x1b[H", selection)
    assert selection.first_group == 3
    handle_keys(b"\tx\xff", selection)
    assert (selection.job, selection.first_group) == (1, 0)
    for key in (b"q", b"Q", b"jq", b"\x03"):
        with pytest.raises(Quit):
            handle_keys(key, selection)


def test_steps_are_counted_over_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, step = [100.0], [0]
    answers = lambda _: Answer(jobs=(JobStatus(job="j", committed_step=step[0]),))  # noqa: E731
    feed = StatusFeed(answers, 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(30):
        feed.ask_once()
        now[0] += 1.0
        step[0] += 4
    assert feed.view.steps_per_s == {"j": pytest.approx(4.0)}
    step[0] = 0  # it went back
    feed.ask_once()
    assert feed.view.steps_per_s == {}


def test_only_the_last_records_are_asked_for_again() -> None:
    asked: list[int] = []

    def ask(_: str, after: int) -> list[Incident]:
        asked.append(after)
        records = [
            Incident(number=number, job="j", kind=IncidentKind.LEFT, cause="", groups=(), at=0.0)
            for number in range(1, 31)
        ]
        return [each for each in records if each.number > after]

    recent = RecentIncidents(ask)
    for _ in range(2):
        assert [each.number for each in recent.list_last("j")] == list(range(21, 31))
    assert asked == [0, 20]


@pytest.mark.processes
def test_groups_come_and_go_and_the_window_changes(lighthouse: Process, line: Line) -> None:
    where = f"--lighthouse={lighthouse.address}"
    # As a shell may export it, which does not follow the window.
    with terminal([*TOP, where, "--every=0.2"], COLUMNS="80", LINES="24") as shown:
        shown.wait_for(f"lighthouse {lighthouse.address}", "updated 0 s ago", "q quit")
        line.quorum("a:1", step=7, job="live").result()
        shown.wait_for("job live: step 7", "a:1", "in quorum", "1 of 1 groups")
        with start_manager(lighthouse.address, replica_id="b", job_id="live"):
            shown.wait_for("b:", "1 of 2 groups")
        shown.wait_for("1 of 1 groups")
        shown.wait_for("joined a: ", "goodput ")
        shown.resize(120, 40)
        shown.wait_for("MANAGER")
        for _ in range(50):
            shown.read(0.2)
            rows = shown.text.splitlines()
            if len(rows) == 40 and rows[39].startswith("q quit"):
                break
        else:
            raise AssertionError(shown.text)
        shown.resize(60, 10)
        shown.read(1.0)
        assert shown.text.splitlines()[9].startswith("q quit"), shown.text
        shown.press(b"q")
        assert shown.wait_for_end() == 0
        assert shown.is_restored()
    line.leave("a:1", job="live")


def _end_by_ctrl_c(shown: Terminal) -> int:
    shown.press(b"\x03")
    return 0


def _end_by_signal(shown: Terminal) -> int:
    shown.process.send_signal(signal.SIGTERM)
    return 128 + signal.SIGTERM


@pytest.mark.processes
@pytest.mark.parametrize("end", [_end_by_ctrl_c, _end_by_signal])
def test_every_end_restores_the_terminal(lighthouse: Process, end: object) -> None:
    with terminal([*TOP, f"--lighthouse={lighthouse.address}"]) as shown:
        shown.wait_for("updated")
        expected = end(shown)  # type: ignore[operator]
        assert shown.wait_for_end() == expected
        assert shown.is_restored()
        assert b"Traceback" not in shown.written


@pytest.mark.processes
def test_a_lighthouse_that_is_gone_is_looked_for_again() -> None:
    address = steady_address()
    with terminal([*TOP, f"--lighthouse={address}", "--every=0.2"]) as shown:
        shown.wait_for("NO ANSWER for", "Connection", "refused", "asking again")
        with lighthouse_process(bind=address) as first, line_to(address) as line:
            line.quorum("a:1", step=3, job="kept").result()
            shown.wait_for("job kept: step 3", "updated 0 s ago")
            first.kill()
            text = shown.wait_for("NO ANSWER for 1 s")
            assert "job kept: step 3" in text, "the last answer stays"
        with lighthouse_process(bind=address):
            shown.wait_for("updated 0 s ago", "no job has a living group")
        shown.press(b"q")
        assert shown.wait_for_end() == 0


@pytest.mark.processes
def test_one_frame_for_a_pipe(lighthouse: Process, line: Line) -> None:
    line.quorum("p:1", step=9, job="piped").result()
    where = f"--lighthouse={lighthouse.address}"
    done = run_fresh([*TOP, "--once", where, "--job-id=piped"], 60)
    assert done.returncode == 0, done.stderr
    assert "job piped: step 9" in done.stdout
    assert "p:1" in done.stdout
    assert "\x1b" not in done.stdout
    assert "q quit" not in done.stdout
    missing = run_fresh([*TOP, "--once", where, "--job-id=nobody"], 60)
    assert missing.returncode == 4
    assert run_fresh([*TOP, "--once", "--lighthouse=127.0.0.1:1"], 60).returncode == 1
    line.leave("p:1", job="piped")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "top needs a terminal that can be redrawn: use --once"),
        (["--once", "--every=0"], "0.0 is not in the range 0.1<=x<=3600"),
        (["--once", "--every=often"], "'often' is not a valid float"),
        (["--once", "--job-id="], "is empty: give it a value"),
        (["--once", "--lighthouse=here"], "address 'here': has no port"),
        (["--once", "more"], "unexpected extra argument"),
    ],
)
def test_bad_options_are_usage_errors(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(main, ["top", "--lighthouse=127.0.0.1:1", *words])
    assert done.exit_code == 2, done.output
    assert sentence in done.output


def test_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)  # as where it is not installed
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    done = CliRunner().invoke(main, ["top", "--lighthouse=127.0.0.1:1", "--once"])
    assert done.exit_code == 1
    assert "lighthouse top needs rich: pip install 'torchft-svc[top]'" in done.output


@pytest.mark.processes
def test_a_terminal_that_cannot_be_redrawn() -> None:
    with terminal(TOP, TERM="dumb") as shown:
        shown.wait_for("top needs a terminal that can be redrawn")
        assert shown.wait_for_end() == 2


@pytest.mark.processes
def test_a_lighthouse_with_a_token() -> None:
    with lighthouse_process(TORCHFT_TOKEN=TOKEN) as secured:
        where = f"--lighthouse={secured.address}"
        right = run_fresh([*TOP, "--once", where], 60, TORCHFT_TOKEN=TOKEN)
        assert right.returncode == 0, right.stderr
        wrong = run_fresh([*TOP, "--once", where], 60)
        assert wrong.returncode == 1
        assert "requires a token" in wrong.stderr
        with terminal([*TOP, where]) as shown:
            shown.wait_for("NO ANSWER for", "requires a token", "TORCHFT_TOKEN_FILE")
