"""Stories of one lighthouse as text: lines with > are events, the others are what it did.

The comments and events of a transcript are written by hand. `pytest tests/core
--rewrite-transcripts` writes the lines in between; whoever changes a rule reviews that diff.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.core.recorded_jobs import AnswerQuorum
from support.core.scenes import Refused, Scene, config

from torchft_svc.core.quorum.lighthouse.jobs import ReportLoss, ReportStraggler
from torchft_svc.core.quorum.types import Member

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=[path.stem for path in TRANSCRIPTS])
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    story = path.read_text()
    replayed = replay(story)
    if request.config.getoption("rewrite_transcripts", default=False):
        path.write_text(replayed)
    else:
        assert replayed == story


def test_there_are_transcripts() -> None:
    assert {path.stem for path in TRANSCRIPTS} >= {
        "cold_start",
        "cold_start_together",
        "kill_and_return",
        "lighthouse_restart",
        "name_taken",
        "shrink",
        "step_regression",
        "straggler",
    }


def replay(story: str) -> str:
    """The story with the lighthouse's orders as they are now."""
    player = Player()
    lines: list[str] = []
    for line in story.splitlines():
        if line.startswith(">"):
            lines += [line, *player.play_event(line[1:].split())]
        elif line.startswith("#") or not line:
            lines.append(line)
    return "\n".join(lines) + "\n"


class Player:
    """Passes events to a lighthouse: every word after the group is a field, such as step=3."""

    def __init__(self) -> None:
        self.scene = Scene()

    def play_event(self, words: list[str]) -> list[str]:
        event, *rest = words
        names = [word for word in rest if "=" not in word]
        fields: dict[str, Any] = {
            key: value if key in TEXTS else float(value) if key in SECONDS else int(value)
            for key, _, value in (word.partition("=") for word in rest if "=" in word)
        }
        if event == "wait":
            return self.wait(float(names[0]))
        if event == "lighthouse":
            self.start(fields)
        elif event == "ask":
            for name in names:
                self.scene.ask(name, **fields)
        elif event == "beat":
            self.scene.beat(*names)
        elif event == "leave":
            self.scene.leave(names[0], " ".join(names[1:]))
        elif event == "give-up":
            self.scene.withdraw(int(names[0]))
        elif event == "accept-loss":
            self.scene.accept_loss()
        else:
            raise ValueError(f"unknown event {event!r}")
        return [*self.orders(), *self.reason()]

    def start(self, fields: dict[str, Any]) -> None:
        """A new lighthouse; the clock goes on, the callers of the old one are gone."""
        now, first_id = self.scene.now, fields.pop("first_id", 0)
        self.scene = Scene(config(**fields), first_id)
        self.scene.now = now

    def wait(self, seconds: float) -> list[str]:
        end = self.scene.now + seconds
        lines = []
        while (at := self.scene.jobs.next_deadline()) is not None and at <= end:
            self.scene.until(at)
            lines += self.orders()
        self.scene.until(end)
        return [*lines, f"  {self.clock()} now", *self.reason()]

    def orders(self) -> list[str]:
        return [
            f"  {self.clock()} {line}" for order in self.scene.pop_orders() for line in show(order)
        ]

    def reason(self) -> list[str]:
        why = self.scene.why()
        return [] if why == "no group asks for a quorum" else [f"  ({why})"]

    def clock(self) -> str:
        return f"{self.scene.now:7.2f} s"


TEXTS = {"address", "on_step_regression"}
SECONDS = {"join_timeout_s", "startup_timeout_s", "startup_wait_s", "heartbeat_timeout_s"}


def show(order: object) -> list[str]:
    """One order in a line, a quorum with a line for every member."""
    if isinstance(order, Refused):
        return [f"caller {order.caller} is refused, {order.error}: {order.reason}"]
    if isinstance(order, ReportLoss):
        return [f"lost {order.replica_id}: {order.reason}"]
    if isinstance(order, ReportStraggler):
        return [f"{order.replica_id} is left behind in quorum {order.quorum_id}: {order.reason}"]
    assert isinstance(order, AnswerQuorum)
    lost = f", LOSES step {order.lost_from}" if order.lost_from is not None else ""
    members = zip(order.callers, order.quorum.participants, strict=True)
    head = f"quorum {order.quorum.quorum_id} at step {order.quorum.max_step}{lost}"
    return [head, *(f"  to caller {caller}: {show_member(each)}" for caller, each in members)]


def show_member(member: Member) -> str:
    """A member, with what differs from an ordinary one alone."""
    notes = [f"{member.replica_id} at step {member.step}"]
    if member.commit_failures:
        notes.append(f"{member.commit_failures} failed commits")
    if member.shrink_only:
        notes.append("shrink_only")
    return ", ".join(notes)
