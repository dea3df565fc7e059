"""Decides when the next kill order is carried out: in the phase it names, while all are well."""

from __future__ import annotations

from collections.abc import Iterator

from tools.demo.board import Board
from tools.demo.chaos import KillOrder

# A phase that does not come (too short to be seen, say) must not hold the run up.
_PATIENCE_S = 2.0
# A group that came back trains for so long before the next kill, or nobody would see it.
_CALM_S = 1.0
# From asking to join until the first own update; of which an order's fraction is waited for.
_TYPICAL_HEAL_S = 0.3


class Killer:
    """Turns the row of ``orders`` into kills, at most ``num_kills``; time is an argument.

    The second kill of an order that says ``again`` is not counted: it may come too late.
    """

    def __init__(self, orders: Iterator[KillOrder], num_kills: int) -> None:
        self._orders = orders
        self._order = next(orders)
        self._left = num_kills
        self._num_given = 0
        self._due_at: float | None = None
        self._armed_at: float | None = None
        self._well_since: float | None = None
        self._again: KillOrder | None = None
        self._heals_since: float | None = None
        self._victim = 0  # its incarnation

    @property
    def done(self) -> bool:
        return self._left == 0 and self._again is None

    @property
    def armed(self) -> bool:
        """Whether the victim's next phases matter, so that the caller should look often."""
        return self._armed_at is not None or self._again is not None

    def stop_after(self, num_kills: int) -> None:
        """Give no more orders if so many were given; the second kill of the last may still come."""
        if self._num_given >= num_kills:
            self._left = 0

    def order_due(self, now: float, board: Board) -> KillOrder | None:
        """The order to carry out at this instant, or ``None``.

        Orders are due at their distance from the last kill (the first one: from the moment when all
        groups trained), and wait until all groups have trained again for a moment.
        """
        if self._again is not None:
            return self._second_kill(now, self._again, board)
        if self.done or not board.all_training:
            self._armed_at = self._well_since = None
            return None
        if self._well_since is None:
            self._well_since = now
        if self._due_at is None:
            self._due_at = now + self._order.after_s
        if now < max(self._due_at, self._well_since + _CALM_S):
            return None
        if self._armed_at is None:
            self._armed_at = now
        if not self._moment_has_come(now, self._armed_at, board):
            return None
        order, self._order = self._order, next(self._orders)
        self._left -= 1
        self._num_given += 1
        self._due_at, self._armed_at = now + self._order.after_s, None
        self._again = order if order.again else None
        self._heals_since, self._victim = None, board.groups[order.group].incarnation
        return order

    def _second_kill(self, now: float, order: KillOrder, board: Board) -> KillOrder | None:
        state = board.groups[order.group].state
        has_begun_anew = board.groups[order.group].incarnation != self._victim
        if state == "training" and (has_begun_anew or self._heals_since is not None):
            self._again = None  # it was faster, maybe than anyone has looked
        if state != "healing":
            return None
        if self._heals_since is None:
            self._heals_since = now
        if now < self._heals_since + order.fraction * _TYPICAL_HEAL_S:
            return None
        self._again = None
        self._due_at = now + self._order.after_s
        return order

    def _moment_has_come(self, now: float, armed_at: float, board: Board) -> bool:
        status = board.groups[self._order.group]
        if now > armed_at + _PATIENCE_S:
            return True
        phase = status.phase
        if phase is None or phase.phase != self._order.phase or phase.at < armed_at:
            return False
        return now >= phase.at + self._order.fraction * status.phase_time_s(phase.phase)
