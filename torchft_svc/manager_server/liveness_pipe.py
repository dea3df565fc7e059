"""The pipe on which a manager shows its parent process that it runs: a byte a second (rule M5).

A dead one is noticed by its end. One that is stopped, or whose event loop is stuck, would live on,
and its group would neither train nor end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import time
from collections.abc import Callable

from torchft_svc.core.pausable_clock import PausableClock

SIGN_INTERVAL_S = 1.0
# How long a manager may be silent, which is never busy for a second. Longer than the heartbeat
# timeout (5 s by default): the others have gone on without its group, and another manager costs
# them nothing. Shorter than it takes a worker to notice the silence itself (twice `KEEPALIVE_MS`),
# and then to give up (`MANAGER_PATIENCE_S`): one that has voted yes, and does not receive the
# decision, has to end.
SILENCE_S = 8.0
_LOOK_S = 1.0
_MANY = 4096


async def write_signs(descriptor: int) -> None:
    """Write signs of life to the pipe until cancelled; a parent need not read them."""
    os.set_blocking(descriptor, False)
    while True:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, b".")
        await asyncio.sleep(SIGN_INTERVAL_S)


class LivenessPipe:
    """The parent's end of the pipe, with this ``descriptor``, which it closes; for one thread.

    The time in which the parent itself was stopped, or a library kept its interpreter lock, is
    not counted as silence. ``clock`` is monotonic seconds.
    """

    def __init__(self, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._clock = clock

    def await_silence(self, has_ended: Callable[[], bool]) -> bool:
        """Wait; returns True after `SILENCE_S` without a sign, False when the other end is closed.

        A child that was forked at the wrong moment may hold that open, so ``has_ended`` is asked,
        too.
        """
        clock = PausableClock(_LOOK_S, self._clock())
        signed_at = clock.now(self._clock())
        while not has_ended():
            is_ready = self._is_ready()
            now = clock.now(self._clock())
            if is_ready:
                if not self._pipe.read(_MANY):
                    return False
                signed_at = now
            elif now - signed_at >= SILENCE_S:
                return True
        return False

    def close(self) -> None:
        """Close the pipe; may be called twice."""
        self._pipe.close()

    def _is_ready(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            return bool(selector.select(_LOOK_S))
