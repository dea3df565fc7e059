"""Decides how much a quorum is told, while it lasts, of who comes and who is lost (rule Q22)."""

from __future__ import annotations

from collections.abc import Iterable

# Whoever trains wants to know that somebody waits, and about how many; and one loss makes it give
# up its step, the others are for those whose session broke just then. A thousand groups that come
# or die at once must not make a million pieces of news.
MAX_ANNOUNCED, MAX_ANNOUNCEMENTS = 100, 10_000
MAX_LOSSES_TOLD = 4


class Announcements:
    """To the members of one quorum."""

    def __init__(self) -> None:
        self._newcomers: set[str] = set()
        self._num_losses = 0

    def of_newcomers(self, waiting: Iterable[str], num_members: int) -> list[str]:
        """Those of ``waiting`` to tell ``num_members`` of: each once, of a crowd the first ones."""
        fresh = [key for key in waiting if key not in self._newcomers]
        limit = min(MAX_ANNOUNCED, max(1, MAX_ANNOUNCEMENTS // num_members))
        del fresh[max(0, limit - len(self._newcomers)) :]
        self._newcomers.update(fresh)
        return fresh

    def of_a_loss(self) -> bool:
        """Whether to tell of another one."""
        self._num_losses += 1
        return self._num_losses <= MAX_LOSSES_TOLD

    def gone(self, replica_id: str) -> None:
        self._newcomers.discard(replica_id)
