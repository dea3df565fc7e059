"""Messages between an agent and one of its workers: JSON files in a directory of their own.

`Channel` is the seam; `FileChannel` keeps its promises on any local file system. The agent creates
the directory and removes it:

    torchft-elastic-x7/            of an agent, which holds a lock on it (`ChannelRoot`)
        0-1/                       of its local rank 0, started for the second time
            agent                  the agent's process id
            to_worker/0000000001.json
            to_agent/0000000001.json

A message is written beside these directories and then linked under its number, so a reader finds
whole messages only, and two writers never use one number. A reader removes nothing: one that
restarts finds the newest messages again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import select
import shutil
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torchft_svc.elastic.inotify import DirectoryWatch
from torchft_svc.errors import ChannelClosed, RequestRefused
from torchft_svc.host.process_end import ProcessEnd

logger = logging.getLogger(__name__)

Message = dict[str, Any]

# The design's bound; an event has less than 1 KiB.
MAX_MESSAGE_BYTES = 1 << 20
# Each message replaces the one before, so only a reader's curiosity needs the older ones.
KEPT_MESSAGES = 64
# Without inotify, a reader looks this often: far less than a new process group takes.
POLL_S = 0.05

_PREFIX = "torchft-elastic-"
_AGENT = "agent"
_TO_WORKER, _TO_AGENT = "to_worker", "to_agent"
_NAME = re.compile(r"([0-8]\d{9})\.json")
_CLOSED = "this end was closed"


class Channel(Protocol):
    """One end of a channel; both ends send and receive, each on any thread.

    Messages arrive whole, in order, and at most once at this end. One that is sent before the
    receiver exists waits for it. A receiver that is far behind may miss the oldest ones.
    """

    def send(self, message: Message) -> None:
        """Returns without waiting for the receiver.

        Raises:
            RequestRefused: it is no JSON, or has more than `MAX_MESSAGE_BYTES`.
            ChannelClosed: this end, or the whole channel, was closed.
        """

    def receive(self, timeout_s: float | None) -> Message | None:
        """The next message; None: there was none within ``timeout_s`` (None: wait forever).

        Raises:
            ChannelClosed: this end was closed, also while it waits; or the other end is gone, and
                all that it had sent was received.
        """

    def fileno(self) -> int | None:
        """Descriptor that is readable when there may be a message; None: call `receive` to know."""

    def close(self) -> None:
        """May be called twice, and while another thread receives."""


class FileChannel:
    """A channel in ``directory``: see `create` for the agent's end, `open` for the worker's.

    What is no message in there is skipped with a warning.
    """

    def __init__(self, directory: Path, *, owner: bool) -> None:
        self.directory = directory
        self._owner = owner
        self._outbox = directory / (_TO_WORKER if owner else _TO_AGENT)
        self._inbox = directory / (_TO_AGENT if owner else _TO_WORKER)
        self._lock = threading.Lock()
        self._received = 0
        self._pending: deque[int] = deque()
        self._refused: set[str] = set()  # what was warned of
        self._closed = False
        self._receivers = 0  # threads in `receive`; the last one of a closed end frees it
        self._agent = None if owner else _agent_of(directory)
        self._watch = DirectoryWatch(self._inbox)
        self._wakes, self._wake = os.pipe()  # what is written to the second one wakes receivers

    @classmethod
    def create(cls, directory: Path) -> FileChannel:
        """The agent's end; ``directory`` is created, and removed by `close`."""
        directory.mkdir(mode=0o700)
        (directory / _AGENT).write_text(str(os.getpid()))
        for box in (_TO_WORKER, _TO_AGENT):
            (directory / box).mkdir(mode=0o700)
        return cls(directory, owner=True)

    @classmethod
    def open(cls, directory: Path) -> FileChannel:
        """The worker's end, which may be opened late, several times, and again after a restart.

        Raises:
            ChannelClosed: there is no channel, or its agent has removed it.
        """
        if not (directory / _TO_WORKER).is_dir() or not (directory / _TO_AGENT).is_dir():
            raise ChannelClosed(str(directory), "there is no channel; its agent has ended")
        return cls(directory, owner=False)

    def send(self, message: Message) -> None:
        try:
            data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RequestRefused(f"a message to {self._outbox} is no JSON: {error}") from None
        if len(data) > MAX_MESSAGE_BYTES:
            raise RequestRefused(
                f"a message to {self._outbox} has {len(data)} bytes, may have {MAX_MESSAGE_BYTES}"
            )
        with self._lock:
            if self._closed:
                raise ChannelClosed(str(self.directory), _CLOSED)
            try:
                self._publish(data)
            except OSError as error:
                raise ChannelClosed(str(self.directory), str(error)) from error

    def receive(self, timeout_s: float | None) -> Message | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._receiving():
            while True:
                gone = self._why_gone()  # asked first: what was sent before is there
                message = self._next()
                if message is not None:
                    return message
                if gone:
                    raise ChannelClosed(str(self.directory), gone)
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                self._wait(left_s)

    def fileno(self) -> int | None:
        return self._watch.fileno()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.write(self._wake, b"!")  # a forked child may have it open, too
            if not self._receivers:
                self._free()
        if self._owner:
            shutil.rmtree(self.directory, ignore_errors=True)

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ChannelClosed(str(self.directory), _CLOSED)
            self._receivers += 1
        try:
            yield
        finally:
            with self._lock:
                self._receivers -= 1
                if self._closed and not self._receivers:
                    self._free()

    def _free(self) -> None:
        self._watch.close()
        if self._agent is not None:
            self._agent.close()
        os.close(self._wakes)
        os.close(self._wake)

    def _publish(self, data: bytes) -> None:
        draft = self.directory / f"draft-{os.getpid()}-{threading.get_ident()}"
        try:
            draft.write_bytes(data)
            numbers = sorted(self._numbers(self._outbox), reverse=True)
            number = next(filter(self._is_message, numbers), 0) + 1  # garbage counts for nothing
            while not _link(draft, self._outbox / f"{number:010}.json"):
                number += 1  # another process of this worker was faster
        finally:
            draft.unlink(missing_ok=True)
        for old in numbers:
            if old <= number - KEPT_MESSAGES:
                with contextlib.suppress(OSError):
                    (self._outbox / f"{old:010}.json").unlink()

    def _is_message(self, number: int) -> bool:
        try:
            _load(self._outbox / f"{number:010}.json")
        except (OSError, ValueError, RecursionError):
            return False
        return True

    def _next(self) -> Message | None:
        with self._lock:
            if not self._pending:
                self._watch.clear()  # before looking, so that nothing is missed
                try:
                    found = self._numbers(self._inbox, warn=True)
                except OSError:
                    return None
                self._pending.extend(sorted(each for each in found if each > self._received))
            while self._pending:
                number = self._pending.popleft()
                message = self._read(self._inbox / f"{number:010}.json")
                if message is not None:  # garbage must not hide what comes after it
                    self._received = number
                    return message
        return None

    def _read(self, path: Path) -> Message | None:
        if path.name in self._refused:
            return None
        try:
            message = _load(path)
        except FileNotFoundError:  # this reader is late: its writer has removed it
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._refuse(path.name, f"it is no message: {error}")
            return None
        return message

    def _numbers(self, box: Path, *, warn: bool = False) -> list[int]:
        found = []
        for name in os.listdir(box):
            match = _NAME.fullmatch(name)
            if match:
                found.append(int(match[1]))
            elif warn:
                self._refuse(name, "it has no name of a message")
        return found

    def _refuse(self, name: str, reason: str) -> None:
        if name not in self._refused and len(self._refused) < KEPT_MESSAGES:
            self._refused.add(name)
            logger.warning("ignoring %s in %s: %s", name[:100], self._inbox, reason)

    def _why_gone(self) -> str:
        if self._closed:
            return _CLOSED
        if self._agent is not None and self._agent.has_ended():
            return "its agent has ended"
        return "" if self._inbox.is_dir() else "its directory was removed"

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until there may be something new."""
        descriptors = [self._watch.fileno(), self._wakes]
        if self._agent is not None:
            descriptors.append(self._agent.descriptor)
        if None in descriptors:
            timeout_s = POLL_S if timeout_s is None else min(timeout_s, POLL_S)
        _wait_for([each for each in descriptors if each is not None], timeout_s)


class ChannelRoot:
    """The directory with all channels of an agent, which no other agent uses; a context manager.

    Those that agents have left behind, because they were killed, are removed.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(parent)
        lock = None
        while lock is None:  # another agent that starts may remove it before it is locked
            self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            lock = _lock(self.directory)
        self._lock: int | None = lock

    def __enter__(self) -> ChannelRoot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def channel(self, local_rank: int, attempt: int) -> FileChannel:
        """A new channel, to the worker that is started for the ``attempt``-th time."""
        return FileChannel.create(self.directory / f"{local_rank}-{attempt}")

    def close(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_abandoned(parent: Path) -> None:
    """Remove what agents of this user have left in ``parent``: nobody holds the lock any more.

    A process id would not do as a lock: containers may share ``parent``.
    """
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid != os.getuid():
                continue
            lock = _lock(directory)
            if lock is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)


def _lock(directory: Path) -> int | None:
    """Held until the descriptor is closed; None: somebody else has it, or has removed it.

    Services that clean temporary directories leave alone what is locked so.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if directory.exists():
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _link(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    return True


def _load(path: Path) -> Message:
    """Raises OSError or ValueError if there is something else than a message."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(MAX_MESSAGE_BYTES + 1)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"it has more than {MAX_MESSAGE_BYTES} bytes")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("it is no JSON object")
    return message


def _wait_for(descriptors: list[int], timeout_s: float | None) -> None:
    """Wait until one of ``descriptors`` is readable."""
    poll = select.poll()  # `select` cannot take descriptors above 1023, which trainers have
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))


def _agent_of(directory: Path) -> ProcessEnd | None:
    """The end of the process that made this channel; None: it is not known which that is.

    Raises:
        ChannelClosed: it has ended, and was waited for.
    """
    try:
        agent = ProcessEnd(int((directory / _AGENT).read_text()))
    except (OSError, ValueError):
        return None
    if agent.descriptor is None and agent.has_ended():
        raise ChannelClosed(str(directory), "its agent has ended")
    return agent
