"""Writes lines to a stream from a thread, so that nobody waits for whoever reads them.

A pipe that is full, a stopped pager or a frozen terminal blocks a write for as long as its reader
likes. `LineWriter` queues lines instead; `LineStream` is a text stream over one, for `print`,
warnings and tracebacks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import queue
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from multiprocessing import util

# Some seconds of the busiest log, and a few hundred kilobytes.
MAX_WAITING_LINES = 1000
# How long a process that ends waits until its lines are written.
FLUSH_S = 1.0
# How long a line of a worker that a launcher copies waits for a slow reader before it is lost.
READER_PATIENCE_S = 1.0
# The longest part of a line that is kept until its end comes.
MAX_PART = 1 << 16
# A pipe that is ready accepts so many bytes without blocking.
_READY_BYTES = getattr(select, "PIPE_BUF", 512)

OnError = Callable[[str, OSError], None]


@dataclass(frozen=True, slots=True)
class _Lost:
    """Lines that were not written, in the place where they would stand."""

    num_lines: int


def lost_lines(num_lines: int) -> str:
    """The line that stands for ``num_lines`` that were lost."""
    return f"torchft_svc: lost {num_lines} lines of output, which nobody read in time\n"


class LineWriter:
    """Writes lines to ``stream`` in order, from the thread ``torchft-log``. Thread-safe.

    No method but `flush` and `close` blocks, and these at most for a given time. Lines above
    `MAX_WAITING_LINES`, or that cannot be written, are counted, and reported when the stream
    accepts lines again. A forked child has no lines of its parent, and no thread: it writes what
    the stream accepts at once.

    Args:
        stream: None: everything is dropped, as where a process has no standard error.
        on_error: called on the thread for a line that could not be written, instead of counting.
        report: makes the line that reports a number of lost ones.
    """

    def __init__(
        self,
        stream: TextIO | None,
        on_error: OnError | None = None,
        report: Callable[[int], str] = lost_lines,
    ) -> None:
        self.stream = stream
        self.report = report
        self._on_error = on_error
        self._pid = os.getpid()
        self._is_closed = False
        self._renew_state()
        _writers.add(self)
        _register_hooks()

    def _renew_state(self) -> None:
        # Both may be entered again by a signal handler that interrupts them.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: queue.SimpleQueue[str | _Lost | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_lost = 0

    def put_nowait(self, line: str) -> None:
        """Queue ``line``, which includes its end; see `logging.handlers.QueueHandler`."""
        self.put(line, 0.0)

    def put(self, line: str, patience_s: float) -> None:
        """Queue ``line``; wait up to ``patience_s`` for room, unless earlier lines are lost."""
        if self.stream is None:
            return
        with self._changed:
            if not self._has_thread():
                self._write_if_ready(line)
                return
            if patience_s and not self._num_lost:
                self._changed.wait_for(self._has_room, patience_s)
            if not self._has_room():
                self._num_lost += 1
                return
            self._queue_report()
            self._waiting.put(line)

    def flush(self, within_s: float = FLUSH_S) -> bool:
        """Wait until all lines are written, but not longer than ``within_s`` seconds.

        Returns whether they are.
        """
        with self._changed:
            if self._is_closed or self._thread in (None, threading.current_thread()):
                return True
            self._queue_report()
            written = threading.Event()
            self._waiting.put(written)
        return written.wait(within_s)

    def close(self, within_s: float = FLUSH_S) -> None:
        """Flush, and end the thread; later lines are written if the stream is ready for them.

        May be called twice.
        """
        is_written = self.flush(within_s)
        with self._changed:
            thread, self._thread, self._is_closed = self._thread, None, True
            self._waiting.put(None)
        if thread is not None and is_written:
            thread.join(within_s)

    def renew_after_fork(self) -> None:
        """Forget the lines and the thread of the parent; called in the child."""
        self._renew_state()

    def _has_thread(self) -> bool:
        if self._is_closed or os.getpid() != self._pid:
            return False
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, args=(self._waiting,), name="torchft-log", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, or the system allows no more threads
                return False
            self._thread = thread
            _flush_before_hard_exit()
        return True

    def _has_room(self) -> bool:
        return self._waiting.qsize() < MAX_WAITING_LINES

    def _queue_report(self) -> None:
        if self._num_lost:
            self._waiting.put(_Lost(self._num_lost))
            self._num_lost = 0

    def _run(self, waiting: queue.SimpleQueue[str | _Lost | threading.Event | None]) -> None:
        while (item := waiting.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            is_written = self._write(item)
            with self._changed:
                if is_written and waiting.empty():
                    self._queue_report()
                self._changed.notify_all()

    def _write(self, item: str | _Lost) -> bool:
        try:
            self._write_text(self.report(item.num_lines) if isinstance(item, _Lost) else item)
        except OSError as error:  # the reader is gone, or the disk is full
            if self._on_error is not None and isinstance(item, str):
                self._on_error(item, error)
                return False
        except Exception:  # noqa: BLE001, S110 - a stream of the program's, or one that was closed
            pass
        else:
            return True
        with self._changed:
            self._num_lost += item.num_lines if isinstance(item, _Lost) else 1
        return False

    def _write_text(self, text: str) -> None:
        """Write ``text``, and wait for the reader however long it needs."""
        assert self.stream is not None
        descriptor = _descriptor_of(self.stream)
        if descriptor is None:
            self.stream.write(text)
            self.stream.flush()
            return
        # Not through the stream: a write that is blocked would hold its lock, and then neither the
        # program could use it, nor the interpreter end.
        rest = memoryview(_encoded(text, self.stream))
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # somebody who shares it has made it non-blocking
                _await_ready(descriptor, None)

    def _write_if_ready(self, text: str) -> None:
        """Write as much of ``text`` as the stream accepts without blocking."""
        assert self.stream is not None
        with contextlib.suppress(OSError, ValueError):
            descriptor = _descriptor_of(self.stream)
            if descriptor is None:
                self.stream.write(text)
                return
            rest = memoryview(_encoded(text, self.stream))
            while rest and _await_ready(descriptor, 0.0):
                rest = rest[os.write(descriptor, rest[:_READY_BYTES]) :]


class LineStream(io.TextIOBase):
    """A text stream whose whole lines go to ``writer``. Thread-safe.

    Args:
        patience_s: how long a line waits for a reader that is slow; see `LineWriter.put`.
    """

    def __init__(self, writer: LineWriter, patience_s: float = 0.0) -> None:
        self.writer = writer
        self._patience_s = patience_s
        self._renew_state()
        _streams.add(self)

    def _renew_state(self) -> None:
        self._lock = threading.RLock()
        self._part = ""

    def renew_after_fork(self) -> None:
        """Forget the parent's unfinished line, and its lock, which another thread may have held;
        called in the child."""
        self._renew_state()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.writer.stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        stream = self.writer.stream
        return stream is not None and stream.isatty()

    def fileno(self) -> int:
        if self.writer.stream is None:
            raise io.UnsupportedOperation("fileno")
        return self.writer.stream.fileno()

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._lock:
            *lines, self._part = (self._part + text).split("\n")
            if len(self._part) > MAX_PART:
                lines, self._part = [*lines, self._part], ""
        for line in lines:
            self.writer.put(line + "\n", self._patience_s)
        return len(text)

    def flush(self) -> None:
        """Queue a line that has no end yet; does not wait."""
        with self._lock:
            part, self._part = self._part, ""
        if part:
            self.writer.put(part, self._patience_s)


@contextlib.contextmanager
def unblocked_output(
    on_unprinted: OnError | None = None, patience_s: float = 0.0
) -> Iterator[LineWriter]:
    """Keep this process from blocking on its own output until the end of the block.

    Yields the writer of the standard error.

    Args:
        on_unprinted: called for each line of the standard output that could not be written.
        patience_s: see `LineStream`.
    """
    before = sys.stdout, sys.stderr
    writers = LineWriter(sys.stdout, on_unprinted), LineWriter(sys.stderr)
    for stream in before:
        if stream is not None:
            stream.flush()
    sys.stdout, sys.stderr = (LineStream(writer, patience_s) for writer in writers)
    try:
        yield writers[1]
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before
        _close(writers)


def flush_lines() -> None:
    """Wait up to `FLUSH_S` until the lines of all writers are written: before a hard exit."""
    until = time.monotonic() + FLUSH_S
    for writer in list(_writers):
        writer.flush(max(0.0, until - time.monotonic()))


_writers: weakref.WeakSet[LineWriter] = weakref.WeakSet()
_streams: weakref.WeakSet[LineStream] = weakref.WeakSet()
_finalizer: util.Finalize | None = None


def _close(writers: tuple[LineWriter, ...]) -> None:
    until = time.monotonic() + FLUSH_S
    for writer in writers:
        writer.close(max(0.0, until - time.monotonic()))


@functools.cache
def _register_hooks() -> None:
    os.register_at_fork(after_in_child=_renew_all)
    atexit.register(lambda: _close(tuple(_writers)))


def _flush_before_hard_exit() -> None:
    """Processes of multiprocessing may end without the handlers of `atexit`. One call flushes all
    writers; a forked child has none of its parent's."""
    global _finalizer
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return
    from multiprocessing import util

    if _finalizer is None or not _finalizer.still_active():
        _finalizer = util.Finalize(None, flush_lines, exitpriority=0)


def _renew_all() -> None:
    for writer in list(_writers):
        writer.renew_after_fork()
    for stream in list(_streams):
        stream.renew_after_fork()


def _descriptor_of(stream: TextIO) -> int | None:
    """The descriptor of an ordinary stream; None: the program has its own kind of stream."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        return stream.fileno()
    except OSError:  # it is in memory
        return None


def _encoded(text: str, stream: TextIO) -> bytes:
    return text.encode(stream.encoding or "utf-8", "backslashreplace")


def _await_ready(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
