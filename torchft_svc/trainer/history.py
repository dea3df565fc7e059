"""The history of a run, and its costs: steps over time, and the incidents with their rung.

The trainer records what it notices, with the time; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torchft_svc.trainer.messages import Position

Rung = Literal["per-step", "restart", "growth"]
RUNGS: tuple[Rung, ...] = ("per-step", "restart", "growth")
# Where the state came from with which training went on after an incident.
Source = Literal["peer", "checkpoint", "trainer", "start", ""]

# A longer curve is thinned out: it is drawn on fewer pixels.
MAX_POINTS = 4096
# Older ones are counted, but not kept one by one.
MAX_INCIDENTS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """One interruption of training: what was lost within one restart is one.

    Args:
        rung: ``per-step`` (the others trained on), ``restart`` (all workers were replaced), or
            ``growth`` (workers were added; nothing was lost).
        at_s, until_s: when it was noticed, and when the first step after it was done (None: not
            yet); in seconds since the run began.
        reason: what was noticed first.
        lost_workers: the ranks of all that were lost, also at the same moment.
        step: the last step that was done before.
        lost_steps: how many of these steps had to be done again.
        source: whose state training went on with.
        why_not_peer: why that is not the state of a worker that was left when the incident was
            noticed (empty: it is, or none was left).
        num_workers: with how many workers it went on.
        waited_s: how long of this time there were too few resources.
    """

    rung: Rung
    at_s: float
    reason: str
    step: int
    until_s: float | None = None
    lost_workers: tuple[int, ...] = ()
    lost_steps: int = 0
    source: Source = ""
    why_not_peer: str = ""
    num_workers: int = 0
    waited_s: float = 0.0

    @property
    def cost_s(self) -> float | None:
        """The seconds from the notice to the next step; None: it is not over."""
        return None if self.until_s is None else self.until_s - self.at_s

    def __str__(self) -> str:
        took = "not over" if self.cost_s is None else f"{self.cost_s:.2f} s"
        return f"{self.rung} at step {self.step}: {took}, {self.lost_steps} steps; {self.reason}"


@dataclass(frozen=True, slots=True)
class Point:
    """The state of a run after ``at_s`` seconds: ``step`` steps, ``num_workers`` workers."""

    at_s: float
    step: int
    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RungCost:
    """The cost of all incidents of one rung together."""

    incidents: int = 0
    lost_workers: int = 0
    lost_steps: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0

    def plus(self, incident: Incident) -> RungCost:
        return RungCost(
            incidents=self.incidents + 1,
            lost_workers=self.lost_workers + len(incident.lost_workers),
            lost_steps=self.lost_steps + incident.lost_steps,
            seconds=self.seconds + (incident.cost_s or 0.0),
            waited_s=self.waited_s + incident.waited_s,
        )


@dataclass(slots=True)
class RunHistory:
    """The history of one run; ``began_at`` and each ``now`` are monotonic seconds."""

    began_at: float
    num_wanted: int
    points: list[Point] = field(default_factory=list)
    checkpoints: list[Point] = field(default_factory=list)
    _ended: list[Incident] = field(default_factory=list)
    _forgotten: dict[Rung, RungCost] = field(default_factory=dict)
    _open: Incident | None = None
    _resumed_at_step: int | None = None
    _waits_since: float | None = None
    _step: int = 0
    _min_gap_s: float = 0.0

    def lost(self, now: float, worker: int, reason: str, rung: Rung) -> None:
        """A worker was lost. A further one within an incident belongs to it."""
        self._begin_incident(now, rung, reason)
        assert self._open is not None
        workers = (*self._open.lost_workers, worker)
        self._open = replace(self._open, lost_workers=workers)

    def failed(self, now: float, reason: str, rung: Rung) -> None:
        """The program raised an error: its worker is replaced, or all are started again."""
        self._begin_incident(now, rung, reason)

    def explain(self, reason: str) -> None:
        """Record the reason, of which what was noticed before is a consequence."""
        if self._open is not None:
            self._open = replace(self._open, reason=reason)

    def grows(self, now: float, reason: str) -> None:
        """Record that all workers are replaced by more of them."""
        self._begin_incident(now, "growth", reason)

    def waits(self, now: float) -> None:
        """Record that there are too few resources to continue."""
        if self._waits_since is None:
            self._waits_since = now

    def resumed(
        self,
        now: float,
        position: Position,
        num_workers: int,
        source: Source,
        why_not_peer: str = "",
    ) -> None:
        """Workers continue from ``position``; the incident is over with the next step."""
        self._stop_waiting(now)
        self._resumed_at_step = position.step
        if self._open is not None:
            # Workers may have done more before they noticed; or this is not the first attempt.
            done = max(self._open.step, self._step)
            lost = self._open.lost_steps + max(self._step - position.step, 0)
            self._open = replace(
                self._open,
                step=done,
                lost_steps=lost,
                source=source,
                num_workers=num_workers,
                why_not_peer=why_not_peer,
            )
        self._step = position.step
        self._add_point(Point(now - self.began_at, position.step, num_workers))

    def stepped(self, now: float, position: Position, num_workers: int) -> None:
        """Training has come to ``position``."""
        if position.step <= self._step:
            return
        self._step = position.step
        if self._open is not None and self._ends_it(position.step):
            ended = replace(self._open, until_s=now - self.began_at)
            self._open = None
            self._add_ended(replace(ended, num_workers=num_workers))
        point = Point(now - self.began_at, position.step, num_workers)
        last = self.points[-1] if self.points else None
        is_near = last is not None and point.at_s - last.at_s < self._min_gap_s
        if last is None or last.num_workers != num_workers or not is_near:
            self._add_point(point)

    def checkpointed(self, now: float, position: Position) -> None:
        """A checkpoint of ``position`` was written."""
        self.checkpoints.append(Point(now - self.began_at, position.step, 0))
        _thin_out(self.checkpoints)

    @property
    def incidents(self) -> Sequence[Incident]:
        """The last ones in the order of their beginning, also one that is not over."""
        return [*self._ended, *([] if self._open is None else [self._open])]

    def costs(self) -> dict[Rung, RungCost]:
        """The costs by rung; rungs without an incident are left out."""
        found = dict(self._forgotten)
        for incident in self.incidents:
            found[incident.rung] = found.get(incident.rung, RungCost()).plus(incident)
        return {rung: found[rung] for rung in RUNGS if rung in found}

    def as_dict(self) -> dict[str, Any]:
        """The history as it stands in the results of training."""
        costs = self.costs()
        return {
            "incidents": sum(cost.incidents for cost in costs.values()),
            "lost_workers": sum(cost.lost_workers for cost in costs.values()),
            "lost_steps": sum(cost.lost_steps for cost in costs.values()),
            "lost_s": sum(cost.seconds for cost in costs.values()),
            "rungs": {
                rung: {
                    "incidents": cost.incidents,
                    "lost_workers": cost.lost_workers,
                    "lost_steps": cost.lost_steps,
                    "lost_s": cost.seconds,
                    "waited_s": cost.waited_s,
                }
                for rung, cost in costs.items()
            },
        }

    def _begin_incident(self, now: float, rung: Rung, reason: str) -> None:
        self._resumed_at_step = None
        if self._open is None:
            self._open = Incident(
                rung=rung, at_s=now - self.began_at, reason=reason, step=self._step
            )
        elif self._open.rung == "growth" and rung != "growth":  # lost while it grew
            self._open = replace(self._open, rung=rung, reason=reason)
        elif rung == "restart":  # perhaps the others tried to train on until now
            self._open = replace(self._open, rung=rung)

    def _ends_it(self, step: int) -> bool:
        """Whether ``step`` shows that the open incident is over."""
        assert self._open is not None
        if self._open.rung == "per-step":
            return True
        return self._resumed_at_step is not None and step > self._resumed_at_step

    def _stop_waiting(self, now: float) -> None:
        if self._waits_since is not None and self._open is not None:
            waited = self._open.waited_s + now - self._waits_since
            self._open = replace(self._open, waited_s=waited)
        self._waits_since = None

    def _add_ended(self, incident: Incident) -> None:
        self._ended.append(incident)
        if len(self._ended) > MAX_INCIDENTS:
            oldest = self._ended.pop(0)
            before = self._forgotten.get(oldest.rung, RungCost())
            self._forgotten[oldest.rung] = before.plus(oldest)

    def _add_point(self, point: Point) -> None:
        self.points.append(point)
        if _thin_out(self.points):
            self._min_gap_s = max(2 * self._min_gap_s, point.at_s / MAX_POINTS)


def _thin_out(points: list[Point]) -> bool:
    """Leave out every other point, except the last, if there are too many."""
    if len(points) <= MAX_POINTS:
        return False
    del points[1:-1:2]
    return True
