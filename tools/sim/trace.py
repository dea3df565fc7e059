"""Keeps the last events of a run, as text: the trace that is printed when an invariant falls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.sim.world import VirtualWorld

# A trace is read by people: what happened long before the fall rarely matters.
MAX_LINES = 400


@dataclass(slots=True)
class Trace:
    """The last lines of a run."""

    world: VirtualWorld
    _lines: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=MAX_LINES))

    def record(self, who: str, what: str) -> None:
        self._lines.append((self.world.now, who, what))

    def lines(self) -> Iterator[str]:
        for at, who, what in self._lines:
            yield f"{at:10.4f} s  {who:<16} {what}"
