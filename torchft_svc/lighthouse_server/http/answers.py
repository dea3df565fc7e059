"""The answers of the API: records of the lighthouse as JSON, with the names of their fields."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from starlette.responses import Response

from torchft_svc.core.launch.launched_run import RunStatus
from torchft_svc.core.pieces import Pieces
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.incidents import Goodput, Incident
from torchft_svc.core.quorum.lighthouse.overview import (
    GROUPS_AT_ONCE,
    GoneGroup,
    GroupStatus,
    JobStatus,
)
from torchft_svc.core.quorum.lighthouse.prepared_spares import PreparedSpare
from torchft_svc.core.quorum.lighthouse.timeline import TimelinePoint
from torchft_svc.host.tasks import in_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """One job without its groups; the fields are those of a whole job.

    ``num_groups`` are alive; of them, ``num_in_quorum`` train together, ``num_healing`` download
    the state, and ``num_hung`` have stood still for longer than the hang timeout. ``num_spares``
    stand by for ``num_places``; ``num_spares_ready`` of them could take one now.
    """

    job: str
    quorum_id: int
    committed_step: int
    min_replicas: int
    waiting_for: str
    num_groups: int
    num_in_quorum: int
    num_healing: int
    num_hung: int
    num_expected: int
    num_discarded: int
    num_heals: int
    num_differences: int
    last_difference: str
    copy_step: int
    num_holders: int
    copy_age_s: float | None
    num_places: int
    num_spares: int
    num_spares_ready: int
    stalled_s: float
    ended_s: float | None
    finished: bool

    @classmethod
    def summarize(cls, status: JobStatus) -> JobSummary:
        """Summarize ``status``."""
        shared = {name: getattr(status, name) for name in _shared_fields()}
        return cls(
            num_groups=len(status.groups),
            num_in_quorum=sum(group.in_quorum for group in status.groups),
            num_healing=sum(group.phase is Phase.HEALING for group in status.groups),
            num_hung=sum(group.hung for group in status.groups),
            num_spares=len(status.prepared_spares),
            num_spares_ready=sum(spare.asks for spare in status.prepared_spares),
            **shared,
        )


@functools.cache
def _shared_fields() -> tuple[str, ...]:
    of_status = {each.name for each in dataclasses.fields(JobStatus)}
    names = (each.name for each in dataclasses.fields(JobSummary))
    return tuple(name for name in names if name in of_status)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobList:
    """All jobs that have living groups, and the last that have ended."""

    jobs: tuple[JobSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupList:
    """The groups of a job: the living ones, those that ended last, the newest first, and the
    prepared spares that stand by."""

    job: str
    groups: tuple[GroupStatus, ...]
    gone: tuple[GoneGroup, ...]
    prepared_spares: tuple[PreparedSpare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentList:
    """Records of a job's ledger, the oldest first; ``next_after`` asks for those that follow."""

    job: str
    incidents: tuple[Incident, ...]
    next_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputAnswer:
    """How much of a job's time ended in committed steps."""

    job: str
    goodput: Goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineAnswer:
    """What a job did in the last hour, a point each ``interval_s``, the oldest first."""

    job: str
    interval_s: float
    points: tuple[TimelinePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """All launched runs."""

    runs: tuple[RunStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseAnswer:
    """This lighthouse: whether it leads (``leader``: which one does, if that is known), whether
    requests need the token, and whether it accepts commands over HTTP."""

    version: str
    leads: bool
    leader: str
    needs_token: bool
    accepts_commands: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthAnswer:
    """A lighthouse that runs; ``ready``: it takes requests."""

    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A command that is on its way to ``target``."""

    target: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAccepted:
    """A job continues without its ``committed_step``."""

    job: str
    committed_step: int


# Of each kind of record, its fields' names, and what reads them: `dataclasses.fields` collects them
# anew for each of a thousand groups, and `dataclasses.asdict` copies all that they hold.
_readers: dict[type[object], tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]] = {}


def fields_of(record: object) -> dict[str, Any]:
    """Return the fields of ``record`` by name, as they are."""
    kind = type(record)
    if kind not in _readers:
        assert dataclasses.is_dataclass(record)
        names = tuple(each.name for each in dataclasses.fields(record))
        _readers[kind] = names, _reader(names)
    names, read = _readers[kind]
    return dict(zip(names, read(record), strict=True))


def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) == 1:  # `attrgetter` returns no tuple then
        return lambda record: (getattr(record, names[0]),)
    return attrgetter(*names)


def _plain(value: object) -> Any:
    """Return what `json` can write of a value that it does not know."""
    if isinstance(value, enum.Enum):
        return value.value
    return dict(value) if isinstance(value, Mapping) else fields_of(value)


def encoded(value: object) -> bytes:
    """Return ``value``, with the records in it, as compact JSON."""
    return _encode(value).encode("utf-8", "replace")


_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
).encode


def encode_in_pieces(record: object) -> Pieces[bytes]:
    """Encode ``record`` as `encoded` does, some entries of its lists at a time."""
    fields = []
    for name, value in fields_of(record).items():
        if isinstance(value, tuple) and value:
            entries = []
            for begin in range(0, len(value), GROUPS_AT_ONCE):
                entries.append(encoded(value[begin : begin + GROUPS_AT_ONCE])[1:-1])
                yield
            body = b"[%b]" % b",".join(entries)
        else:
            body = encoded(value)
        fields.append(b'"%b":%b' % (name.encode(), body))
    return b"{%b}" % b",".join(fields)


async def long_json_answer(answer: object) -> Response:
    """Return a response with a record that may have thousands of groups, made in pieces."""
    return Response(await in_turns(encode_in_pieces(answer)), media_type="application/json")


def json_answer(answer: object, status: int = 200) -> Response:
    """Return a response with a record."""
    return Response(encoded(answer), status, media_type="application/json")
