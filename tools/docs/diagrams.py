"""Draws the tables of states and transitions that the code decides by, as SVG and as Markdown.

Where a state stands in a picture is written here; which states there are, and what leads from one
to another, is taken from the code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from tools.docs.svg import BLUE, INK, LINE, PALE, QUIET, Picture, number
from torchft_svc.core.launch.restart import REACTIONS, RestartPolicy, RunEvent
from torchft_svc.core.link import TRANSITIONS as LINK_TRANSITIONS
from torchft_svc.core.link import LinkState
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.membership import STATES, GroupState, Tenure
from torchft_svc.core.quorum.worker.step import TRANSITIONS as STEP_TRANSITIONS
from torchft_svc.core.quorum.worker.step import StepEvent
from torchft_svc.trainer.retry.machine import RUN_TRANSITIONS, RunPhase

_BOX = (120.0, 38.0)
_LABEL = 12.0
_Edge = tuple[Enum, Enum]


@dataclass(slots=True)
class StateDiagram:
    """A picture of states and the transitions between them.

    ``places``: the centre of each state's box. ``labels``: what leads from one state to another.
    ``usual``: the transitions of an undisturbed course, drawn in blue. ``bends``: how far the curve
    of a transition leaves the straight line, to its right, in pixels. ``shares``: where on its way
    a label stands (default: 0.5). With ``is_numbered`` the labels are numbers, which a list
    explains.
    """

    title: str
    size: tuple[float, float]
    places: Mapping[Enum, tuple[float, float]]
    labels: Mapping[_Edge, list[str]]
    usual: Set[_Edge] = frozenset()
    bends: Mapping[_Edge, float] = field(default_factory=dict)
    shares: Mapping[_Edge, float] = field(default_factory=dict)
    is_numbered: bool = False
    list_at: tuple[float, float] = (0, 0)

    def draw(self) -> Picture:
        missing = {state for edge in self.labels for state in edge} - set(self.places)
        if missing:
            raise ValueError(f"{self.title}: these states have no place: {missing}")
        picture = Picture(*self.size, self.title)
        picture.text(20, 30, self.title, size=16, bold=True)
        for count, (edge, labels) in enumerate(self.labels.items(), 1):
            shown = [f"{count}"] if self.is_numbered else labels
            self._draw_edge(picture, edge, shown)
        for state, (x, y) in self.places.items():
            width, height = _BOX
            picture.box(
                x - width / 2, y - height / 2, width, height, fill=PALE, stroke=LINE, radius=8
            )
            name = state.name.lower().replace("_", " ")
            picture.text(x, y + 5, name, size=14, anchor="middle", bold=True)
        if self.is_numbered:
            self._draw_list(picture)
        return picture

    def _draw_edge(self, picture: Picture, edge: _Edge, labels: list[str]) -> None:
        color = BLUE if edge in self.usual else QUIET
        begin, end = self.places[edge[0]], self.places[edge[1]]
        if begin == end:
            self._draw_loop(picture, begin, labels)
            return
        bend = self.bends.get(edge, 0.0)
        middle = ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2)
        length = math.dist(begin, end)
        right = (-(end[1] - begin[1]) / length, (end[0] - begin[0]) / length)
        control = (middle[0] + 2 * bend * right[0], middle[1] + 2 * bend * right[1])
        first, last = _border(begin, control), _border(end, control)
        picture.path(
            f"M{_point(first)}Q{_point(control)} {_point(last)}", stroke=color, width=1.6,
            arrow=True,
        )  # fmt: skip
        at = _on_curve(first, control, last, self.shares.get(edge, 0.5))
        self._draw_labels(picture, at, labels, color)

    def _draw_loop(self, picture: Picture, at: tuple[float, float], labels: list[str]) -> None:
        x, y = at[0], at[1] - _BOX[1] / 2
        path = f"M{_point((x - 18, y))}C{_point((x - 34, y - 40))} {_point((x + 34, y - 40))} "
        picture.path(path + _point((x + 18, y)), stroke=QUIET, width=1.6, arrow=True)
        height = (_LABEL + 3) * len(labels)
        self._draw_labels(picture, (x, y - 32 - height / 2), labels, QUIET)

    def _draw_labels(
        self, picture: Picture, at: tuple[float, float], labels: list[str], color: str
    ) -> None:
        line = _LABEL + 3
        width = max(len(label) for label in labels) * 6.4 + 10
        top = at[1] - line * len(labels) / 2
        height = line * len(labels) + 2
        picture.box(at[0] - width / 2, top - 1, width, height, fill="#ffffff", opacity=0.92)
        for index, label in enumerate(labels):
            y = top + line * index + _LABEL
            picture.text(
                at[0], y, label, size=_LABEL, color=color, anchor="middle", bold=self.is_numbered
            )

    def _draw_list(self, picture: Picture) -> None:
        x, y = self.list_at
        for count, ((before, after), labels) in enumerate(self.labels.items(), 1):
            names = f"{before.name.lower()} to {after.name.lower()}: "
            color = BLUE if (before, after) in self.usual else INK
            text = names + "; ".join(labels).replace("`", "")
            picture.text(x, y + 19 * count, f"{count}", size=_LABEL, bold=True, color=color)
            picture.text(x + 24, y + 19 * count, text, size=_LABEL, color=color)


def _border(centre: tuple[float, float], toward: tuple[float, float]) -> tuple[float, float]:
    """The point where the line from ``centre`` leaves the box of a state."""
    dx, dy = toward[0] - centre[0], toward[1] - centre[1]
    share = min(
        (_BOX[0] / 2 + 2) / abs(dx) if dx else math.inf,
        (_BOX[1] / 2 + 2) / abs(dy) if dy else math.inf,
    )
    return centre[0] + dx * share, centre[1] + dy * share


def _on_curve(
    first: tuple[float, float],
    control: tuple[float, float],
    last: tuple[float, float],
    share: float,
) -> tuple[float, float]:
    """The point after ``share`` of a quadratic curve."""
    weights = ((1 - share) ** 2, 2 * share * (1 - share), share**2)
    x, y = (
        sum(
            weight * point[axis]
            for weight, point in zip(weights, (first, control, last), strict=True)
        )
        for axis in range(2)
    )
    return x, y


def _point(at: tuple[float, float]) -> str:
    return f"{number(at[0])} {number(at[1])}"


def _edges(found: Iterable[tuple[Enum, Enum, str]]) -> dict[_Edge, list[str]]:
    labels: dict[_Edge, list[str]] = {}
    for before, after, label in found:
        labels.setdefault((before, after), []).append(label)
    return labels


def step_diagram() -> Picture:
    """The phases of a step, from the client's table."""
    diagram = StateDiagram(
        title="The phases of a step",
        size=(860, 440),
        places={
            Phase.IDLE: (100, 280),
            Phase.QUORUM: (250, 170),
            Phase.HEALING: (470, 70),
            Phase.TRAINING: (740, 170),
            Phase.VOTING: (740, 390),
            Phase.APPLYING: (380, 390),
        },
        labels=_edges(
            (before, after, event.value) for (before, event), after in STEP_TRANSITIONS.items()
        ),
        usual={
            (Phase.IDLE, STEP_TRANSITIONS[Phase.IDLE, StepEvent.WENT_ON]),
            (Phase.TRAINING, STEP_TRANSITIONS[Phase.TRAINING, StepEvent.VOTE_BEGAN]),
            (Phase.VOTING, STEP_TRANSITIONS[Phase.VOTING, StepEvent.COMMITTED]),
            (Phase.APPLYING, STEP_TRANSITIONS[Phase.APPLYING, StepEvent.UPDATE_APPLIED]),
        },
        bends={(Phase.TRAINING, Phase.QUORUM): 14, (Phase.QUORUM, Phase.TRAINING): 16},
    )
    return diagram.draw()


def link_diagram() -> Picture:
    """The connection of a manager or an agent to a lighthouse."""
    diagram = StateDiagram(
        title="The link to a lighthouse",
        size=(860, 630),
        places={
            LinkState.PAUSED: (120, 150),
            LinkState.OPENING: (400, 150),
            LinkState.OPEN: (700, 150),
            LinkState.LEAVING: (700, 300),
            LinkState.LEFT: (260, 300),
        },
        labels=_edges(
            (before, after, why)
            for before, changes in LINK_TRANSITIONS.items()
            for after, why in changes.items()
        ),
        usual={
            (LinkState.PAUSED, LinkState.OPENING),
            (LinkState.OPENING, LinkState.OPEN),
            (LinkState.OPEN, LinkState.LEAVING),
            (LinkState.LEAVING, LinkState.LEFT),
        },
        bends={
            (LinkState.PAUSED, LinkState.OPENING): -10,
            (LinkState.OPENING, LinkState.PAUSED): -10,
            (LinkState.OPENING, LinkState.OPEN): -10,
            (LinkState.OPEN, LinkState.OPENING): -10,
            (LinkState.OPEN, LinkState.PAUSED): 72,
            (LinkState.OPENING, LinkState.LEFT): 8,
            (LinkState.LEFT, LinkState.OPENING): 8,
        },
        is_numbered=True,
        list_at=(30, 335),
    )
    return diagram.draw()


def run_diagram() -> Picture:
    """The phases of a `Trainer`'s run."""
    diagram = StateDiagram(
        title="The phases of a Trainer's run",
        size=(860, 530),
        places={
            RunPhase.IDLE: (120, 110),
            RunPhase.WAITING: (410, 110),
            RunPhase.FORMING: (710, 110),
            RunPhase.TRAINING: (710, 270),
            RunPhase.ENDING: (410, 270),
        },
        labels=_edges(
            (before, after, change.value) for (before, change), after in RUN_TRANSITIONS.items()
        ),
        usual={
            (RunPhase.IDLE, RunPhase.WAITING),
            (RunPhase.WAITING, RunPhase.FORMING),
            (RunPhase.FORMING, RunPhase.TRAINING),
            (RunPhase.TRAINING, RunPhase.IDLE),
            (RunPhase.IDLE, RunPhase.TRAINING),
        },
        bends={
            (RunPhase.IDLE, RunPhase.WAITING): -10,
            (RunPhase.WAITING, RunPhase.IDLE): -10,
            (RunPhase.IDLE, RunPhase.TRAINING): -12,
            (RunPhase.TRAINING, RunPhase.IDLE): -12,
            (RunPhase.IDLE, RunPhase.ENDING): 12,
            (RunPhase.ENDING, RunPhase.IDLE): 12,
        },
        shares={
            (RunPhase.IDLE, RunPhase.TRAINING): 0.65,
            (RunPhase.TRAINING, RunPhase.IDLE): 0.35,
        },
        is_numbered=True,
        list_at=(30, 305),
    )
    return diagram.draw()


def parts_picture() -> Picture:
    """The processes of a job with two groups of two workers."""
    green = "#2f8f5b"
    picture = Picture(860, 372, "A lighthouse, and two replica groups with their managers")
    picture.text(20, 30, "The processes of a job", size=16, bold=True)
    picture.box(310, 44, 240, 52, fill="#e8effa", stroke=BLUE, radius=8)
    picture.text(430, 66, "lighthouse", anchor="middle", bold=True, size=14)
    picture.text(430, 85, "decides who trains together", anchor="middle", size=12, color=QUIET)
    for name, left in (("a", 30.0), ("b", 450.0)):
        picture.box(left, 130, 380, 150, fill="#f7f9fb", stroke=LINE, radius=10)
        picture.text(left + 16, 168, f"group {name}", bold=True)
        for line, text in enumerate(("one copy", "of the model")):
            picture.text(left + 16, 185 + 14 * line, text, size=11, color=QUIET)
        picture.path(f"M{number(left + 190)} 150L430 97", stroke=BLUE, width=1.6)
        picture.box(left + 130, 150, 120, 36, fill=PALE, stroke=LINE, radius=8)
        picture.text(left + 190, 173, "manager", anchor="middle", bold=True)
        for rank in range(2):
            x = left + 25 + rank * 190
            picture.path(f"M{number(x + 70)} 222L{number(left + 190)} 187", stroke=QUIET)
            picture.box(x, 222, 140, 42, fill="#ffffff", stroke=QUIET, radius=8)
            picture.text(x + 70, 240, f"worker {rank}", anchor="middle", bold=True)
            picture.text(x + 70, 256, "your program", anchor="middle", size=11, color=QUIET)
    for rank in range(2):
        begin, end, depth = 125 + rank * 190, 545 + rank * 190, 330 + rank * 28
        path = f"M{begin} 266C{begin} {depth} {end} {depth} {end} 266"
        picture.path(path, stroke=green, width=1.6)
    picture.text(
        430, 350, "workers of the same rank average gradients, and copy the state when one heals",
        size=12, color=green, anchor="middle",
    )  # fmt: skip
    return picture


def group_states_table() -> str:
    """What each group of a job is, by the lighthouse's table."""
    heads = (tenure.value.replace("last one", "last quorum") for tenure in Tenure)
    head = " | ".join(f"was in {each}" for each in heads)
    rows = [f"| the group | {head} |", f"| --- | {' | '.join('---' for _ in Tenure)} |"]
    for conduct, states in STATES.items():
        cells = (f"`{states[tenure].name}`" if tenure in states else "" for tenure in Tenure)
        rows.append(f"| {conduct.value} | {' | '.join(cells)} |")
    meanings = ["", "| state | meaning |", "| --- | --- |"]
    meanings += [f"| `{state.name}` | {state.value} |" for state in GroupState]
    return "\n".join([*rows, *meanings])


def reactions_table() -> str:
    """What an agent does after each event, by the launcher's table."""
    rows = [
        f"| event | {' | '.join(f'`{policy.value}`' for policy in RestartPolicy)} |",
        f"| --- | {' | '.join('---' for _ in RestartPolicy)} |",
    ]
    for event in RunEvent:
        cells = ("; ".join(each.value for each in REACTIONS[p][event]) for p in RestartPolicy)
        rows.append(f"| {event.value} | {' | '.join(cells)} |")
    return "\n".join(rows)
