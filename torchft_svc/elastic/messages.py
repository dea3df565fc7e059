"""Values and JSON: what a worker reports to its agent over a `Channel`, and how its agent ends it.

A worker reports that it has started (`WorkerStarted`), that it goes on with an event (`WorkerAck`),
and that it has left a world whose process group is broken (`WorkerLeft`). `EndNotice` is the last
message of an agent; those before are `WorkerEvent`, which stand with the worker API in `runtime`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from torchft_svc.core.launch.worker_events import WorkerState
from torchft_svc.errors import RequestRefused

if TYPE_CHECKING:
    from torchft_svc.elastic.channel import Message

_E = TypeVar("_E", bound=Enum)

_TEXT_LIMIT = 1024  # a host name has at most 255 characters
_NUMBER_LIMIT = 2**53  # what every JSON reader takes exactly


@dataclass(frozen=True)
class EndNotice:
    """The agent is about to end this worker, for ``reason``: there is no other world for it."""

    reason: str

    def to_message(self) -> Message:
        return {"type": "end", "reason": self.reason[:_TEXT_LIMIT]}


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
    """Parse a message of a worker.

    Raises:
        RequestRefused: it is none of the messages of a worker.
    """
    read = MessageFields(message)
    match message.get("type"):
        case "started":
            return WorkerStarted(read.number("pid"))
        case "ack":
            state = read.choice("worker_state", WorkerState)
            return WorkerAck(read.number("round"), state)
        case "left":
            return WorkerLeft(read.number("round"))
    raise RequestRefused(f"a worker's message has the type {message.get('type')!r}")


class MessageFields:
    """The fields of an object that another process has written, with their types checked."""

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
