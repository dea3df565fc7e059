"""`torchft.checkpointing._rwlock`: a lock for many readers or one writer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class RWLock:
    """Held by any number of readers, or by one writer, who waits for them.

    Args:
        timeout: the longest wait for it in seconds; below 0: no limit.
    """

    def __init__(self, timeout: float = -1) -> None:
        self.timeout = timeout
        self._changed = threading.Condition()
        self._num_readers = 0
        self._is_written = False

    def r_acquire(self) -> None:
        """Begin to read; TimeoutError if a writer holds the lock for too long."""
        with self._changed:
            self._wait(lambda: not self._is_written, "read")
            self._num_readers += 1

    def r_release(self) -> None:
        """End a reading."""
        with self._changed:
            assert self._num_readers > 0, "nobody reads"
            self._num_readers -= 1
            self._changed.notify_all()

    def w_acquire(self) -> None:
        """Begin to write; TimeoutError if others hold the lock for too long."""
        with self._changed:
            self._wait(lambda: not self._is_written and not self._num_readers, "write")
            self._is_written = True

    def w_release(self) -> None:
        """End the writing."""
        with self._changed:
            assert self._is_written, "nobody writes"
            self._is_written = False
            self._changed.notify_all()

    def w_locked(self) -> bool:
        """Whether a writer holds the lock."""
        return self._is_written

    @contextlib.contextmanager
    def r_lock(self) -> Iterator[None]:
        """Return a block that reads."""
        self.r_acquire()
        try:
            yield
        finally:
            self.r_release()

    @contextlib.contextmanager
    def w_lock(self) -> Iterator[None]:
        """Return a block that writes."""
        self.w_acquire()
        try:
            yield
        finally:
            self.w_release()

    def _wait(self, holds: Callable[[], bool], action: str) -> None:
        limit = None if self.timeout < 0 else self.timeout
        if not self._changed.wait_for(holds, limit):
            raise TimeoutError(f"no permission to {action} within {self.timeout} s")
