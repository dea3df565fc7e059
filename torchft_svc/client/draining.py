"""Whether this worker's group was told to finish its step and end."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Draining:
    """Set once, from any thread; never taken back."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def request(self, reason: str) -> None:
        """The group has to end after its step, because of ``reason``."""
        if self.reason is None:
            log.warning("draining: %s", reason)
            self.reason = reason
