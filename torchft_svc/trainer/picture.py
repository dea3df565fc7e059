"""Draws a run: its steps over time, each incident with what it cost, and how many workers ran."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from torchft_svc.errors import ConfigError
from torchft_svc.trainer.history import Incident, Rung, RunHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS: dict[Rung, str] = {"per-step": "#d9772b", "restart": "#b03a48", "growth": "#3f8f4f"}
_STEPS, _WORKERS = "#3568b8", "#5f6b7a"
# More labels than this would lie on each other.
_MAX_LABELS = 12
# The least width of an incident, as a part of the whole time: a shorter one could not be seen.
_MIN_WIDTH = 0.002


def check_drawable(path: str | os.PathLike[str]) -> None:
    """Raise a `ConfigError` if no picture can be drawn: matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        reason = "pictures need matplotlib: pip install 'torchft-svc[trainer]'"
        raise ConfigError("path", os.fspath(path), reason)


def draw_run(history: RunHistory, path: str | os.PathLike[str], title: str = "") -> None:
    """Write a picture to ``path``; its ending (png, svg, pdf) chooses the kind.

    Raises:
        ConfigError: matplotlib is missing, or does not know this kind of file.
    """
    check_drawable(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display is needed, and none that the program uses is changed
    steps, workers = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_incidents((steps, workers), history)
    _draw_steps(steps, history)
    _draw_workers(workers, history)
    steps.set_title(title or summary(history))
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise ConfigError("path", os.fspath(path), str(error)) from error


def summary(history: RunHistory) -> str:
    """One line: what each rung cost."""
    last = history.points[-1] if history.points else None
    begin = f"{last.step} steps in {last.at_s:.0f} s" if last else "no step"
    costs = [
        f"{rung}: {_count(cost.incidents, 'incident')}, {cost.seconds:.1f} s, "
        f"{_count(cost.lost_steps, 'step')} lost"
        for rung, cost in history.costs().items()
    ]
    return "; ".join([begin, *(costs or ["no incident"])])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _draw_steps(axes: Axes, history: RunHistory) -> None:
    times = [point.at_s for point in history.points]
    axes.plot(times, [point.step for point in history.points], color=_STEPS, linewidth=1.6)
    if history.checkpoints:
        axes.plot(
            [point.at_s for point in history.checkpoints],
            [point.step for point in history.checkpoints],
            linestyle="none",
            marker="v",
            color=_STEPS,
            markersize=6,
            label="checkpoint",
        )
    axes.set_ylabel("steps done")
    axes.margins(x=0.01)
    handles, labels = axes.get_legend_handles_labels()
    unique: dict[str, Any] = dict(zip(labels, handles, strict=True))
    if unique:
        axes.legend(unique.values(), unique.keys(), loc="upper left")


def _draw_workers(axes: Axes, history: RunHistory) -> None:
    from matplotlib.ticker import MaxNLocator

    times = [point.at_s for point in history.points]
    counts = [point.num_workers for point in history.points]
    axes.step(times, counts, where="post", color=_WORKERS, linewidth=1.6)
    axes.axhline(history.num_wanted, color=_WORKERS, linestyle=":", linewidth=1.0)
    axes.set_ylim(0, history.num_wanted + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("workers")
    axes.set_xlabel("seconds (dotted: workers asked for)")


def _draw_incidents(all_axes: tuple[Axes, Axes], history: RunHistory) -> None:
    incidents = history.incidents
    end = max((point.at_s for point in history.points), default=0.0)
    width = _MIN_WIDTH * max(end, 1.0)
    for incident in incidents:
        until = end if incident.until_s is None else incident.until_s
        for axes in all_axes:
            axes.axvspan(
                incident.at_s,
                max(until, incident.at_s + width),
                color=_COLORS[incident.rung],
                alpha=0.35,
                linewidth=0,
                label=incident.rung if axes is all_axes[0] else None,
            )
    if len(incidents) <= _MAX_LABELS:
        for incident in incidents:
            _draw_label(all_axes[0], incident)


def _draw_label(axes: Axes, incident: Incident) -> None:
    words = ["not over" if incident.cost_s is None else f"{incident.cost_s:.2f} s"]
    if incident.lost_steps:
        words.append(_count(incident.lost_steps, "step"))
    axes.annotate(
        ", ".join(words),
        xy=(incident.at_s, 0.02),
        xycoords=("data", "axes fraction"),
        rotation=90,
        fontsize=8,
        horizontalalignment="right",
        verticalalignment="bottom",
        color=_COLORS[incident.rung],
    )
