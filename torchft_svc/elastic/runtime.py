"""The worker API: which world this worker is in, and whether that has changed.

    info = get_worker_info()
    dist.init_process_group("gloo", **info.get_pg_parameters())
    ...
        if world_changed():  # in every step
            dist.destroy_process_group()
            info = get_worker_info()

or `init_world`, which does all of this, and tries again where a world breaks while it is formed. A
process group that is formed so is broken when one of its workers is lost: collectives fail, instead
of waiting for a worker that may be frozen.

Under ``torchft-run`` with a soft restart policy the agent tells it over a `Channel`; under plain
torchrun the answers come from the environment and never change. The first call of any function here
tells the agent that the worker has started: call it when the expensive initialization is done.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchft_svc.elastic.channel import Channel, FileChannel
from torchft_svc.elastic.messages import (
    AgentMessage,
    EndNotice,
    WorkerAck,
    WorkerEvent,
    WorkerInfo,
    WorkerLeft,
    WorkerStarted,
    WorkerState,
    WorldChangeEvent,
    agent_message,
    check_ranks,
)
from torchft_svc.env import Environment, TorchrunWorker, tell_worker
from torchft_svc.errors import (
    ChannelClosed,
    ConfigError,
    DeadlineExceeded,
    PeerError,
    RequestRefused,
    WorkerEnding,
    WorldSuperseded,
)

if TYPE_CHECKING:
    from torchft_svc.elastic.world_group import WorldGroup

__all__ = [
    "WorkerEvent",
    "WorkerInfo",
    "WorkerState",
    "WorldChangeEvent",
    "ack_worker_event",
    "get_worker_event",
    "get_worker_info",
    "init_world",
    "leave_world",
    "on_worker_event",
    "wait_for_worker_event",
    "world_changed",
]

logger = logging.getLogger(__name__)

# The agent sends the first event before it starts the worker.
_FIRST_EVENT_TIMEOUT_S = 60.0
# The agent gives up earlier, and ends the worker: torchrun waits 600 s for a rendezvous.
WORLD_TIMEOUT_S = 1800.0
# A worker that cannot form a group for a reason of its own must not have everybody try for ever.
MAX_FAILURES = 10


def get_worker_event() -> WorkerEvent:
    """The newest event; never waits for another one.

    Raises:
        ConfigError: this process was started neither by torchft-run nor by torchrun.
        ChannelClosed: the agent has ended.
    """
    return _worker().event()


def get_worker_info(timeout_s: float = WORLD_TIMEOUT_S) -> WorkerInfo:
    """This worker's place in the world to work in now.

    Waits for a complete world while the newest event is PAUSED, and also if this worker has left
    the present one, because it has destroyed its process group or called `leave_world`: a peer's
    death breaks connections before the agent can tell it.

    Raises:
        WorkerEnding: there will be none, as the agent ends this worker: end soon.
        DeadlineExceeded: there is none within ``timeout_s``.
        ConfigError, ChannelClosed: see `get_worker_event`.
    """
    return _worker().info(timeout_s)


def wait_for_worker_event(timeout_s: float | None = None) -> WorkerEvent | None:
    """The newest event, once it is another one than this process was told last; None: timeout.

    Raises:
        WorkerEnding: there will be none, as the agent ends this worker: end soon.
        ConfigError, ChannelClosed: see `get_worker_event`.
    """
    return _worker().wait(timeout_s)


def world_changed() -> bool:
    """Whether there is an event that no function here has returned yet, or the agent has ended.

    Takes less than a microsecond.
    """
    worker = _present
    return (worker or _worker()).changed


def ack_worker_event() -> None:
    """Tell the agent that this worker goes on with the event that it was told last.

    `WorkerInfo.get_pg_parameters` does so, too. A worker that has not within
    ``--soft-ready-timeout`` is treated as failed.
    """
    _worker().ack()


def on_worker_event(call: Callable[[WorkerEvent], object]) -> None:
    """Call ``call`` with every event that comes from now on, on another thread.

    For what has to be done while the main thread is in a collective. It has returned before any
    function here tells the event, so it never meets the process group of the next world. Under
    plain torchrun there are no events.
    """
    _worker().on_event(call)


def init_world(
    backend: str | None = None, *, timeout_s: float = 1800.0, **options: Any
) -> WorkerInfo:
    """Leave the process group of the last world, and form that of the newest one.

    ``backend``, ``timeout_s`` (of its operations) and ``options`` are those of
    ``init_process_group``. Tries again with the next world while one breaks before it is formed.

    Raises:
        PeerError, RuntimeError: `MAX_FAILURES` worlds were not formed.
        DeadlineExceeded: there is no world within `WORLD_TIMEOUT_S`.
        WorkerEnding: see `get_worker_info`.
        ConfigError, ChannelClosed: see `get_worker_event`.
    """
    from torchft_svc.elastic import world_group  # it imports torch

    failures = 0
    while True:
        world_group.leave()
        info = get_worker_info()
        forming_s = min(timeout_s, world_group.FORMING_TIMEOUT_S)
        try:
            world_group.form(backend, info, forming_s, options)
        except (PeerError, RuntimeError) as error:  # torch's are runtime errors
            failures += 1
            if failures == MAX_FAILURES or not _worker().is_told_of_worlds:
                raise
            logger.warning("world %d was not formed, waiting for the next: %s", info.round, error)
            continue
        world_group.set_timeout(timeout_s)
        return info


def leave_world() -> None:
    """Destroy the process group, if there is one, also while its peers are dead or frozen.

    `get_worker_info` waits for the world after that of the group, or, if none was formed, after
    the one that this worker was told of.
    """
    from torchft_svc.elastic import world_group  # it imports torch

    _worker().leave()
    world_group.leave()


def pg_parameters(info: WorkerInfo) -> dict[str, Any]:
    """See `WorkerInfo.get_pg_parameters`."""
    return _worker().pg_parameters(info)


def use_channel(channel: Channel | None) -> None:
    """Receive events from ``channel`` instead of the agent's directory; None: forget everything."""
    global _present
    with _lock:
        before, _present = _present, None if channel is None else _ChannelWorker(channel)
    if before is not None:
        before.close()


class _Worker(Protocol):
    changed: bool
    is_told_of_worlds: bool

    def event(self) -> WorkerEvent: ...
    def info(self, timeout_s: float) -> WorkerInfo: ...
    def wait(self, timeout_s: float | None) -> WorkerEvent | None: ...
    def ack(self) -> None: ...
    def leave(self) -> None: ...
    def on_event(self, call: Callable[[WorkerEvent], object]) -> None: ...
    def pg_parameters(self, info: WorkerInfo) -> dict[str, Any]: ...
    def close(self) -> None: ...


class _ChannelWorker:
    """What the agent tells over ``channel``: a thread receives it, and any thread may ask."""

    is_told_of_worlds = True

    def __init__(self, channel: Channel, *, speaks: bool = True) -> None:
        self._channel = channel
        self._speaks = speaks
        self._news = threading.Condition()
        self._error: ChannelClosed | None = None
        self._ending: WorkerEnding | None = None
        self._told: WorkerEvent | None = None  # what a caller was told last
        self._group: WorldGroup | None = None
        self._left_round: int | None = None  # the newest that this worker has left
        self._calls: list[Callable[[WorkerEvent], object]] = []
        self._newest = self._first_event()
        self.changed = False
        self._send(WorkerStarted(os.getpid()))
        threading.Thread(target=self._receive, name="torchft-worker-events", daemon=True).start()

    def event(self) -> WorkerEvent:
        with self._news:
            return self._tell()

    def info(self, timeout_s: float) -> WorkerInfo:
        with self._news:
            left = self._newest.worker_info.round if self._has_left() else None
        if left is not None:
            self._send(WorkerLeft(left))
        with self._news:
            if not self._news.wait_for(self._is_settled, _wait_s(timeout_s)):
                raise DeadlineExceeded("waiting for a world", timeout_s)
            self._check_ending()
            return self._tell().worker_info

    def wait(self, timeout_s: float | None) -> WorkerEvent | None:
        with self._news:
            if not self._news.wait_for(lambda: self.changed or self._ending, _wait_s(timeout_s)):
                return None
            self._check_ending()
            return self._tell()

    def ack(self) -> None:
        with self._news:
            event = self._told or self._tell()
        self._send(WorkerAck(event.worker_info.round, event.worker_state))

    def leave(self) -> None:
        with self._news:
            group, told = self._group, self._told
            if group is not None:  # it may have been told of the next world already
                self._left_round = group.round
            else:
                self._left_round = None if told is None else told.worker_info.round
        if group is not None:
            group.cut()  # else what has not ended by itself would be waited for

    def on_event(self, call: Callable[[WorkerEvent], object]) -> None:
        self._calls.append(call)

    def pg_parameters(self, info: WorkerInfo) -> dict[str, Any]:
        from torchft_svc.elastic import world_group  # it imports torch

        world_group.handle(_begin_group)
        tell_worker(_torchrun_worker(info), info.round)
        self._send(WorkerAck(info.round))
        return {
            "init_method": world_group.url(info),
            "rank": info.rank,
            "world_size": info.world_size,
        }

    def begin_group(self, round_: int) -> WorldGroup:
        """The process group of ``round_``, which is about to be formed.

        Raises:
            WorldSuperseded: that is not the world to work in.
        """
        from torchft_svc.elastic.world_group import WorldGroup  # it imports torch

        with self._news:
            reason = self._why_superseded(round_)
            if not reason and self._group is not None and self._group.round == round_:
                reason = "it had one, which was destroyed; get_worker_info() waits for the next"
            if reason:
                raise WorldSuperseded(round_, reason)
            if self._group is not None:
                self._group.end_forming()
            self._group = WorldGroup(round_)
            return self._group

    def close(self) -> None:
        self._channel.close()

    def _has_left(self) -> bool:
        """Whether this worker has left the newest world already."""
        newest, group = self._newest.worker_info.round, self._group
        if group is not None and group.round == newest and group.is_over():
            self._left_round = newest
        return self._left_round == newest

    def _is_settled(self) -> bool:
        is_complete = self._newest.worker_state is WorkerState.HEALTHY
        is_left = self._newest.worker_info.round == self._left_round
        is_over = self._error is not None or self._ending is not None
        return is_over or (is_complete and not is_left)

    def _why_superseded(self, round_: int) -> str:
        if self._error is not None:
            return str(self._error)
        if self._ending is not None:
            return str(self._ending)
        newest = self._newest
        if newest.worker_info.round != round_:
            return f"world {newest.worker_info.round} has replaced it"
        return "" if newest.worker_state is WorkerState.HEALTHY else "another one replaces it"

    def _check_ending(self) -> None:
        if self._ending is not None:
            raise self._ending

    def _tell(self) -> WorkerEvent:
        if self._error is not None:
            raise self._error
        self._told = self._newest
        self.changed = False
        return self._newest

    def _first_event(self) -> WorkerEvent:
        deadline = time.monotonic() + _FIRST_EVENT_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            told = self._next(left_s)
            if isinstance(told, WorkerEvent):
                return told
        raise DeadlineExceeded("waiting for the first event", _FIRST_EVENT_TIMEOUT_S)

    def _receive(self) -> None:
        try:
            while True:
                told = self._next(None)
                if isinstance(told, WorkerEvent):
                    self._take(told)
                elif told is not None:
                    self._note_ending(told)
        except ChannelClosed as error:
            with self._news:
                self._error = error
            self._notify(is_broken=True)

    def _next(self, timeout_s: float | None) -> AgentMessage | None:
        message = self._channel.receive(timeout_s)
        try:
            return None if message is None else agent_message(message)
        except RequestRefused as error:
            logger.warning("ignoring a message of the agent: %s", error)
            return None

    def _note_ending(self, notice: EndNotice) -> None:
        """Ends waits for a world; a step is not disturbed: a worker may end after it, in order."""
        with self._news:
            self._ending = WorkerEnding(notice.reason)
            self._news.notify_all()
        self._supersede(is_broken=False)

    def _take(self, event: WorkerEvent) -> None:
        for call in list(self._calls):
            try:
                call(event)
            except Exception:  # the user's code must not end this thread
                logger.exception("a callback for worker events failed")
        with self._news:
            self._newest = event
        self._notify(is_broken=event.change_event is WorldChangeEvent.SCALE_DOWN)

    def _notify(self, *, is_broken: bool) -> None:
        with self._news:
            self.changed = True
            self._news.notify_all()
        self._supersede(is_broken=is_broken)

    def _supersede(self, *, is_broken: bool) -> None:
        with self._news:
            group = self._group
            reason = "" if group is None else self._why_superseded(group.round)
        if group is not None and reason:
            group.supersede(reason, is_broken=is_broken)

    def _send(self, message: WorkerStarted | WorkerAck | WorkerLeft) -> None:
        if self._speaks:
            self._channel.send(message.to_message())


class _TorchrunWorker:
    """What torchrun has told in the environment, once and for all."""

    changed = False
    is_told_of_worlds = False

    def __init__(self, environment: Environment) -> None:
        info = WorkerInfo(**asdict(environment.torchrun_worker()))
        try:
            check_ranks(info)
        except RequestRefused as error:
            raise ConfigError("WORLD_SIZE", info.world_size, str(error)) from None
        self._event = WorkerEvent(int(time.time()), info, WorkerState.HEALTHY)

    def event(self) -> WorkerEvent:
        return self._event

    def info(self, timeout_s: float) -> WorkerInfo:
        return self._event.worker_info

    def wait(self, timeout_s: float | None) -> WorkerEvent | None:
        """There will be none."""
        time.sleep(threading.TIMEOUT_MAX if timeout_s is None else max(0.0, timeout_s))
        return None

    def ack(self) -> None:
        """Nobody waits for it."""

    def leave(self) -> None:
        """There is no other world."""

    def on_event(self, call: Callable[[WorkerEvent], object]) -> None:
        """There will be none."""

    def pg_parameters(self, info: WorkerInfo) -> dict[str, Any]:
        return {"init_method": "env://", "rank": info.rank, "world_size": info.world_size}

    def close(self) -> None:
        """Nothing is open."""


_lock = threading.Lock()
_present: _Worker | None = None
_speaks = True


def _worker() -> _Worker:
    global _present
    with _lock:
        if _present is None:
            _present = _open(Environment())
        return _present


def _begin_group(round_: int) -> WorldGroup:
    worker = _worker()
    assert isinstance(worker, _ChannelWorker), "only its worlds have such a group"
    return worker.begin_group(round_)


def _forget() -> None:
    """In a forked child, which has no thread, and must not speak for its parent."""
    global _present, _lock, _speaks
    _lock = threading.Lock()
    _speaks = _speaks and _present is None
    _present = None


os.register_at_fork(after_in_child=_forget)


def _open(environment: Environment) -> _Worker:
    directory = environment.worker_channel
    if directory is not None:
        return _ChannelWorker(FileChannel.open(Path(directory)), speaks=_speaks)
    return _TorchrunWorker(environment)


def _torchrun_worker(info: WorkerInfo) -> TorchrunWorker:
    values = asdict(info)
    del values["round"]
    return TorchrunWorker(**values)


def _wait_s(timeout_s: float | None) -> float | None:
    """What a condition can wait."""
    if timeout_s is None or math.isinf(timeout_s):
        return None
    return min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
