"""Tests the demo's report, picture and screen: what people and programs get to see."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.stories import commit, good_events, run_of

from tools.demo.board import Board
from tools.demo.events import Discarded, Event
from tools.demo.picture import draw_picture
from tools.demo.promises import Run, judge
from tools.demo.report import print_report, step_time_s, write_json
from tools.demo.screen import LiveScreen, PlainScreen, make_screen

PNG_BEGIN = b"\x89PNG\r\n\x1a\n"


def printed(run: Run) -> str:
    output = StringIO()
    print_report(Console(file=output, width=160), run, judge(run))
    return output.getvalue()


def test_the_tables_show_groups_kills_and_promises() -> None:
    text = printed(run_of(good_events()))
    assert "median step 100 ms" in text
    (kill,) = [line for line in text.splitlines() if "backward" in line]
    cells = [cell.strip() for cell in kill.strip("│ ").split("│")]
    assert cells == ["1", "2", "backward", "trainer", "0.10", "0.10", "2.47", "2.97"]
    assert text.count("PASS") == 9
    assert "FAIL" not in text


def test_a_missed_promise_is_in_the_table() -> None:
    text = printed(run_of([*good_events(), commit(1, 121, digest="x"), commit(0, 121)]))
    assert text.count("FAIL") == 1
    assert "step 121: groups 0 and 1 differ" in text


def test_a_run_without_any_event_can_be_reported(tmp_path: Path) -> None:
    run = run_of([], failure="the lighthouse did not start")
    assert "the lighthouse did not start" in printed(run)
    draw_picture([], 3, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(PNG_BEGIN)


def test_step_time_does_not_span_two_lives() -> None:
    events: list[Event] = [commit(0, 1, at=1.0), commit(0, 9, at=9.0, incarnation=1)]
    assert step_time_s(run_of(events, num_groups=1)) == 0.0


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    discard = Discarded(group=0, incarnation=0, at=5.05, step=50, digest="bits-50")
    draw_picture([*good_events(), discard], 3, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(PNG_BEGIN)
    assert (tmp_path / "run.png").stat().st_size > 20_000


def test_the_figures_are_there_for_programs(tmp_path: Path) -> None:
    run = run_of(good_events())
    write_json(run, judge(run), tmp_path / "run.json")
    figures = json.loads((tmp_path / "run.json").read_text())
    assert figures["num_steps"] == 120
    assert figures["step_time_s"] == pytest.approx(0.1)
    assert figures["incidents"][0]["phase"] == "backward"
    assert figures["incidents"][0]["heal_s"] == pytest.approx(2.972)
    outcomes = {verdict["promise"]: verdict["outcome"] for verdict in figures["verdicts"]}
    assert outcomes.pop("a discarded update changed nothing") == "not judged"
    assert set(outcomes.values()) == {"PASS"}


class TestScreen:
    def board(self) -> Board:
        board = Board(2)
        for step in range(1, 50):
            board.apply(commit(0, step))
        return board

    def test_a_terminal_gets_a_live_table_and_a_file_gets_lines(self) -> None:
        terminal = Console(file=StringIO(), force_terminal=True)
        assert isinstance(make_screen(terminal), LiveScreen)
        assert isinstance(make_screen(Console(file=StringIO())), PlainScreen)

    def test_lines_come_at_once_and_progress_every_few_seconds(self) -> None:
        output = StringIO()
        with PlainScreen(Console(file=output)) as screen:
            screen.show_event(0.5, "group 1 started")
            for tenth in range(100):
                screen.show(tenth / 10, self.board())
        lines = output.getvalue().splitlines()
        assert lines[0] == "   0.5 s  group 1 started"
        assert lines[1].startswith("   3.0 s  step 49: group 0 training loss ")
        assert len(lines) == 4

    def test_the_live_table_names_states_and_events(self) -> None:
        output = StringIO()
        console = Console(file=output, force_terminal=True, width=140)
        with LiveScreen(console) as screen:
            screen.show_event(0.5, "group 1 started")
            screen.show(1.0, self.board())
        assert "training" in output.getvalue()
        assert "group 1 started" in output.getvalue()
        assert "█" in output.getvalue()
