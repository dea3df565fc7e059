"""Decides how long to pause before the next attempt to reach a service."""

from __future__ import annotations

import random
from collections.abc import Callable

from torchft_svc.rpc.channel import MAX_RECONNECT_MS, MIN_RECONNECT_MS


class Backoff:
    """Pauses that double from the least to the longest, each shortened by up to a half.

    By how much is drawn, so that a thousand managers that lost one lighthouse in one moment do not
    come back in one moment. ``draw`` gives numbers from 0 to 1.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._longest_s = MIN_RECONNECT_MS / 1000

    def tried(self, *, failed: bool) -> None:
        """After an attempt, or one at each address: the next pause is longer, or short again."""
        longest_s = min(2 * self._longest_s, MAX_RECONNECT_MS / 1000)
        self._longest_s = longest_s if failed else MIN_RECONNECT_MS / 1000

    def pause_s(self) -> float:
        """The next pause, in seconds."""
        return self._longest_s * (1 + self._draw()) / 2
