"""Decides whom the demo kills, how and in which part of a step: drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from tools.demo.events import PHASES

_Card = TypeVar("_Card")


@dataclass(frozen=True, kw_only=True, slots=True)
class KillOrder:
    """Kill ``group`` when ``fraction`` (0 to 1) of ``phase`` has gone by.

    ``whole_group`` kills its manager sidecar in the same instant; otherwise the trainer alone dies
    and the sidecar has to notice. ``after_s`` counts from the kill before, or from the moment when
    all groups train. ``again``: kill it once more while it heals from this kill.
    """

    group: int
    phase: str
    fraction: float
    whole_group: bool
    after_s: float
    again: bool


def draw_kills(seed: int, num_groups: int, interval_s: float) -> Iterator[KillOrder]:
    """An endless row of orders, in which groups and phases come up equally often."""
    dice = random.Random(seed)
    groups = _shuffled_for_ever(dice, list(range(num_groups)))
    phases = _shuffled_for_ever(dice, list(PHASES))
    ways = _shuffled_for_ever(dice, [False, False, True])
    repeats = _shuffled_for_ever(dice, [False, False, False, True])
    while True:
        yield KillOrder(
            group=next(groups),
            phase=next(phases),
            fraction=dice.random(),
            whole_group=next(ways),
            after_s=interval_s * dice.uniform(0.8, 1.2),
            again=next(repeats),
        )


def _shuffled_for_ever(dice: random.Random, deck: list[_Card]) -> Iterator[_Card]:
    while True:
        yield from dice.sample(deck, len(deck))
