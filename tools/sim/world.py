"""Keeps the virtual clock: what happens next, in which process, and what chance decides (rule X2).

Nothing here waits. An event belongs to a process: it is lost if that process is dead by then, and
comes late if it is frozen.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class Event:
    """Something that is going to happen, unless it is cancelled."""

    __slots__ = ("action", "args", "cancelled", "process")

    def __init__(self, process: Process, action: Action, args: tuple[Any, ...]) -> None:
        self.process = process
        self.action = action
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class VirtualWorld:
    """All that happens, in order; two runs with one seed are the same run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.num_events = 0
        self.after_event: Action = _nothing
        self._queue: list[tuple[float, int, Event]] = []
        self._num_planned = 0

    def chance(self, name: str) -> random.Random:
        """A source of chance for ``name`` alone: without one fault, the others stay as they are."""
        return random.Random(f"{self.seed}/{name}")

    def process(self, name: str) -> Process:
        return Process(self, name)

    def plan(self, delay_s: float, event: Event) -> Event:
        self._num_planned += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), self._num_planned, event))
        return event

    def run(self, until: float, enough: Callable[[], bool]) -> bool:
        """Process events ``until`` then, or until ``enough`` is true, which is returned."""
        while self._queue and self._queue[0][0] <= until:
            at, _, event = heapq.heappop(self._queue)
            if event.cancelled or event.process.is_dead:
                continue
            self.now = at
            if event.process.is_frozen:
                event.process.backlog.append(event)
                continue
            self.num_events += 1
            event.action(*event.args)
            self.after_event()
            if enough():
                return True
        self.now = max(self.now, until)
        return enough()


class Process:
    """Something that can die or freeze as a whole."""

    def __init__(self, world: VirtualWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.chance = world.chance(name)
        self.is_dead = False
        self.is_frozen = False
        self.thawed_at = 0.0
        self.stopped_s = 0.0  # so far, without the time of a stop that lasts
        self._frozen_at = 0.0
        self.backlog: deque[Event] = deque()
        self.on_death: list[Action] = []

    def after(self, delay_s: float, action: Action, *args: Any) -> Event:
        return self.world.plan(delay_s, Event(self, action, args))

    def kill(self) -> None:
        """SIGKILL: its events do not happen any more; ``on_death`` is called at once."""
        if self.is_dead:
            return
        self.is_dead = True
        self.backlog.clear()
        actions, self.on_death = self.on_death, []
        for action in actions:
            action()

    def freeze(self) -> None:
        """SIGSTOP."""
        if not self.is_frozen:
            self.is_frozen, self._frozen_at = True, self.world.now

    def thaw(self) -> None:
        """SIGCONT: the events that have come meanwhile happen now, in their order."""
        if not self.is_frozen:
            return
        self.is_frozen = False
        self.thawed_at = self.world.now
        self.stopped_s += self.world.now - self._frozen_at
        while self.backlog:
            self.world.plan(0.0, self.backlog.popleft())


def _nothing() -> None:
    """Do nothing."""
