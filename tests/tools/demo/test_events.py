"""Tests the demo's events: what is written is read back, and a torn last line spoils nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.demo.events import (
    Committed,
    Discarded,
    Event,
    EventLog,
    EventTail,
    Exited,
    Finished,
    Healed,
    Joined,
    Killed,
    PhaseBegan,
    Started,
    decode,
    encode,
)

EVERY_KIND: list[Event] = [
    Started(group=1, incarnation=2, at=3.5, pid=4),
    Joined(group=1, incarnation=2, at=3.5),
    PhaseBegan(group=1, incarnation=2, at=3.5, step=7, phase="commit"),
    Committed(
        group=1, incarnation=2, at=3.5, step=8, loss=2.5, digest="ab", num_participants=3,
        participating=True, quorum_id=9, members="a:1 b:2",
    ),
    Discarded(group=1, incarnation=2, at=3.5, worker=1, step=8, digest="ab", reason="why"),
    Healed(group=1, incarnation=2, at=3.5),
    Finished(group=1, incarnation=2, at=3.5, step=8),
    Killed(group=1, incarnation=2, at=3.5, whole_group=True),
    Exited(group=1, incarnation=2, at=3.5, status=-9, expected=True),
]  # fmt: skip


@pytest.mark.parametrize("event", EVERY_KIND, ids=lambda event: type(event).__name__)
def test_every_kind_comes_back_equal(event: Event) -> None:
    assert decode(encode(event)) == event


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "{}", '{"event": "Unknown"}', '{"event": "Joined", "group": 1}']
)
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a line of an event log"):
        decode(line)


def test_a_tail_gives_each_event_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read_new() == []  # there is no file yet
    line = encode(EVERY_KIND[0])
    path.write_text(line + line[:10])
    assert tail.read_new() == [EVERY_KIND[0]]
    assert tail.read_new() == []
    with path.open("a") as file:
        file.write(line[10:])
    assert tail.read_new() == [EVERY_KIND[0]]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, group=1, incarnation=0)
    log.write(Finished, step=5)
    (event,) = EventTail(path).read_new()  # the log is still open, as when its process is killed
    log.close()
    assert isinstance(event, Finished)
    assert (event.group, event.step) == (1, 5)
