"""Refuses to train one group in two jobs from one thread: they would wait for each other.

When a group comes back, its first step in one job waits for the other groups, which wait for it in
their next step of the other job: each waits until the join timeout, again and again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from torchft_svc.errors import ConfigError

log = logging.getLogger(__name__)

_INSTEAD = (
    "when a group comes back, it waits in one job for a group that waits in the other; use one "
    "manager for both models, with Optimizer(manager, [a, b])"
)


class _ThisThread(threading.local):
    """The managers whose steps this thread has begun."""

    def __init__(self) -> None:
        self.managers: weakref.WeakSet[DrivenManager] = weakref.WeakSet()


_this_thread = _ThisThread()


class DrivenManager:
    """One manager, as far as others of its process matter.

    Args:
        job, group: the names of its job and of its group.
        is_over: whether it was shut down.
        has_others: whether there are other groups in its quorum.
    """

    def __init__(
        self, job: str, group: str, is_over: Callable[[], bool], has_others: Callable[[], bool]
    ) -> None:
        self.job = job
        self.group = group
        self.is_over = is_over
        self.has_others = has_others
        self._has_warned = False

    def begin_step(self) -> None:
        """Check the managers whose steps this thread begins, this one among them.

        Raises:
            ConfigError: one of them trains the same group in another job.
        """
        managers = _this_thread.managers
        managers.add(self)
        if len(managers) == 1:
            return
        for other in list(managers):
            if other.is_over():
                managers.discard(other)
            elif other.job != self.job:
                self._check(other)

    def _check(self, other: DrivenManager) -> None:
        if other.group == self.group:
            _this_thread.managers.discard(self)
            reason = f"this thread trains group {self.group} in job {other.job!r}, too: {_INSTEAD}"
            raise ConfigError("job_id", self.job, reason)
        if not self._has_warned and self.has_others() and other.has_others():
            self._has_warned = True
            log.warning("one thread trains in jobs %s and %s: %s", other.job, self.job, _INSTEAD)
