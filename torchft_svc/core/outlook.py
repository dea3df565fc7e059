"""Decides how long a decision holds, so that most of what happens needs no new one."""

from __future__ import annotations

import math


class Outlook:
    """On one job's next quorum. ``now`` is monotonic seconds.

    Deadlines count from the first request of a member of the previous quorum; as long as there is
    none, a crowd is waited for, and they count from the first request of anyone.
    """

    def __init__(self, join_timeout_s: float) -> None:
        self._join_timeout_s = join_timeout_s
        # When the last decision said that time changes it (inf: never, while those live that it
        # waits for; None: it does not hold any more).
        self.look_at: float | None = None
        self._awaits_crowd = False
        self._first_at: float | None = None  # from when deadlines counted in the last decision
        self._some_are_late = False  # since then

    def decided(self, until: float | None) -> None:
        """To wait ``until`` then, or not at all."""
        self.look_at, self._first_at = until, None
        self._awaits_crowd = self._some_are_late = False

    def awaits(self, until: float, first_at: float) -> None:
        """To wait ``until`` then for absent ones; the first request of a member of the previous
        quorum came at ``first_at`` (inf: none has)."""
        self.decided(until)
        if first_at == math.inf:
            self._awaits_crowd = True
        else:
            self._first_at = first_at

    def forget(self) -> None:
        """Something has happened that the last decision did not know of."""
        self.look_at = None

    def crowd_changed(self) -> None:
        """Something has happened that may end the wait for a crowd earlier."""
        if self._awaits_crowd:
            self.look_at = None

    def member_asked(self, asked_at: float) -> None:
        """One of the previous quorum: since before the others, if it gave up in between."""
        if self._awaits_crowd or (self._first_at is not None and asked_at < self._first_at):
            self.look_at = None

    def member_withdrew(self, now: float) -> None:
        """One of the previous quorum. It matters if only heals are waited for: others have less
        time, and if that is up, nobody need look before the heals are over."""
        if self.look_at is None or self._first_at is None:
            return
        late_at = self._first_at + self._join_timeout_s
        if now < late_at:
            self.look_at = min(self.look_at, late_at)
        else:
            self._some_are_late = True

    def heal_is_over(self) -> None:
        """Of one who asks, or is dead."""
        if self._some_are_late:
            self.look_at = None

    def holds(self, now: float, num_awaited: int, num_absent: int) -> bool:
        """Whether the last decision is still right, whoever has asked meanwhile.

        ``num_awaited`` of the previous quorum, ``num_absent`` of all. Whatever happened since then
        can only have moved the deadline back, or the decision was forgotten.
        """
        if self.look_at is None or now >= self.look_at:
            return False
        return num_awaited > 0 or (self._awaits_crowd and num_absent > 0)
