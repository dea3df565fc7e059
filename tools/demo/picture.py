"""Draws the run: the loss of every group, and when each lived, was killed and came back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.demo.events import Committed, Discarded, Event, Exited, Killed, Started

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#3568b8", "#d9772b", "#3f8f4f", "#8a4fa3", "#b03a48", "#5f6b7a")
_ABSENT, _STARTING = "#d0d0d0", "#f2c14e"
# Weight of the newest loss in the smoothed curve: about twenty commits are averaged.
_SMOOTHING = 0.05


def draw_picture(events: Sequence[Event], num_groups: int, path: Path) -> None:
    """Write a PNG to ``path``; time zero is the first event."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, (losses, lives) = pyplot.subplots(
        2, 1, figsize=(11, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    zero = events[0].at if events else 0.0
    for group in range(num_groups):
        _draw_loss(losses, [e for e in events if e.group == group], group, zero)
        _draw_life(lives, [e for e in events if e.group == group], group, zero)
    _draw_kills(losses, events, zero)
    losses.set_ylabel("loss (nats per character)")
    losses.set_title("Groups are killed and come back; training continues")
    losses.legend(loc="upper right")
    lives.set_yticks(range(num_groups), [f"group {group}" for group in range(num_groups)])
    lives.invert_yaxis()
    lives.set_xlabel("seconds (x killed, grey gone, yellow starts and heals, | update discarded)")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _color(group: int) -> str:
    return _COLORS[group % len(_COLORS)]


def _draw_loss(axes: Axes, events: Sequence[Event], group: int, zero: float) -> None:
    commits = [e for e in events if isinstance(e, Committed) and e.participating]
    times: list[float] = []
    losses: list[float] = []
    smooth: list[float] = []
    for before, commit in zip([None, *commits], commits, strict=False):
        if before is not None and before.life != commit.life:  # a gap, where the group was away
            for curve in (times, losses, smooth):
                curve.append(math.nan)
        last = smooth[-1] if before is not None and before.life == commit.life else commit.loss
        times.append(commit.at - zero)
        losses.append(commit.loss)
        smooth.append(last + _SMOOTHING * (commit.loss - last))
    axes.plot(times, losses, color=_color(group), alpha=0.18, linewidth=0.8)
    axes.plot(times, smooth, color=_color(group), linewidth=1.6, label=f"group {group}")


def _draw_kills(axes: Axes, events: Sequence[Event], zero: float) -> None:
    for event in events:
        if isinstance(event, Killed):
            axes.axvline(event.at - zero, color=_color(event.group), linestyle=":", linewidth=1.2)


def _draw_life(axes: Axes, events: Sequence[Event], group: int, zero: float) -> None:
    """One bar: a piece for each state, a cross for each kill, a tick for each discard."""
    if not events:
        return
    begin, color = events[0].at, _ABSENT
    for event in events:
        next_color = _color_after(event, color, group)
        if next_color != color:
            axes.barh(group, event.at - begin, left=begin - zero, height=0.6, color=color)
            begin, color = event.at, next_color
        if isinstance(event, Killed):
            axes.plot(event.at - zero, group, "kx", markersize=8, markeredgewidth=2)
        elif isinstance(event, Discarded):
            axes.plot(event.at - zero, group, "k|", markersize=12)
    axes.barh(group, events[-1].at - begin, left=begin - zero, height=0.6, color=color)


def _color_after(event: Event, color: str, group: int) -> str:
    match event:
        case Started():
            return _STARTING
        case Committed(participating=True):
            return _color(group)
        case Killed() | Exited():
            return _ABSENT
        case _:
            return color
