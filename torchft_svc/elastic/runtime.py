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

Under ``torchft-run`` with a soft restart policy the agent sends it over a `Channel`; under plain
torchrun the answers come from the environment and never change. The first call of any function here
reports to the agent that the worker has started: call it when the expensive initialization is done.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchft_svc.core.launch.worker_events import WorkerState, WorldChangeEvent
from torchft_svc.elastic.channel import Channel, FileChannel, Message
from torchft_svc.elastic.messages import (
    EndNotice,
    MessageFields,
    WorkerAck,
    WorkerLeft,
    WorkerStarted,
)
from torchft_svc.env import Environment, TorchrunWorker, set_worker_variables
from torchft_svc.errors import (
    ChannelClosed,
    ConfigError,
    DeadlineExceeded,
    PeerError,
    RequestRefused,
    WorkerEnding,
    WorldSuperseded,
)
from torchft_svc.host.exit_verdict import give_verdicts
from torchft_svc.host.progress_file import ProgressFile, open_progress

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
    "report_progress",
    "wait_for_worker_event",
    "world_changed",
]

logger = logging.getLogger(__name__)

# The agent sends the first event before it starts the worker.
_FIRST_EVENT_TIMEOUT_S = 60.0
# The agent gives up earlier, and ends the worker: torchrun waits 600 s for a rendezvous.
WORLD_TIMEOUT_S = 1800.0
# A worker that cannot form a group for a reason of its own must not have all others try for ever.
MAX_FAILURES = 10


# -- what a worker receives --------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's place in the world of ``round``.

    ``local_*``: among the workers of its agent; ``role_*``: among those with its role.
    ``master_addr:master_port``: a store that no other world uses (port 0: none yet). ``round``
    grows with every world; it is 0 under plain torchrun, and before the first world.
    """

    local_rank: int
    role_rank: int
    rank: int
    local_world_size: int
    role_world_size: int
    world_size: int
    master_addr: str
    master_port: int
    round: int = 0

    def get_pg_parameters(self) -> dict[str, Any]:
        """Arguments of ``torch.distributed.init_process_group`` besides the backend.

        Reports to the agent that this worker has reached the world.
        """
        return _worker().pg_parameters(self)


@dataclass(frozen=True)
class WorkerEvent:
    """The world of a worker, or a pause before the next one.

    ``timestamp``: Unix seconds, of the agent's clock. ``change_event``: None for the first.
    """

    timestamp: int
    worker_info: WorkerInfo
    worker_state: WorkerState
    change_event: WorldChangeEvent | None = None

    def to_message(self) -> Message:
        return {
            "type": "event",
            "timestamp": self.timestamp,
            "worker_info": asdict(self.worker_info),
            "worker_state": self.worker_state.value,
            "change_event": None if self.change_event is None else self.change_event.value,
        }


AgentMessage = WorkerEvent | EndNotice


def agent_message(message: Message) -> AgentMessage:
    """Parse a message of an agent.

    Raises:
        RequestRefused: it is none of the messages of an agent, or its ranks contradict one another.
    """
    read = MessageFields(message)
    match message.get("type"):
        case "event":
            return _worker_event(message, read)
        case "end":
            return EndNotice(read.text("reason"))
    raise RequestRefused(f"an agent's message has the type {message.get('type')!r}")


def _worker_event(message: Message, read: MessageFields) -> WorkerEvent:
    described = message.get("worker_info")
    if not isinstance(described, dict):
        raise RequestRefused(f"an event has the worker_info {described!r}")
    info = MessageFields(described)
    numbers = {
        field.name: info.number(field.name)
        for field in fields(WorkerInfo)
        if field.name != "master_addr"
    }
    worker_info = WorkerInfo(master_addr=info.text("master_addr"), **numbers)
    check_ranks(worker_info)
    change = message.get("change_event")
    return WorkerEvent(
        timestamp=read.number("timestamp"),
        worker_info=worker_info,
        worker_state=read.choice("worker_state", WorkerState),
        change_event=None if change is None else read.choice("change_event", WorldChangeEvent),
    )


def check_ranks(info: WorkerInfo) -> None:
    """Raise `RequestRefused` if a rank is not below its world size, or a port is none."""
    for rank, size in (
        ("local_rank", "local_world_size"),
        ("role_rank", "role_world_size"),
        ("rank", "world_size"),
    ):
        if not getattr(info, rank) < getattr(info, size):
            raise RequestRefused(
                f"{rank} is {getattr(info, rank)}, but {size} is {getattr(info, size)}"
            )
    if info.master_port > 65535:
        raise RequestRefused(f"master_port is {info.master_port}, must be 0 to 65535")


# -- the worker API ----------------------------------------------------------------------------


def get_worker_event() -> WorkerEvent:
    """The newest event; never waits for another one.

    Raises:
        ConfigError: this process was started neither by torchft-run nor by torchrun.
        ChannelClosed: the agent has ended.
        WorkerEnding: there is no event, as the agent ends this worker: end soon.
    """
    return _worker().event()


def get_worker_info(timeout_s: float = WORLD_TIMEOUT_S) -> WorkerInfo:
    """This worker's place in the world to work in now.

    Waits for a complete world while the newest event is PAUSED, and also if this worker has left
    the present one, because it has destroyed its process group or called `leave_world`: a peer's
    death breaks connections before the agent can report it.

    Raises:
        WorkerEnding: there will be none, as the agent ends this worker: end soon.
        DeadlineExceeded: there is none within ``timeout_s``.
        ConfigError, ChannelClosed: see `get_worker_event`.
    """
    return _worker().info(timeout_s)


def wait_for_worker_event(timeout_s: float | None = None) -> WorkerEvent | None:
    """The newest event, once no function here has returned it yet; None: timeout.

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
    """Report to the agent that this worker goes on with the event that it received last.

    `WorkerInfo.get_pg_parameters` does so, too. A worker that has not within
    ``--soft-ready-timeout`` is treated as failed.
    """
    _worker().ack()


def report_progress(step: int) -> None:
    """Record that this worker has finished step ``step``, for the agent that restarts it.

    For programs without a `Manager`, which does so itself. Costs less than a microsecond; without
    an agent of ours it does nothing. From the first call on, an uncaught error that a restart
    cannot mend, such as one that comes twice from one line at one step, ends the run.

    Raises:
        ConfigError: a variable of the environment cannot work.
    """
    global _progress
    if _progress is None:
        give_verdicts()
        _progress = open_progress(Environment().progress_file)
    _progress.record_step(step)


_progress: ProgressFile | None = None


def on_worker_event(call: Callable[[WorkerEvent], object]) -> None:
    """Call ``call`` with every event that comes from now on, on another thread.

    For what has to be done while the main thread is in a collective. It has returned before any
    function here returns the event, so it never meets the process group of the next world. Under
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
            world_group.form(backend, info.get_pg_parameters(), forming_s, options)
        except (PeerError, RuntimeError) as error:  # torch's are runtime errors
            failures += 1
            if failures == MAX_FAILURES or not _worker().receives_worlds:
                raise
            logger.warning("world %d was not formed, waiting for the next: %s", info.round, error)
            continue
        world_group.set_timeout(timeout_s)
        return info


def leave_world() -> None:
    """Destroy the process group, if there is one, also while its peers are dead or frozen.

    `get_worker_info` waits for the world after that of the group, or, if none was formed, after
    the one that this worker has received.
    """
    from torchft_svc.elastic import world_group  # it imports torch

    _worker().leave()
    world_group.leave()


def use_channel(channel: Channel | None) -> None:
    """Receive events from ``channel`` instead of the agent's directory; None: forget everything."""
    global _present
    with _lock:
        before, _present = _present, None if channel is None else _ChannelWorker(channel)
    if before is not None:
        before.close()


class _Worker(Protocol):
    changed: bool
    receives_worlds: bool

    def event(self) -> WorkerEvent: ...
    def info(self, timeout_s: float) -> WorkerInfo: ...
    def wait(self, timeout_s: float | None) -> WorkerEvent | None: ...
    def ack(self) -> None: ...
    def leave(self) -> None: ...
    def on_event(self, call: Callable[[WorkerEvent], object]) -> None: ...
    def pg_parameters(self, info: WorkerInfo) -> dict[str, Any]: ...
    def close(self) -> None: ...


class _ChannelWorker:
    """A worker whose agent sends events over ``channel``; a thread receives them."""

    receives_worlds = True

    def __init__(self, channel: Channel, *, sends: bool = True) -> None:
        self._channel = channel
        self._sends = sends
        self._news = threading.Condition()
        self._error: ChannelClosed | None = None
        self._ending: WorkerEnding | None = None
        self._returned: WorkerEvent | None = None  # the event that a caller has received last
        self._group: WorldGroup | None = None
        self._left_round: int | None = None  # the newest that this worker has left
        self._calls: list[Callable[[WorkerEvent], object]] = []
        try:
            self._newest = self._first_event()
        except BaseException:
            channel.close()
            raise
        self.changed = False
        self._send(WorkerStarted(os.getpid()))
        threading.Thread(target=self._receive, name="torchft-worker-events", daemon=True).start()

    def event(self) -> WorkerEvent:
        with self._news:
            return self._return_newest()

    def info(self, timeout_s: float) -> WorkerInfo:
        with self._news:
            left = self._newest.worker_info.round if self._has_left() else None
        if left is not None:
            self._send(WorkerLeft(left))
        with self._news:
            if not self._news.wait_for(self._is_settled, _wait_s(timeout_s)):
                raise DeadlineExceeded("waiting for a world", timeout_s)
            self._check_ending()
            return self._return_newest().worker_info

    def wait(self, timeout_s: float | None) -> WorkerEvent | None:
        with self._news:
            if not self._news.wait_for(lambda: self.changed or self._ending, _wait_s(timeout_s)):
                return None
            self._check_ending()
            return self._return_newest()

    def ack(self) -> None:
        with self._news:
            event = self._returned or self._return_newest()
        self._send(WorkerAck(event.worker_info.round, event.worker_state))

    def leave(self) -> None:
        with self._news:
            group, event = self._group, self._returned
            if group is not None:  # its program may have received the next world already
                self._left_round = group.round
            else:
                self._left_round = None if event is None else event.worker_info.round
        if group is not None:
            group.cut()  # else what has not ended by itself would be waited for

    def on_event(self, call: Callable[[WorkerEvent], object]) -> None:
        self._calls.append(call)

    def pg_parameters(self, info: WorkerInfo) -> dict[str, Any]:
        from torchft_svc.elastic import world_group  # it imports torch

        world_group.handle(_begin_group)
        set_worker_variables(_torchrun_worker(info), info.round)
        self._send(WorkerAck(info.round))
        return {
            "init_method": world_group.url(info.master_addr, info.master_port, info.round),
            "rank": info.rank,
            "world_size": info.world_size,
        }

    def begin_group(self, round_: int) -> WorldGroup:
        """Return the process group of ``round_``, which is about to be formed.

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

    def _return_newest(self) -> WorkerEvent:
        if self._error is not None:
            raise self._error
        self._returned = self._newest
        self.changed = False
        return self._newest

    def _first_event(self) -> WorkerEvent:
        deadline = time.monotonic() + _FIRST_EVENT_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            message = self._next(left_s)
            if isinstance(message, WorkerEvent):
                return message
            if message is not None:  # it is the last one: no event follows
                raise WorkerEnding(message.reason)
        raise DeadlineExceeded("waiting for the first event", _FIRST_EVENT_TIMEOUT_S)

    def _receive(self) -> None:
        try:
            while True:
                message = self._next(None)
                if isinstance(message, WorkerEvent):
                    self._accept_event(message)
                elif message is not None:
                    self._record_ending(message)
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

    def _record_ending(self, notice: EndNotice) -> None:
        """End waits for a world; a step is not disturbed, so that a worker may end after it."""
        with self._news:
            self._ending = WorkerEnding(notice.reason)
            self._news.notify_all()
        self._supersede(is_broken=False)

    def _accept_event(self, event: WorkerEvent) -> None:
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
        if self._sends:
            self._channel.send(message.to_message())


class _TorchrunWorker:
    """A worker of plain torchrun: its only event is in the environment."""

    changed = False
    receives_worlds = False

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
        """Wait for the timeout: there are no events."""
        time.sleep(threading.TIMEOUT_MAX if timeout_s is None else max(0.0, timeout_s))
        return None

    def ack(self) -> None:
        """Do nothing: no agent waits for it."""

    def leave(self) -> None:
        """Do nothing: there is no other world."""

    def on_event(self, call: Callable[[WorkerEvent], object]) -> None:
        """Do nothing: there are no events."""

    def pg_parameters(self, info: WorkerInfo) -> dict[str, Any]:
        return {"init_method": "env://", "rank": info.rank, "world_size": info.world_size}

    def close(self) -> None:
        """Do nothing: no channel is open."""


_lock = threading.Lock()
_present: _Worker | None = None
_sends = True


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
    """Forget the worker in a forked child: it has no thread, and must not send for its parent."""
    global _present, _lock, _sends
    _lock = threading.Lock()
    _sends = _sends and _present is None
    _present = None


os.register_at_fork(after_in_child=_forget)


def _open(environment: Environment) -> _Worker:
    directory = environment.worker_channel
    if directory is not None:
        return _ChannelWorker(FileChannel.open(Path(directory)), sends=_sends)
    return _TorchrunWorker(environment)


def _torchrun_worker(info: WorkerInfo) -> TorchrunWorker:
    values = asdict(info)
    del values["round"]
    return TorchrunWorker(**values)


def _wait_s(timeout_s: float | None) -> float | None:
    """How long a condition can wait."""
    if timeout_s is None or math.isinf(timeout_s):
        return None
    return min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
