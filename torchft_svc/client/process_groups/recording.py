"""Records the collectives of each quorum, and writes those of a quorum that ended with an error.

The format is that of torch's analyzer: a file per quorum and member (rule P8). Torch records only
NCCL, and only with its watchdog. This module records every class of group.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.operations import HIDDEN_BY_GLOO, IN_PLACE, flat
from torchft_svc.errors import ConfigError

log = logging.getLogger(__name__)

# The format version of torch's analyzer, which rejects others.
FORMAT = "2.10"
SCHEDULED, STARTED, COMPLETED = "scheduled", "started", "completed"
_FAR: Mapping[str, str] = {SCHEDULED: "was not begun in", STARTED: "did not end in"}
# The analyzer's names. A receive from any source is left out: its sender is not known.
_NAMES: Mapping[str, str] = {
    "_allgather_base": "_all_gather_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "allgather": "all_gather",
    "allgather_coalesced": "ALLGATHER_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "recv": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "scatter": "scatter",
    "send": "send",
}
_BETWEEN_TWO = frozenset({"send", "recv"})
# One tensor per member; the analyzer expects one tensor of their total size.
_IN_PARTS = frozenset({"allgather", "alltoall", "gather", "reduce_scatter", "scatter"})

# Several steps of a large model: as many as torch's own recorder keeps.
NUM_RECORDS = 2000
# The newest quorums whose files are kept; a file of 2000 collectives has about 330 KB.
MAX_QUORUMS = 50
# If the disk is too slow for more writers at once, records are dropped.
_MAX_WRITERS = 2
_QUORUM = re.compile(r"quorum_(\d+)")

TensorType = tuple[torch.Size, torch.dtype]


@dataclass(slots=True)
class Record:
    """One collective of this member, and its last known state."""

    name: str
    place: int
    number: int
    peer: int | None
    inputs: list[TensorType]
    outputs: list[TensorType]
    state: str = SCHEDULED
    created_ns: int = field(default_factory=time.time_ns)
    ended_ns: int | None = None

    def end(self, failed: bool) -> None:
        """Record the end of the collective; the state of a failed one stays as it was."""
        if self.ended_ns is None:
            self.ended_ns = time.time_ns()
            self.state = self.state if failed else COMPLETED


class RecordedWork:
    """A work that updates its record in `is_completed`."""

    __slots__ = ("_has_failed", "_record", "_work")

    def __init__(self, work: Any, record: Record, has_failed: Callable[[Any], bool]) -> None:
        self._work = work
        self._record = record
        self._has_failed = has_failed
        record.state = STARTED

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        if self._record.ended_ns is None:
            self._record.end(self._has_failed(self._work))
        return True


class FlightLog:
    """The collectives of this member of one quorum: the last ``num_records`` of them.

    `launch` is not thread-safe. Point-to-point operations are numbered per pair of members, so that
    the analyzer does not expect them of the other members.
    """

    def __init__(self, members: Members, backend: str, num_records: int) -> None:
        self._members = members
        self._backend = backend
        self._records: deque[Record] = deque(maxlen=num_records)
        self._num_launched = 0
        self._num_with: dict[int, int] = {}

    def launch(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Record | None:
        """Record that collective ``name`` begins (see `operations`); None: it is not recorded."""
        if name not in _NAMES:
            return None
        given = [*args, *kwargs.values()]
        try:
            inputs, outputs = _ends(name, given)
            peer = int(given[1]) if name in _BETWEEN_TWO else None
        except (AttributeError, IndexError, TypeError, ValueError):
            return None  # torch rejects it as well, with a message
        if peer is None:
            self._num_launched = number = self._num_launched + 1
        else:
            number = self._num_with[peer] = self._num_with.get(peer, 0) + 1
        record = Record(name, self._num_launched, number, peer, inputs, outputs)
        self._records.append(record)
        return record

    def snapshot(self) -> FlightSnapshot:
        """The present state of all records."""
        return FlightSnapshot(self._members, self._backend, list(self._records))


# A record, its state, and when its end was noticed.
Seen = tuple[Record, str, "int | None"]


class FlightSnapshot:
    """A `FlightLog` at the moment when it was ended."""

    def __init__(self, members: Members, backend: str, records: list[Record]) -> None:
        self.members = members
        self._backend = backend
        self._at_ns = time.time_ns()
        self._group = f"quorum_{members.quorum_id}"
        # Copied: an abandoned operation may still end later.
        self._records: list[Seen] = [(record, record.state, record.ended_ns) for record in records]

    @property
    def is_complete(self) -> bool:
        """Whether every collective has succeeded, as far as is known."""
        return not self._open

    @property
    def _open(self) -> list[Seen]:
        return [seen for seen in self._records if seen[1] != COMPLETED and not self._hides(seen[0])]

    def _hides(self, record: Record) -> bool:
        return self._backend == "gloo" and record.name in HIDDEN_BY_GLOO

    def summary(self) -> str:
        """A short sentence on the first collective that did not succeed."""
        if not self._records:
            return "no collective was launched"
        if not self._open:
            return f"nothing is missing up to {self._words(self._records[-1][0])}"
        record, state, ended_ns = self._open[0]
        how = "failed after" if ended_ns else _FAR[state]
        took_s = ((ended_ns or self._at_ns) - record.created_ns) / 1e9
        return f"{self._words(record)} {how} {took_s:.3g} s"

    def _words(self, record: Record) -> str:
        to = "" if record.peer is None else f" with replica rank {record.peer}"
        at_ns = record.created_ns
        clock = time.strftime("%H:%M:%S", time.gmtime(at_ns / 1e9))
        launched = f"launched {clock}.{at_ns // 10**6 % 1000:03} UTC"
        return f"{_NAMES[record.name]} {record.number}{to} ({launched})"

    def as_trace(self, why: str) -> dict[str, Any]:
        """The analyzer's input, of builtin types only; ``why`` is a message."""
        return {
            "version": FORMAT,
            "replica_id": self.members.replica_id,
            "reason": why,
            "summary": self.summary(),
            "pg_config": dict(self._groups()),
            "entries": [self._entry(*seen) for seen in self._records],
        }

    def _groups(self) -> Iterator[tuple[str, dict[str, str]]]:
        everybody = list(range(self.members.world_size))
        yield self._group, self._config(self._group, everybody)
        for peer in {record.peer for record, _, _ in self._records if record.peer is not None}:
            name = self._pair(peer)
            yield name, self._config(name, sorted({self.members.rank, peer}))

    def _config(self, name: str, ranks: list[int]) -> dict[str, str]:
        return {"name": name, "desc": self._description, "ranks": str(ranks)}

    @property
    def _description(self) -> str:
        return f"group rank {self.members.group_rank or 0}"

    def _pair(self, peer: int) -> str:
        low, high = sorted((self.members.rank, peer))
        return f"{self._group}_{low}_{high}"

    def _entry(self, record: Record, state: str, ended_ns: int | None) -> dict[str, Any]:
        joins = record.name in _IN_PARTS
        return {
            "record_id": record.place,
            "pg_id": 0,
            "process_group": (
                self._group if record.peer is None else self._pair(record.peer),
                self._description,
            ),
            "collective_seq_id": record.number,
            "p2p_seq_id": 0 if record.peer is None else record.number,
            "op_id": record.place,
            "profiling_name": f"{self._backend}:{self._profiling_name(record)}",
            "time_created_ns": record.created_ns,
            "time_discovered_completed_ns": ended_ns,
            "input_sizes": _sizes(record.inputs, joins),
            "input_dtypes": [_word(dtype) for _, dtype in record.inputs],
            "output_sizes": _sizes(record.outputs, joins),
            "output_dtypes": [_word(dtype) for _, dtype in record.outputs],
            "state": state,
            "retired": ended_ns is not None,
            "is_p2p": record.peer is not None,
            "frames": [],
        }

    def _profiling_name(self, record: Record) -> str:
        """The analyzer's name; with both ends, as indices in the pair, if it has a peer."""
        name, peer = _NAMES[record.name], record.peer
        if peer is None:
            return name
        mine, theirs = int(self.members.rank > peer), int(peer > self.members.rank)
        return f"{name} {mine}{'->' if name == 'send' else '<-'}{theirs}"


def _ends(name: str, given: Sequence[Any]) -> tuple[list[TensorType], list[TensorType]]:
    """The types of the inputs and of the outputs of collective ``name``."""
    if name == "barrier":
        return [], []
    first = _types(given[0])
    if name == "send":
        return first, []
    if name == "recv":
        return [], first
    return (first, first) if name in IN_PLACE else (_types(given[1]), first)


def _types(tensors: Any) -> list[TensorType]:
    return [(tensor.shape, tensor.dtype) for tensor in flat(tensors)]


def _sizes(types: list[TensorType], joins: bool) -> list[list[int]]:
    if joins and len(types) > 1:
        return [[sum(math.prod(shape) for shape, _ in types)]]
    return [list(shape) for shape, _ in types]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FlightRecorder:
    """Records the collectives of this process' groups, for `ProcessGroup.record_to`.

    Files are ``quorum_<id>/group_rank_<g>/rank_<replica rank>`` below ``directory``, which may be
    on a local disk: the names of one quorum's files are unique across machines. They are written
    on a thread, which logs its errors.

    Args:
        directory: of one job, because quorum ids are unique per job; created if missing.
        num_records: how many collectives of a quorum are kept, the newest ones.

    Raises:
        ConfigError: the directory cannot be made.
    """

    def __init__(self, directory: Path, num_records: int = NUM_RECORDS) -> None:
        if num_records < 1:
            raise ConfigError("num_records", num_records, "use 1 or more")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("flight_recorder", str(directory), f"no directory: {error}") from None
        self._directory = directory
        self._num_records = num_records
        self._lock = threading.Lock()
        self._writers: list[threading.Thread] = []

    @classmethod
    def of_job(cls, directory: str, job_id: str) -> FlightRecorder:
        """A recorder below a directory that several jobs may share."""
        return cls(Path(directory) / f"job_{quote(job_id, safe='')}")

    def start_log(self, members: Members, backend: str) -> FlightLog | None:
        """A log for ``members``, connected over ``backend``; None if they have no quorum id."""
        if members.quorum_id is None:
            return None
        return FlightLog(members, backend, self._num_records)

    def write(self, snapshot: FlightSnapshot, why: str) -> None:
        """Write ``snapshot`` on a thread; returns at once."""
        with self._lock:
            self._writers = [writer for writer in self._writers if writer.is_alive()]
            if len(self._writers) >= _MAX_WRITERS:
                log.warning("the flight of %s is not recorded: too slow a disk", _named(snapshot))
                return
            writer = threading.Thread(
                target=self._write, args=(snapshot, why), name="torchft-flight", daemon=True
            )
            try:
                writer.start()
            except RuntimeError as error:  # torch may be out of threads, or the interpreter ends
                log.warning("the flight of %s is not recorded: %s", _named(snapshot), error)
                return
            self._writers.append(writer)

    def close(self, timeout_s: float) -> None:
        """Wait until everything is written; idempotent."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            writers = list(self._writers)
        for writer in writers:
            writer.join(max(0.0, deadline - time.monotonic()))

    def _write(self, snapshot: FlightSnapshot, why: str) -> None:
        members = snapshot.members
        folder = self._directory / f"quorum_{members.quorum_id}"
        folder /= f"group_rank_{members.group_rank or 0}"
        path = folder / f"rank_{members.rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A name that the analyzer ignores.
            aside = folder / f".{members.rank}.{os.getpid()}.part"
            # The only format that the analyzer reads; this package never unpickles it.
            aside.write_bytes(pickle.dumps(snapshot.as_trace(why)))
            aside.replace(path)
            self._forget_old()
        except Exception:
            log.exception("the flight of %s cannot be written", _named(snapshot))
        else:
            log.warning(
                "flight of %s: %s (%s): %s", _named(snapshot), snapshot.summary(), why, path
            )

    def _forget_old(self) -> None:
        found = [(_QUORUM.fullmatch(path.name), path) for path in self._directory.iterdir()]
        quorums = sorted((int(match[1]), path) for match, path in found if match)
        for _, path in quorums[:-MAX_QUORUMS]:
            _remove(path)


def _named(snapshot: FlightSnapshot) -> str:
    members = snapshot.members
    return f"quorum {members.quorum_id}, replica rank {members.rank} of {members.world_size}"


def _remove(quorum: Path) -> None:
    """Remove only our files; another process may do the same."""
    for group in quorum.glob("group_rank_*"):
        for file in (*group.glob("rank_*"), *group.glob(".*.part")):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            group.rmdir()
    with contextlib.suppress(OSError):
        quorum.rmdir()
