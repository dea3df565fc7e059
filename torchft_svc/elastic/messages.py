"""What an agent and its workers tell one another over a `Channel`, as values and as JSON.

The agent tells `WorkerEvent`s, each of which replaces the one before, and at last that it ends this
worker (`EndNotice`). A worker tells that it has started (`WorkerStarted`), that it goes on with an
event (`WorkerAck`), and that it has left a world whose process group is broken (`WorkerLeft`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from torchft_svc.core.launch.agent import WorkerState as WorkerState
from torchft_svc.core.launch.agent import WorldChangeEvent as WorldChangeEvent
from torchft_svc.errors import RequestRefused

if TYPE_CHECKING:
    from torchft_svc.elastic.channel import Message

_E = TypeVar("_E", bound=Enum)

_TEXT_LIMIT = 1024  # a host name has at most 255 characters
_NUMBER_LIMIT = 2**53  # what every JSON reader takes exactly


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
        """What ``torch.distributed.init_process_group(**...)`` takes besides the backend.

        Tells the agent that this worker has reached the world. See
        `torchft_svc.elastic.runtime.pg_parameters`.
        """
        from torchft_svc.elastic import runtime  # it imports this module

        return runtime.pg_parameters(self)


@dataclass(frozen=True)
class WorkerEvent:
    """``timestamp``: Unix seconds, of the agent's clock. ``change_event``: None for the first."""

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


@dataclass(frozen=True)
class EndNotice:
    """The agent is about to end this worker, for ``reason``: there is no other world for it."""

    reason: str

    def to_message(self) -> Message:
        return {"type": "end", "reason": self.reason[:_TEXT_LIMIT]}


AgentMessage = WorkerEvent | EndNotice


@dataclass(frozen=True)
class WorkerStarted:
    """The worker has called the worker API for the first time, as process ``pid``."""

    pid: int

    def to_message(self) -> Message:
        return {"type": "started", "pid": self.pid}


@dataclass(frozen=True)
class WorkerAck:
    """The worker goes on with the event of ``round`` and ``worker_state``."""

    round: int
    worker_state: WorkerState = WorkerState.HEALTHY

    def to_message(self) -> Message:
        return {"type": "ack", "round": self.round, "worker_state": self.worker_state.value}


@dataclass(frozen=True)
class WorkerLeft:
    """The worker has destroyed the process group of ``round``, and needs another world.

    If nobody is lost, which the agents would notice themselves, only a new round helps.
    """

    round: int

    def to_message(self) -> Message:
        return {"type": "left", "round": self.round}


WorkerMessage = WorkerStarted | WorkerAck | WorkerLeft


def worker_message(message: Message) -> WorkerMessage:
    """What a worker has told its agent.

    Raises:
        RequestRefused: it is none of the messages of a worker.
    """
    read = _Fields(message)
    match message.get("type"):
        case "started":
            return WorkerStarted(read.number("pid"))
        case "ack":
            state = read.choice("worker_state", WorkerState)
            return WorkerAck(read.number("round"), state)
        case "left":
            return WorkerLeft(read.number("round"))
    raise RequestRefused(f"a worker's message has the type {message.get('type')!r}")


def agent_message(message: Message) -> AgentMessage:
    """What an agent has told its worker.

    Raises:
        RequestRefused: it is none of the messages of an agent, or its ranks contradict one another.
    """
    read = _Fields(message)
    match message.get("type"):
        case "event":
            return _worker_event(message, read)
        case "end":
            return EndNotice(read.text("reason"))
    raise RequestRefused(f"an agent's message has the type {message.get('type')!r}")


def _worker_event(message: Message, read: _Fields) -> WorkerEvent:
    told = message.get("worker_info")
    if not isinstance(told, dict):
        raise RequestRefused(f"an event has the worker_info {told!r}")
    info = _Fields(told)
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


class _Fields:
    """Typed reads of an object that another process has written."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, name: str) -> int:
        value = self._values.get(name)
        if type(value) is not int or not 0 <= value < _NUMBER_LIMIT:
            raise RequestRefused(f"{name} is {value!r}, must be a whole number, 0 or more")
        return value

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or len(value) > _TEXT_LIMIT:
            raise RequestRefused(f"{name} is no text of up to {_TEXT_LIMIT} characters")
        return value

    def choice(self, name: str, of: type[_E]) -> _E:
        try:
            return of(self._values.get(name))
        except ValueError:
            raise RequestRefused(f"{name} is {self._values.get(name)!r}") from None
