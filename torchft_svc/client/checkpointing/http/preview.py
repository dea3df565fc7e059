"""Shows this worker's state to groups that start, while it trains on (rule K2).

The bytes are read from live memory, between updates, and belong to no step together. That does no
harm: a receiver compares the digest of each chunk with that of the state that it heals by.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchft_svc.client.checkpointing.encoding.memory import Memory
from torchft_svc.client.checkpointing.encoding.serialization import describe
from torchft_svc.client.checkpointing.http.served import Gone
from torchft_svc.client.checkpointing.http.wire import MAX_VIEWS, Reading, digest_of
from torchft_svc.client.checkpointing.transport import StateViewer
from torchft_svc.errors import TorchFTError
from torchft_svc.host.uninterruptible import nothing

log = logging.getLogger(__name__)

# Nobody fetches a preview with longer pauses; what it holds of a device's memory is released.
IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A part of the state as it is shown: its bytes, and the size of a chunk."""

    memory: Memory
    chunk_bytes: int

    @property
    def num_chunks(self) -> int:
        return -(-self.memory.size // self.chunk_bytes)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The start and the end of ``chunk`` in bytes."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.memory.size)


class Preview:
    """Shows the parts of the state that ``show`` was given last; thread-safe.

    ``chunk_bytes_of`` returns the size of the chunks of a state of so many bytes, as when it is
    offered to a group that heals; ``on_collected`` is called when there is more to `expire`.
    """

    def __init__(self, chunk_bytes_of: Callable[[int], int]) -> None:
        self.on_collected: Callable[[], None] = nothing
        self._chunk_bytes_of = chunk_bytes_of
        self._lock = threading.Lock()
        self._viewer: StateViewer | None = None
        self._shown: dict[bool, Shown] = {}  # by whether it is the deferred part
        self._used_at = 0.0

    def show(self, viewer: StateViewer | None) -> None:
        """Show the state that ``viewer`` reads; None: nothing, any more."""
        with self._lock:
            self._viewer = viewer
            self._shown.clear()

    def step(self) -> int:
        """The step that this worker is in.

        Raises:
            Gone: it shows nothing.
        """
        return self._present_viewer().step()

    def collect(self, *, is_deferred: bool) -> Shown:
        """Collect one part of the state anew, and show it from now on.

        Raises:
            Gone: it cannot be shown, for the reason in the message.
        """
        viewer = self._present_viewer()
        try:
            memory = describe(viewer.collect(is_deferred=is_deferred)).memory
        except TorchFTError as error:
            raise Gone(f"the state cannot be shown: {error}") from error
        except Exception as error:
            log.warning("the state cannot be shown to a group that starts: %r", error)
            raise Gone(f"the state cannot be shown: {error!r}") from error
        shown = Shown(memory, self._chunk_bytes_of(memory.size))
        with self._lock:
            self._shown[is_deferred] = shown
            self._used_at = time.monotonic()
        self.on_collected()
        return shown

    def shown(self, *, is_deferred: bool) -> Shown:
        """The part as it was collected last.

        Raises:
            Gone: it was not, or was released since.
        """
        with self._lock:
            shown = self._shown.get(is_deferred)
            self._used_at = time.monotonic()
        if shown is None:
            raise Gone("nothing is shown: ask for the digests first")
        return shown

    def reader(self, shown: Shown, chunk: int) -> Reading:
        """A reader of ``chunk``; offsets count from its start. Updates wait while one is open.

        Raises:
            ConnectionError: (while reading) the state is not shown any more, or is being changed
                for too long.
        """
        first, _ = shown.bounds(chunk)

        @contextmanager
        def reading(start: int, stop: int) -> Iterator[list[memoryview]]:
            try:
                guard = self._present_viewer().reading()
                with guard:
                    yield shown.memory.views(first + start, first + stop, MAX_VIEWS)
            except (Gone, TorchFTError) as error:
                raise ConnectionAbortedError(f"the state is not shown any more: {error}") from error
            self._used_at = time.monotonic()

        return reading

    def digest(self, shown: Shown, chunk: int) -> bytes:
        """The digest of ``chunk`` as it is now; see `reader`."""
        start, stop = shown.bounds(chunk)
        return digest_of(self.reader(shown, chunk), stop - start, chunk)

    def expire(self, now: float) -> float | None:
        """Release a preview that nobody has used for long; return when to check again."""
        with self._lock:
            if not self._shown:
                return None
            until = self._used_at + IDLE_S
            if now < until:
                return until
            self._shown.clear()
            return None

    def _present_viewer(self) -> StateViewer:
        viewer = self._viewer
        if viewer is None:
            raise Gone("this worker shows its state to no group that starts")
        return viewer
