"""Which streams lead to a group: the session that it has, and others under its replica id.

A session that was cut off may not be noticed for seconds, while its manager has opened the next
one; and without a token anybody can open one under the id of a living group. None of them may take
the group's news from its manager.
"""

from __future__ import annotations

from torchft_svc.rpc.outbox import Outbox

# A manager whose link breaks again and again has some that are not noticed to be cut off.
MAX_SESSIONS_PER_GROUP = 8


class Sessions:
    """To be used on one event loop."""

    def __init__(self) -> None:
        # By job and replica id, the one that was silent the longest first.
        self._open: dict[tuple[str, str], dict[Outbox, None]] = {}

    def opened(self, job: str, replica_id: str, outbox: Outbox) -> Outbox | None:
        """``outbox`` leads to this group; returns the one that is too many, and does so no more."""
        outboxes = self._open.setdefault((job, replica_id), {})
        outboxes[outbox] = None
        if len(outboxes) <= MAX_SESSIONS_PER_GROUP:
            return None
        silent = next(iter(outboxes))
        del outboxes[silent]
        return silent

    def heard(self, job: str, replica_id: str, outbox: Outbox) -> None:
        """A sign of life has come over it."""
        outboxes = self._open.get((job, replica_id), {})
        if len(outboxes) > 1 and outbox in outboxes:
            del outboxes[outbox]
            outboxes[outbox] = None

    def closed(self, job: str, replica_id: str, outbox: Outbox) -> bool:
        """It has ended; whether it led to this group until now."""
        outboxes = self._open.get((job, replica_id), {})
        if outbox not in outboxes:
            return False
        del outboxes[outbox]
        if not outboxes:
            del self._open[job, replica_id]
        return True

    def of(self, job: str, replica_id: str) -> list[Outbox]:
        """All that lead to this group."""
        return list(self._open.get((job, replica_id), ()))

    def close_all(self) -> list[Outbox]:
        """Those that were open."""
        outboxes = [outbox for group in self._open.values() for outbox in group]
        self._open.clear()
        return outboxes
