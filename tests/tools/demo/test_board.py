"""Tests the demo's board: the state of each group, event by event."""

from __future__ import annotations

from support.stories import commit, good_events

from tools.demo.board import Board
from tools.demo.events import (
    Discarded,
    Event,
    Exited,
    Finished,
    Joined,
    Killed,
    PhaseBegan,
    Started,
)


def test_the_states_of_a_life() -> None:
    board = Board(1)
    story: list[tuple[Event, str]] = [
        (Started(group=0, incarnation=0, at=1.0, pid=9), "starting"),
        (Joined(group=0, incarnation=0, at=2.0), "healing"),
        (commit(0, 7, participating=False), "healing"),
        (commit(0, 8), "training"),
        (Discarded(group=0, incarnation=0, at=3.0, step=8, digest=""), "training"),
        (Killed(group=0, incarnation=0, at=3.0, whole_group=True), "killed"),
        (Exited(group=0, incarnation=0, at=3.1, status=-9, expected=True), "killed"),
        (Started(group=0, incarnation=1, at=4.0, pid=10), "starting"),
        (Finished(group=0, incarnation=1, at=5.0, step=9), "gone"),
        (Exited(group=0, incarnation=1, at=5.1, status=0, expected=True), "gone"),
    ]
    for event, state in story:
        board.apply(event)
        assert (event, board.groups[0].state) == (event, state)
    status = board.groups[0]
    assert (status.num_commits, status.num_discards, status.num_kills) == (2, 1, 1)


def test_what_is_read_after_the_end_does_not_bring_a_group_back() -> None:
    """A trainer may commit between the look at the clock and its kill."""
    board = Board(1)
    board.apply(commit(0, 1))
    board.apply(Killed(group=0, incarnation=0, at=1.0, whole_group=False))
    assert board.apply(commit(0, 2, at=1.1)) is None
    board.apply(Exited(group=0, incarnation=0, at=1.2, status=-9, expected=True))
    assert (board.groups[0].state, board.groups[0].num_commits) == ("killed", 2)


def test_all_training_needs_every_group() -> None:
    board = Board(2)
    board.apply(commit(0, 1))
    assert not board.all_training
    board.apply(commit(1, 1))
    assert board.all_training


def test_sentences_are_for_what_is_rare() -> None:
    board = Board(1)
    assert board.apply(commit(0, 1)) == "trains with the others, step 1"
    assert board.apply(commit(0, 2)) is None
    assert board.apply(PhaseBegan(group=0, incarnation=0, at=1.0, step=2, phase="commit")) is None
    died = Exited(group=0, incarnation=0, at=2.0, status=1, expected=False)
    assert board.apply(died) == "died by itself, status 1"


def test_step_and_phase_times_are_medians() -> None:
    board = Board(1)
    for number, phase in enumerate(("forward", "backward", "forward", "backward")):
        board.apply(PhaseBegan(group=0, incarnation=0, at=number * 0.25, step=0, phase=phase))
    assert board.groups[0].phase_time_s("forward") == 0.25
    assert board.groups[0].phase_time_s("commit") == 0.0
    for at in (1.0, 1.5, 2.0, 9.0):
        board.apply(commit(0, int(at * 2), at=at))
    assert board.groups[0].step_time_s == 0.5


def test_the_good_run_ends_with_all_training() -> None:
    board = Board(3)
    for event in good_events():
        board.apply(event)
    assert board.all_training
    assert board.top_step == 120
    assert [status.num_kills for status in board.groups] == [0, 0, 1]
