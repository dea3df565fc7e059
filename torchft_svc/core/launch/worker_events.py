"""What an agent advises its workers, and why; a worker imports this file without the machines."""

from __future__ import annotations

from enum import Enum


class WorkerState(Enum):
    """What the agent advises its workers; they treat it by their own logic."""

    HEALTHY = "HEALTHY"  # the world of this event is complete: work in it
    PAUSED = "PAUSED"  # a new world is on its way; the ranks are the present or the expected ones


class WorldChangeEvent(Enum):
    """Why the world changes."""

    SCALE_UP = "SCALE_UP"
    SCALE_DOWN = "SCALE_DOWN"
