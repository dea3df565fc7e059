"""Copies the status of jobs and runs, which people read, to the wire and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from torchft_svc.core.launch.launched_run import NodeStatus, RunStatus
from torchft_svc.core.limits import one_line
from torchft_svc.core.pieces import Pieces
from torchft_svc.core.quorum.lighthouse.copies import HeldCopy, MembersAndCopies
from torchft_svc.core.quorum.lighthouse.incidents import Goodput, Incident, IncidentKind
from torchft_svc.core.quorum.lighthouse.overview import (
    GROUPS_AT_ONCE,
    GoneGroup,
    GroupStatus,
    JobStatus,
)
from torchft_svc.core.quorum.lighthouse.pace import Pace
from torchft_svc.core.quorum.lighthouse.prepared_spares import PreparedSpare
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import PHASE
from torchft_svc.rpc.codec_rendezvous import AGENT_STATUS
from torchft_svc.rpc.records import Codec, Field, M, R, list_of, milliseconds

# Each text is shown on a terminal, to which escape codes are orders.
MAX_TEXT_LENGTH = 4000
_text = partial(one_line, limit=MAX_TEXT_LENGTH)


def _codec(record: type[R], message: type[M], **fields: Field) -> Codec[R, M]:
    return Codec(record, message, fields=fields, texts=_text)


def _seconds_by_cause(lost_s: Mapping[str, float]) -> dict[str, float]:
    return {_text(cause): seconds for cause, seconds in lost_s.items()}


_COPY = Codec(HeldCopy, pb.HeldCopy, checks=True)
_PACE = _codec(Pace, pb.Pace)
_GROUP = _codec(
    GroupStatus,
    pb.GroupStatus,
    paces=list_of(_PACE),
    phase=PHASE,
    phase_s=milliseconds("phase_ms"),
    silent_s=milliseconds("silent_ms"),
)
_GONE = _codec(GoneGroup, pb.GoneGroup, gone_s=milliseconds("gone_ms"))
_SPARE = _codec(PreparedSpare, pb.PreparedSpare, silent_s=milliseconds("silent_ms"))
_GOODPUT = _codec(Goodput, pb.Goodput, lost_s=Field("", dict, _seconds_by_cause))
_INCIDENT = _codec(
    Incident,
    pb.Incident,
    kind=Field("", lambda kind: kind.value, IncidentKind),
    groups=Field("", tuple, lambda groups: tuple(map(_text, groups))),
)
_JOB = _codec(
    JobStatus,
    pb.JobStatus,
    groups=list_of(_GROUP),
    gone=list_of(_GONE),
    goodput=Field(
        "",
        lambda goodput: None if goodput is None else _GOODPUT.to_wire(goodput),
        _GOODPUT.from_wire,
    ),
    prepared_spares=list_of(_SPARE),
    stalled_s=milliseconds("stalled_ms"),
    ended_s=milliseconds("ended_ms"),
    copy_age_s=milliseconds("copy_age_ms"),
)
_NODE = _codec(
    NodeStatus,
    pb.NodeStatus,
    status=AGENT_STATUS,
    silent_s=milliseconds("silent_ms"),
    waits_for_s=milliseconds("waits_ms"),
)
_RUN = _codec(RunStatus, pb.RunStatus, nodes=list_of(_NODE))


def status_to_wire(
    jobs: Iterable[JobStatus], runs: Iterable[RunStatus] = ()
) -> Pieces[pb.LighthouseStatusResponse]:
    """The message with the jobs and runs, some groups at a time."""
    message = pb.LighthouseStatusResponse()
    for job in jobs:
        part = _JOB.to_wire(replace(job, groups=()))
        for begin in range(0, len(job.groups), GROUPS_AT_ONCE):
            part.groups.extend(map(_GROUP.to_wire, job.groups[begin : begin + GROUPS_AT_ONCE]))
            yield
        message.jobs.append(part)
    message.runs.extend(map(_RUN.to_wire, runs))
    return message


def status_from_wire(message: pb.LighthouseStatusResponse) -> list[JobStatus]:
    """The jobs, with all texts fit for a terminal."""
    return list(map(_JOB.from_wire, message.jobs))


def runs_from_wire(message: pb.LighthouseStatusResponse) -> list[RunStatus]:
    """The launched runs, with all texts fit for a terminal.

    Raises:
        RequestRefused: a node has a status that no agent has.
    """
    return list(map(_RUN.from_wire, message.runs))


def copy_to_wire(copy: HeldCopy) -> pb.HeldCopy:
    return _COPY.to_wire(copy)


def copy_from_wire(message: pb.HeldCopy) -> HeldCopy:
    """The copy that a holder, or a lighthouse, reports.

    Raises:
        RequestRefused: a field is out of bounds.
    """
    return _COPY.from_wire(message)


def members_from_wire(message: pb.JobMembersResponse) -> MembersAndCopies:
    """The members of a job, and the copies of its states.

    Raises:
        RequestRefused: a copy is out of bounds.
    """
    return MembersAndCopies(
        members=dict(zip(message.replica_ids, message.manager_addresses, strict=False)),
        committed_step=message.committed_step,
        copies=tuple(map(copy_from_wire, message.copies)),
        knows_copies=message.knows_copies,
        is_finished=message.is_finished,
    )


def incidents_to_wire(
    incidents: Iterable[Incident], goodput: Goodput | None
) -> pb.LighthouseIncidentsResponse:
    return pb.LighthouseIncidentsResponse(
        incidents=map(_INCIDENT.to_wire, incidents),
        goodput=None if goodput is None else _GOODPUT.to_wire(goodput),
    )


def incidents_from_wire(
    message: pb.LighthouseIncidentsResponse,
) -> tuple[list[Incident], Goodput | None]:
    """The records, without those of kinds that this version does not know, and the goodput of the
    job (None: it is not known); all texts are fit for a terminal."""
    kinds = {kind.value for kind in IncidentKind}
    known = [each for each in message.incidents if each.kind in kinds]
    goodput = _GOODPUT.from_wire(message.goodput) if message.HasField("goodput") else None
    return list(map(_INCIDENT.from_wire, known)), goodput
