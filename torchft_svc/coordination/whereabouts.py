"""Where a manager is that may be started anew at another address."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torchft_svc.errors import Unreachable

# The pause before a manager that did not answer is asked again.
RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """``find`` tells the manager's present address, or None if it will never be back.

    It may be called on any thread. ``patience_s``: after so long without an answer it counts as
    gone for good.
    """

    find: Callable[[], str | None]
    patience_s: float


class Patience:
    """Decides how long one call to a manager that cannot be reached is repeated.

    ``deadline`` is the call's own (monotonic seconds).
    """

    def __init__(self, whereabouts: Whereabouts, deadline: float) -> None:
        self._whereabouts = whereabouts
        self._deadline = deadline
        self._lost_at: float | None = None

    def pause(self, failure: Unreachable) -> bool:
        """Wait before the next attempt; False, at once, if there is no point in one."""
        if failure.peer != "manager":
            return False  # it answers; the lighthouse does not
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        give_up_at = min(self._deadline, self._lost_at + self._whereabouts.patience_s)
        if now + RETRY_S >= give_up_at or self._whereabouts.find() is None:
            return False
        time.sleep(RETRY_S)
        return True
