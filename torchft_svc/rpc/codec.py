"""Copies questions, answers, votes and reports of a quorum to the wire and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.unknown_fields import UnknownFieldSet

from torchft_svc.core.limits import MAX_NAME_LENGTH, one_line
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote
from torchft_svc.core.quorum.manager.group import AnswerWorker
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.core.quorum.tally import (
    MAX_LOST_NAMED,
    EventKind,
    GroupEvent,
    StepTimes,
    Tally,
)
from torchft_svc.core.quorum.term import Fate, TermEnds, Wish
from torchft_svc.core.quorum.types import (
    DifferenceReport,
    Member,
    Quorum,
    Vote,
    WorkerRequest,
    check_count,
    check_quorum_id,
)
from torchft_svc.errors import QuorumFailed, RequestRefused
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.records import Codec, Field, numbered, within

JOB_KEY = "torchft-job"


# `data`, an unknown field and all that a group reports of itself is checked by `Member.check`.
_MEMBER = Codec(Member, pb.QuorumMember, fields={"unhealed": Field("joining")}, local=("unknown",))


def member_from_wire(message: pb.QuorumMember) -> Member:
    """The group that the message describes; `Member.check` has not been called."""
    return _MEMBER.from_wire(message, unknown=_unknown_fields(message))


def _unknown_fields(message: pb.QuorumMember) -> bytes:
    """The fields that this version does not know, encoded (releases of torchft add some)."""
    if not len(UnknownFieldSet(message)):
        return b""
    rest = pb.QuorumMember()
    rest.CopyFrom(message)
    for field, _ in message.ListFields():
        rest.ClearField(field.name)
    return rest.SerializeToString()


def member_to_wire(member: Member) -> pb.QuorumMember:
    """The message that describes ``member``, with the fields that this version does not know."""
    message = _MEMBER.to_wire(member)
    if member.unknown:
        message.MergeFromString(member.unknown)
    return message


def quorum_answer(quorum: Quorum, created_s: float) -> bytes:
    """The lighthouse's answer, made once for all members. ``created_s``: seconds since 1970.

    The bytes are a `LighthouseQuorumResponse`; with `answers` behind them, a `SessionNews`.
    """
    message = pb.LighthouseQuorumResponse()
    message.quorum.quorum_id = quorum.quorum_id
    message.quorum.participants.extend(map(member_to_wire, quorum.participants))
    for participant in message.quorum.participants:
        participant.layout = ""  # it is compared here, nobody else needs it
        joins = participant.replica_id in quorum.joining
        if participant.joining != joins:
            participant.joining = joins
    message.quorum.created.FromNanoseconds(int(created_s * 1e9))
    return message.SerializeToString()


def answers(number: int) -> bytes:
    """The bytes that make an encoded quorum the answer to question ``number`` of a session.

    Encoded messages that follow each other are one: the long part is shared by all sessions.
    """
    return pb.SessionNews(answers=number).SerializeToString()


News = TypeVar("News", pb.SessionNews, pb.AttachNews)


def fit_for_logs(news: News) -> News:
    """Make each text of ``news`` `one_line`, because receivers log and raise them.

    The members of a quorum are checked by `quorum_from_wire`.
    """
    kind = news.WhichOneof("kind")
    if kind in (None, "quorum"):
        return news
    message: Any = getattr(news, kind)
    for field, value in message.ListFields():
        if isinstance(value, str) and one_line(value) != value:
            setattr(message, field.name, one_line(value))
    return news


_PHASES: dict[Phase, pb.Phase] = {
    Phase.IDLE: pb.PHASE_IDLE,
    Phase.QUORUM: pb.PHASE_WAITING,
    Phase.HEALING: pb.PHASE_HEALING,
    Phase.TRAINING: pb.PHASE_TRAINING,
    Phase.VOTING: pb.PHASE_VOTING,
}
_PHASES_OF_WIRE = {number: phase for phase, number in _PHASES.items()}


def phase_to_wire(phase: Phase | None) -> pb.Phase:
    """The number of ``phase`` (None: not known)."""
    if phase is None:
        return pb.PHASE_UNKNOWN
    # An update belongs to what a user's program does between two steps: no others wait for it.
    return _PHASES.get(phase, pb.PHASE_IDLE)


def phase_from_wire(number: pb.Phase) -> Phase | None:
    """The phase with this number (None: not reported, or no such phase)."""
    return _PHASES_OF_WIRE.get(number)


PHASE = Field("", phase_to_wire, phase_from_wire)

_REPORT = Codec(PhaseReport, pb.AttachPhase, fields={"phase": PHASE}, apart=("tally",))


def report_to_wire(report: PhaseReport, tally: Tally | None = None) -> pb.AttachPhase:
    message = _REPORT.to_wire(report)
    if tally is not None:
        message.tally.CopyFrom(tally_to_wire(tally))
    return message


def report_from_wire(message: pb.AttachPhase) -> PhaseReport | None:
    """The report (None: it names no phase).

    Raises:
        RequestRefused: a field is out of bounds.
    """
    for field in ("step", "went_on_to", "received_bytes", "state_bytes"):
        check_count(field, getattr(message, field))
    return _REPORT.from_wire(message) if message.phase in _PHASES_OF_WIRE else None


_DIFFERENCE = Codec(
    DifferenceReport,
    pb.StateDifference,
    fields={"sentence": Field("", one_line)},
    checks=True,
)


def difference_to_wire(difference: DifferenceReport) -> pb.StateDifference:
    return _DIFFERENCE.to_wire(difference)


def difference_from_wire(message: pb.StateDifference) -> DifferenceReport:
    """Raises:
    RequestRefused: a field is out of bounds.
    """
    return _DIFFERENCE.from_wire(message)


def _some_names(replica_ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(replica_ids)[:MAX_LOST_NAMED]


_STEP_TIMES = Codec(StepTimes, pb.StepTimes, checks=True)
_TALLY = Codec(
    Tally,
    pb.Tally,
    fields={
        "step_times": Field(
            "",
            lambda times: None if times is None else _STEP_TIMES.to_wire(times),
            _STEP_TIMES.from_wire,
        )
    },
    checks=True,
)


def tally_to_wire(tally: Tally) -> pb.Tally:
    return _TALLY.to_wire(tally)


def tally_from_wire(message: pb.Tally) -> Tally:
    """Raises:
    RequestRefused: a field is out of bounds.
    """
    return _TALLY.from_wire(message)


_EVENTS = {
    EventKind.DISCARDED: pb.GroupEvent.DISCARDED,
    EventKind.HEAL_FAILED: pb.GroupEvent.HEAL_FAILED,
    EventKind.RECOVERED: pb.GroupEvent.RECOVERED,
    EventKind.MANAGER_DIED: pb.GroupEvent.MANAGER_DIED,
    EventKind.LIGHTHOUSE_AWAY: pb.GroupEvent.LIGHTHOUSE_AWAY,
}
_EVENT = Codec(
    GroupEvent,
    pb.GroupEvent,
    fields={
        "kind": numbered(_EVENTS),
        "cause": Field("", one_line, one_line),
        "lost": Field("", _some_names, _some_names),
    },
    checks=True,
)


def event_to_wire(event: GroupEvent) -> pb.GroupEvent:
    return _EVENT.to_wire(event)


def events_from_wire(messages: Iterable[pb.GroupEvent]) -> Iterator[GroupEvent]:
    """The events of kinds that this version knows.

    Raises:
        RequestRefused: a field is out of bounds.
    """
    known = set(_EVENTS.values())
    return (_EVENT.from_wire(each) for each in messages if each.kind in known)


def quorum_from_wire(message: pb.Quorum) -> Quorum:
    """Raises `QuorumFailed` for a quorum that no lighthouse can have formed.

    The id is reported to managers and lighthouses later, which refuse one that is out of bounds.
    """
    if not message.participants:
        raise QuorumFailed("the lighthouse answered with a quorum without members")
    try:
        check_quorum_id("quorum_id", message.quorum_id)
    except RequestRefused as error:
        raise QuorumFailed(f"the lighthouse answered with a wrong quorum: {error}") from None
    participants = tuple(map(member_from_wire, message.participants))
    if len({each.replica_id for each in participants}) < len(participants):
        raise QuorumFailed("the lighthouse answered with a quorum that has a member twice")
    for each in participants:
        if not (each.replica_id + each.address + each.store_address).isprintable():
            name = one_line(each.replica_id, MAX_NAME_LENGTH)
            raise QuorumFailed(f"member {name!r} has a name or address that cannot be printed")
    return Quorum(
        quorum_id=message.quorum_id,
        participants=participants,
        joining=frozenset(each.replica_id for each in message.participants if each.joining),
    )


_QUESTION = Codec(
    WorkerRequest,
    pb.ManagerQuorumRequest,
    fields={
        "group_rank": Field("rank"),
        "checkpoint_address": Field("checkpoint_server_addr"),
    },
)


def worker_request_to_wire(request: WorkerRequest) -> pb.ManagerQuorumRequest:
    return _QUESTION.to_wire(request)


def worker_request_from_wire(message: pb.ManagerQuorumRequest) -> WorkerRequest:
    """The worker's request; `WorkerRequest.check` has not been called."""
    return _QUESTION.from_wire(message)


_WISHES = {Wish.SOME: pb.WISH_SOME, Wish.NONE: pb.WISH_NONE, Wish.ALONE: pb.WISH_ALONE}
_VOTE = Codec(
    Vote,
    pb.ShouldCommitRequest,
    fields={"group_rank": Field("rank"), "wish": numbered(_WISHES, default=Wish.SOME)},
)


def vote_to_wire(vote: Vote) -> pb.ShouldCommitRequest:
    return _VOTE.to_wire(vote)


def vote_from_wire(message: pb.ShouldCommitRequest) -> Vote:
    """The worker's vote; `Vote.check` has not been called."""
    return _VOTE.from_wire(message)


_FATES = {
    Fate.ABORTED: pb.FATE_ABORTED,
    Fate.CONTINUES: pb.FATE_CONTINUES,
    Fate.ENDS: pb.FATE_ENDS,
}
_DECISION = Codec(
    AnswerVote,
    pb.ShouldCommitResponse,
    fields={"fate": numbered(_FATES, default=Fate.ABORTED)},
    local=("caller",),
)


def decision_to_wire(decided: AnswerVote) -> pb.ShouldCommitResponse:
    return _DECISION.to_wire(decided)


def decision_from_wire(message: pb.ShouldCommitResponse) -> tuple[bool, Fate]:
    """Whether the group commits, and how its next step begins."""
    decided = _DECISION.from_wire(message, caller=0)
    return decided.should_commit, decided.fate


DRAIN = Codec(Drain, pb.Drain, fields={"within_s": within("within_ms")})


def drain_from_wire(request: pb.Drain | pb.DrainRequest | pb.LighthouseDrainRequest) -> Drain:
    """The command, or what an operator asks for, as the command."""
    within_ms = request.within_ms if request.HasField("within_ms") else None
    reason = one_line(request.reason) or "drained by an operator"
    return DRAIN.from_wire(pb.Drain(reason=reason, within_ms=within_ms))


TERM_ENDS = Codec(TermEnds, pb.TermEnds, fields={"reason": Field("", one_line)})


def term_ends_from_wire(message: pb.TermEnds) -> TermEnds:
    return TERM_ENDS.from_wire(message)


# `heal` follows from the source to heal from; the design paper's workers read it.
_RESULT = Codec(QuorumResult, pb.ManagerQuorumResponse, apart=("heal", "round"))


def worker_answer(answer: AnswerWorker) -> bytes:
    """The encoded answer to a worker: its part in the quorum, and the round to vote in."""
    message = _RESULT.to_wire(answer.assignment)
    message.heal, message.round = answer.assignment.heal, answer.round
    return message.SerializeToString()


def quorum_result_from_wire(message: pb.ManagerQuorumResponse) -> tuple[QuorumResult, int]:
    """The worker's part in the quorum, and the round to vote in.

    Raises:
        QuorumFailed: no manager can have answered that.
    """
    if not message.store_address:
        raise QuorumFailed("the manager's answer names no store")
    result = _RESULT.from_wire(message)
    source, num_groups = result.recover_src_replica_rank, len(result.replica_ids)
    ranks = (
        result.replica_rank,
        *(() if source is None else (source,)),
        *result.recover_dst_replica_ranks,
        *result.recover_extra_dst_replica_ranks,
    )
    if num_groups != result.replica_world_size or not all(result.replica_ids):
        raise QuorumFailed("the manager's answer does not name all groups of the quorum")
    if not all(0 <= rank < num_groups for rank in ranks):
        raise QuorumFailed("the manager's answer has ranks of groups that it does not name")
    return result, message.round
