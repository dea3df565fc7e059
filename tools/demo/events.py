"""Decides what is written down about a run: one JSON line for each thing that happened.

Every process writes its own file, so a killed writer can spoil at most the last line of its own.
Instants are ``time.monotonic()`` seconds, which all processes of one machine share.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to one incarnation (0, 1, ...) of a replica group.

    ``worker`` is the group rank of the worker that reports it.
    """

    group: int
    incarnation: int
    at: float
    worker: int = 0

    @property
    def life(self) -> tuple[int, int]:
        return self.group, self.incarnation


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(Event):
    """The process was started; ``at`` is the moment before it was."""

    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined(Event):
    """The trainer has its manager and asks for its first quorum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseBegan(Event):
    """The trainer entered ``phase`` of working on the update after ``step``.

    ``whole`` covers all that a group heals by, with what differs between groups; it is left out by
    who has no use.
    """

    step: int
    phase: str
    whole: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesRead(Event):
    """The worker has read its samples of the update after ``step``, and votes on that next.

    ``rank`` of ``num_participants`` is that of its group among those that contribute (None: it does
    not); ``indices`` are those in the data set, with spaces between, in epoch ``epoch``.
    """

    step: int
    quorum_id: int
    rank: int | None
    num_participants: int
    epoch: int
    indices: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed(Event):
    """Update number ``step`` was applied; ``digest`` covers parameters and optimizer state then.

    ``quorum_id`` and ``members``, the replica ids of that quorum, are left out by who has no use.
    """

    step: int
    loss: float
    digest: str
    num_participants: int
    participating: bool
    quorum_id: int = 0
    members: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Discarded(Event):
    """An update was given up; ``step`` and ``digest`` describe the state afterwards.

    ``reason`` is the first error of the step, if this worker saw one.
    """

    step: int
    digest: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Healed(Event):
    """Another group's state was put in place; the update after it is the next to be committed.

    ``step`` and ``whole``, as in `PhaseBegan`, describe the moment at which the groups are equal.
    """

    step: int = 0
    whole: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Event):
    """The trainer left by itself, after update ``step``."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Killed(Event):
    """SIGKILL was sent to the trainer; ``whole_group``: to its sidecar too, in the same instant."""

    whole_group: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SumFailed(Event):
    """A sum of the trainer failed because it was ordered to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exited(Event):
    """The process is gone; ``status`` is ``Popen.returncode``, ``expected``: on request."""

    status: int
    expected: bool


_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        *(Started, Joined, PhaseBegan, SamplesRead, Committed, Discarded),
        *(Healed, Finished, Killed, SumFailed, Exited),
    )
}
# What a trainer works on, in this order: ``record`` is all that follows the update until the next.
PHASES = ("forward", "backward", "commit", "record")


def encode(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def decode(line: str) -> Event:
    """The event of one line.

    Raises:
        ValueError: the line is not one that ``encode`` wrote.
    """
    try:
        fields: dict[str, Any] = json.loads(line)
        kind = _KINDS[fields.pop("event")]
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of an event log: {line!r}") from error


class EventLog:
    """Writes the events of one process, a line at a time, so that a kill loses nothing written."""

    def __init__(self, path: Path, group: int, incarnation: int, worker: int = 0) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._life = {"group": group, "incarnation": incarnation, "worker": worker}

    def write(self, kind: type[Event], **fields: object) -> None:
        event = kind(at=time.monotonic(), **self._life, **fields)  # type: ignore[arg-type]
        self._file.write(encode(event))

    def close(self) -> None:
        self._file.close()


class EventTail:
    """Reads a growing event log; a last line without its end is left for later, or for ever."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Event]:
        """The events written since the last call; none while the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [decode(line) for line in data[:end].decode("utf-8").splitlines()]
