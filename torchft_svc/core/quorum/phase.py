"""What a worker is doing, as its manager and the lighthouse know it."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """What a worker is doing."""

    IDLE = "idle"
    QUORUM = "quorum"
    HEALING = "healing"
    TRAINING = "training"
    VOTING = "voting"
    APPLYING = "applying"

    __hash__ = object.__hash__  # Enum's own is written in Python, and a step needs eight
