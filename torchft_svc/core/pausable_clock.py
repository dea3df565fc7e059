"""A clock that stops with this process, so that a pause does not make the others look silent."""

from __future__ import annotations

# Groups beat at least twice in a heartbeat timeout: with eight looks, a living group has a quarter
# of it left for messages that are still unread when this process continues.
LOOKS_PER_TIMEOUT = 8
# A busy scheduler does not allow shorter intervals; with longer ones, a timeout that is shorter
# than the heartbeat timeout could end unnoticed.
MIN_LOOK_S, MAX_LOOK_S = 0.02, 0.5
# A sum of instants may be too small by as much; a look then would find nothing to do yet.
ROUNDING_S = 1e-6


def usual_look_s(heartbeat_timeout_s: float) -> float:
    """How often to look if groups are dead after so much silence."""
    return min(max(heartbeat_timeout_s / LOOKS_PER_TIMEOUT, MIN_LOOK_S), MAX_LOOK_S)


class PausableClock:
    """Monotonic seconds, less those in which this process or its machine was stopped.

    `now` must be called at least every ``look_s`` while it matters, with a monotonic clock's time.
    In time that passes without it, nothing could be received or done.
    """

    def __init__(self, look_s: float, at: float) -> None:
        self.look_s = look_s
        self._looked_at = at
        self.missed_s = 0.0  # so far

    def now(self, at: float) -> float:
        missed_s = at - self._looked_at - self.look_s
        self._looked_at = at
        if missed_s > self.look_s:  # less is what a busy machine does
            self.missed_s += missed_s
        return at - self.missed_s

    def skip_to(self, at: float) -> None:
        """Continue at ``at``: nobody had to look until then, so nothing was missed."""
        self._looked_at = at

    def look_by(self, instant: float) -> float:
        """The time to call `now` next: at the latest when this clock shows ``instant``."""
        at = instant + self.missed_s + (ROUNDING_S if self.missed_s else 0.0)
        return min(at, self._looked_at + self.look_s)
