"""A connection beside a session, by which each end notices that the other one is gone.

Both ends send a byte every second. The end of the connection is the end of the other process, of
its session or of its host's network; silence means that it is frozen or cut off. Not every backend
notices that by itself: NCCL notices neither, gloo no silence.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from torchft_svc.client.checkpointing.http.wire import Wire
from torchft_svc.client.process.forks import drop_after_fork

BEAT_S = 1.0
# As long as a lighthouse waits for the heartbeat of a group.
SILENCE_S = 5.0
_BEAT = b"."
_JOIN_TIMEOUT_S = 5.0


class Lifeline:
    """Watches the other end of ``wire``, which it owns, until `close`.

    ``on_loss``: called once, on the lifeline's thread, with the reason.
    """

    def __init__(self, wire: Wire, on_loss: Callable[[str], None]) -> None:
        self._wire = wire
        self._on_loss = on_loss
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchft-lifeline", daemon=True)
        drop_after_fork(self)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """End the connection, which ends the session at the other end; idempotent."""
        self._closed.set()
        self._wire.interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def drop_descriptors(self) -> None:
        """Close the connection in a forked child, so that it ends with the parent."""
        self._wire.close()

    def _run(self) -> None:
        try:
            reason = self._watch()
        finally:
            with contextlib.suppress(OSError):
                self._wire.close()
        if not self._closed.is_set():
            self._on_loss(reason)

    def _watch(self) -> str:
        """Exchange beats with the other end; returns why that is over."""
        received_at = time.monotonic()
        beat_at = received_at
        beat = memoryview(bytearray(1))
        while True:
            try:
                now = time.monotonic()
                if now >= beat_at:
                    self._wire.timeout_s = SILENCE_S
                    self._wire.send(_BEAT)
                    beat_at = now + BEAT_S
                self._wire.timeout_s = max(beat_at - now, 0.0)
                self._wire.read_into(beat)
                received_at = time.monotonic()
            except TimeoutError:
                if time.monotonic() - received_at >= SILENCE_S:
                    return f"nothing came from it for {SILENCE_S:g} s"
            except OSError:
                return "it has left, or died"
