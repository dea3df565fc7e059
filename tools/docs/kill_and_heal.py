"""The picture of a killed and healed group: ``python -m tools.docs.kill_and_heal``.

Runs the demo's three groups, kills one of them once, and draws every step that was committed: the
whole run, and half a second around the kill.
"""

from __future__ import annotations

import math
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import click
import torch
from rich.console import Console

from tools.demo.__main__ import TrainerFlags
from tools.demo.cluster import Cluster
from tools.demo.director import Director, Script
from tools.demo.events import Committed, Discarded, Event, Joined, Started
from tools.demo.incidents import Incident, incidents_of
from tools.demo.promises import Run
from tools.demo.screen import make_screen
from tools.docs.svg import BLUE, GREEN, ORANGE, PALE, QUIET, RED, YELLOW, Picture, number

IMAGE = Path("docs/images/kill-and-heal.svg")
_GROUPS = 3
_COLORS = (BLUE, ORANGE, GREEN)
_LEFT, _WIDTH, _LANE = 90.0, 780.0, 30.0
# What is shown of the run, before the kill and after the killed group contributes again; the run
# ends two seconds later.
_BEFORE_S, _AFTER_S = 3.0, 1.6
_ZOOM_BEFORE_S, _ZOOM_AFTER_S = 0.15, 0.3
_MOST_LABELS = 16


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the time, drawn from ``top`` on, a lane for each group."""

    begin: float
    end: float
    top: float

    def x(self, at: float) -> float:
        share = (at - self.begin) / (self.end - self.begin)
        return _LEFT + _WIDTH * min(1.0, max(0.0, share))

    def y(self, group: int) -> float:
        return self.top + group * (_LANE + 8)

    def shows(self, at: float) -> bool:
        return self.begin <= at <= self.end


def record_run(folder: Path) -> Run:
    """Train with three groups, one of which is killed once."""
    script = Script(
        num_groups=_GROUPS,
        seconds=30.0,
        steps=None,
        num_kills=1,
        min_kills=1,
        kill_interval_s=8.0,
        seed=3,
        max_stall_s=5.0,
    )
    flags = TrainerFlags(seed=0, model_size="tiny", global_batch_size=8 * _GROUPS)
    with Cluster(folder, flags.command) as cluster:
        return Director(script, cluster, make_screen(Console(stderr=True))).run()


def draw_run(events: Sequence[Event]) -> Picture:
    """Draw the first kill of ``events``; time zero is the kill.

    Raises:
        ValueError: nobody was killed, or the killed group did not contribute again.
    """
    incident = next(iter(incidents_of(events)), None)
    if incident is None or incident.without_s is None or incident.heal_s is None:
        raise ValueError("the run has no kill that was healed: run it again")
    kill_at = incident.kill.at
    back_at = kill_at + (incident.restart_s or 0.0) + incident.heal_s
    picture = Picture(900, 412, "A replica group is killed and heals, the others train on")
    picture.text(
        24, 32, "A group is killed. The others go on with the next step.", size=17, bold=True
    )
    picture.path("M30 44v14", stroke=BLUE, width=1.6)
    picture.text(38, 55, "a committed step", color=QUIET)
    _draw_cross(picture, 170, 51, 4.5)
    picture.text(180, 55, "a discarded one, which is repeated", color=QUIET)
    picture.text(876, 55, "drawn from a real run", color=QUIET, anchor="end")
    whole = Window(kill_at - _BEFORE_S, back_at + _AFTER_S, 92)
    _draw_lanes(picture, whole, events)
    _draw_absence(picture, whole, events, incident, back_at)
    _draw_axis(picture, whole, kill_at, "s")
    zoom_s = max(_ZOOM_AFTER_S, 1.3 * incident.without_s)
    zoom = Window(kill_at - _ZOOM_BEFORE_S, kill_at + zoom_s, 264)
    _draw_zoom_lines(picture, whole, zoom)
    _draw_lanes(picture, zoom, events)
    _draw_pause(picture, zoom, incident)
    _draw_axis(picture, zoom, kill_at, "ms")
    return picture


def _draw_lanes(picture: Picture, window: Window, events: Sequence[Event]) -> None:
    for group in range(_GROUPS):
        y = window.y(group)
        picture.box(_LEFT, y, _WIDTH, _LANE, fill=PALE, radius=3)
        picture.text(24, y + 20, f"group {'abc'[group]}", bold=True, color=_COLORS[group])
        commits = [e for e in events if isinstance(e, Committed) and e.group == group]
        ticks = [
            f"M{number(window.x(commit.at))} {number(y + 4)}v{number(_LANE - 8)}"
            for commit in commits
            if commit.participating and window.shows(commit.at)
        ]
        picture.path("".join(ticks) or "M0 0", stroke=_COLORS[group], width=1.4)
        for event in events:
            if isinstance(event, Discarded) and event.group == group and window.shows(event.at):
                _draw_cross(picture, window.x(event.at), y + _LANE / 2, 4.5)


def _draw_cross(picture: Picture, x: float, y: float, half: float) -> None:
    n = number
    path = f"M{n(x - half)} {n(y - half)}l{n(2 * half)} {n(2 * half)}"
    path += f"M{n(x + half)} {n(y - half)}l{n(-2 * half)} {n(2 * half)}"
    picture.path(path, stroke=RED, width=2.4)


def _draw_absence(
    picture: Picture, window: Window, events: Sequence[Event], incident: Incident, back_at: float
) -> None:
    kill, y = incident.kill, window.y(incident.kill.group)
    own = [event for event in events if event.group == kill.group and kill.at < event.at <= back_at]
    started = next(event.at for event in own if isinstance(event, Started))
    joined = next((event.at for event in own if isinstance(event, Joined)), back_at)
    spans = ((started, joined, YELLOW, "starts again, imports torch"), (joined, back_at, GREEN, ""))
    for begin, end, color, label in spans:
        width = max(2.0, window.x(end) - window.x(begin))
        picture.box(window.x(begin), y + 4, width, _LANE - 8, fill=color, opacity=0.35, radius=2)
        if label:
            picture.text(window.x(begin) + 10, y + 20, label, size=12)
    healed = f"healed and training with the others {back_at - joined:.2f} s after it joined"
    labels = ((kill.at, "SIGKILL", RED, "middle"), (back_at, healed, QUIET, "end"))
    for at, label, color, anchor in labels:
        picture.text(
            window.x(at), window.top - 8, label, size=12, color=color, anchor=anchor, bold=True
        )
        line = f"M{number(window.x(at))} {number(window.top - 4)}V{number(y + _LANE)}"
        picture.path(line, stroke=color, dash="2 3")
    _draw_cross(picture, window.x(kill.at), y + _LANE / 2, 7)


def _draw_pause(picture: Picture, window: Window, incident: Incident) -> None:
    kill = incident.kill
    assert incident.without_s is not None
    x, end = window.x(kill.at), window.x(kill.at + incident.without_s)
    _draw_cross(picture, x, window.y(kill.group) + _LANE / 2, 7)
    bottom = window.y(_GROUPS - 1) + _LANE
    for at in (x, end):
        picture.path(
            f"M{number(at)} {number(window.top - 6)}V{number(bottom)}", stroke=RED, dash="3 3"
        )
    picture.path(f"M{number(x)} {number(window.top - 6)}H{number(end)}", stroke=RED, width=2)
    name = "abc"[kill.group]
    label = f"{incident.without_s * 1000:.0f} ms later both others have committed without {name}"
    picture.text(x, window.top - 11, label, size=12, color=RED, bold=True)


def _draw_zoom_lines(picture: Picture, whole: Window, zoom: Window) -> None:
    bottom = whole.y(_GROUPS - 1) + _LANE
    for at, x in ((zoom.begin, _LEFT), (zoom.end, _LEFT + _WIDTH)):
        line = f"M{number(whole.x(at))} {number(bottom + 22)}L{number(x)} {number(zoom.top - 12)}"
        picture.path(line, stroke="#dde2e8")


def _draw_axis(picture: Picture, window: Window, zero: float, unit: str) -> None:
    """Label the time below the lanes, in seconds or milliseconds from ``zero`` on."""
    y = window.y(_GROUPS - 1) + _LANE
    scale = 1000 if unit == "ms" else 1
    span = (window.end - window.begin) * scale
    step = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200) if span / each <= _MOST_LABELS)
    first = math.ceil((window.begin - zero) * scale / step)
    for index in range(first, int((window.end - zero) * scale / step) + 1):
        x = window.x(zero + index * step / scale)
        picture.path(f"M{number(x)} {number(y + 2)}v4", stroke=QUIET)
        text = f"{index * step} {unit}"
        picture.text(x, y + 18, text, size=11, color=QUIET, anchor="middle")


@click.command()
@click.option("--to", type=click.Path(dir_okay=False, path_type=Path), default=IMAGE)
def main(to: Path) -> None:
    """Run three groups, kill one, and draw what happened."""
    with tempfile.TemporaryDirectory(prefix="torchft-picture-") as folder:
        run = record_run(Path(folder))
    try:
        picture = draw_run(run.events)
    except ValueError as error:
        sys.exit(str(error))
    about = f"recorded {date.today()}, torch {torch.__version__}, {platform.machine()}, CPU, gloo"
    picture.write(to, about)
    print(f"{to}: {about}")


if __name__ == "__main__":
    main()
