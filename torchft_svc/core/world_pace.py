"""When losses lead to another world: at once, but a storm of them does not to many (rule L2)."""

from __future__ import annotations

import math

# What breaks at one moment is noticed within so much time.
SETTLE_S = 0.05
# The least time from one world to the next, if losses in quick succession lead to both: after the
# first of such worlds, after the second, and after any later one.
SPACING_S = (0.1, 0.4, 1.0)
# A loss after so long is the first one again. Joins wait for that long, too.
CALM_S = 1.0


class WorldPace:
    """Of one run."""

    def __init__(self) -> None:
        self._due_at = math.inf
        self._earliest_at = -math.inf
        self._calm_at = -math.inf
        self._num_in_succession = 0
        self.held_until = -math.inf  # no world is made before that

    @property
    def due_at(self) -> float:
        """When losses are acted on; infinity: there are none."""
        return self._due_at

    @property
    def calm_at(self) -> float:
        """When the losses that were acted on are history."""
        return self._calm_at

    def is_waiting(self) -> bool:
        return self._due_at < math.inf

    def note_loss(self, at: float) -> None:
        """Something is lost, perhaps for a moment only."""
        if not self.is_waiting():
            self._due_at = max(at + SETTLE_S, self._earliest_at)

    def act_at(self, at: float) -> None:
        """It was waited for long enough."""
        self._due_at = at

    def hold(self, until: float) -> None:
        """Who is missing may come back until then; nobody joins before that."""
        self.held_until = until
        self._earliest_at = max(self._earliest_at, until)
        self._calm_at = max(self._calm_at, until)
        if self.is_waiting():
            self._due_at = max(self._due_at, until)

    def forget_losses(self) -> None:
        """All have come back, or nobody is left to wait for another world."""
        self._due_at = math.inf

    def acted(self, at: float) -> None:
        """Losses have led to another world, or to a wait for further nodes."""
        if at >= self._calm_at:
            self._num_in_succession = 0
        spacing_s = SPACING_S[min(self._num_in_succession, len(SPACING_S) - 1)]
        self._num_in_succession += 1
        self._due_at, self._earliest_at, self._calm_at = math.inf, at + spacing_s, at + CALM_S
