"""Between messages on the wire and values of the core. Nothing else touches a message."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.unknown_fields import UnknownFieldSet

from torchft_svc.core.limits import MAX_NAME_LENGTH, MAX_REASON_LENGTH, one_line
from torchft_svc.core.quorum.activity import PhaseReport
from torchft_svc.core.quorum.difference import DifferenceReport
from torchft_svc.core.quorum.manager.group_orders import AnswerVote, AnswerWorker
from torchft_svc.core.quorum.phase import Phase
from torchft_svc.core.quorum.term import Fate, TermEnds, Wish
from torchft_svc.core.quorum.types import Member, Quorum, Vote, WorkerRequest, check_quorum_id
from torchft_svc.errors import QuorumFailed, RequestRefused
from torchft_svc.proto import torchft_pb2 as pb

JOB_KEY = "torchft-job"


def member_from_wire(message: pb.QuorumMember) -> Member:
    return Member(
        replica_id=message.replica_id,
        address=message.address,
        store_address=message.store_address,
        step=message.step,
        world_size=message.world_size,
        shrink_only=message.shrink_only,
        data=message.data,
        commit_failures=message.commit_failures,
        seen_quorum_id=message.seen_quorum_id,
        min_replicas=message.min_replicas,
        last_num_groups=message.last_num_groups,
        unhealed=message.joining,
        has_history=message.has_history,
        layout=message.layout,
        doubted_step=message.doubted_step,
        step_quorum_id=message.step_quorum_id,
        steady=message.steady,
        sole_lighthouse=message.sole_lighthouse,
        unknown=_unknown_fields(message),
    )


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
    message = pb.QuorumMember(
        replica_id=member.replica_id,
        address=member.address,
        store_address=member.store_address,
        step=member.step,
        world_size=member.world_size,
        shrink_only=member.shrink_only,
        data=member.data,
        commit_failures=member.commit_failures,
        seen_quorum_id=member.seen_quorum_id,
        min_replicas=member.min_replicas,
        last_num_groups=member.last_num_groups,
        joining=member.unhealed,
        has_history=member.has_history,
        layout=member.layout,
        doubted_step=member.doubted_step,
        step_quorum_id=member.step_quorum_id,
        steady=member.steady,
        sole_lighthouse=member.sole_lighthouse,
    )
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
    """What makes an encoded quorum the answer to question ``number`` of a session.

    Encoded messages that follow each other are one: the long part is shared by all sessions.
    """
    return pb.SessionNews(answers=number).SerializeToString()


News = TypeVar("News", pb.SessionNews, pb.AttachNews)


def fit_for_logs(news: News) -> News:
    """``news``, of whose texts each is `one_line`: those that hear it log them and raise them. The
    members of a quorum are looked at by `quorum_from_wire`."""
    kind = news.WhichOneof("kind")
    if kind in (None, "quorum"):
        return news
    told: Any = getattr(news, kind)
    for field, value in told.ListFields():
        if isinstance(value, str) and one_line(value) != value:
            setattr(told, field.name, one_line(value))
    return news


_PHASES: dict[Phase, pb.Phase] = {
    Phase.IDLE: pb.PHASE_IDLE,
    Phase.QUORUM: pb.PHASE_WAITING,
    Phase.HEALING: pb.PHASE_HEALING,
    Phase.TRAINING: pb.PHASE_TRAINING,
    Phase.VOTING: pb.PHASE_VOTING,
}
_PHASES_OF_WIRE = {number: phase for phase, number in _PHASES.items()}


def phase_to_wire(phase: Phase) -> pb.Phase:
    # An update belongs to what a user's program does between two steps: no others wait for it.
    return _PHASES.get(phase, pb.PHASE_IDLE)


def phase_from_wire(number: pb.Phase) -> Phase | None:
    """None: it was not told. One that a newer version has is none that could be called a hang, and
    the one before is over."""
    return _PHASES_OF_WIRE.get(number, Phase.IDLE if number else None)


def difference_to_wire(difference: DifferenceReport) -> pb.StateDifference:
    return pb.StateDifference(
        quorum_id=difference.quorum_id,
        step=difference.step,
        sentence=one_line(difference.sentence, MAX_REASON_LENGTH),
    )


def difference_from_wire(message: pb.StateDifference) -> DifferenceReport:
    """Raises:
    RequestRefused: a field is out of bounds.
    """
    difference = DifferenceReport(message.quorum_id, message.step, message.sentence)
    difference.check()
    return difference


def report_to_wire(report: PhaseReport) -> pb.AttachPhase:
    return pb.AttachPhase(
        phase=phase_to_wire(report.phase),
        step=report.step,
        went_on_to=report.went_on_to,
        round_before=report.round_before,
    )


def report_from_wire(message: pb.AttachPhase) -> PhaseReport | None:
    """None: as `phase_from_wire`."""
    phase = phase_from_wire(message.phase)
    if phase is None:
        return None
    return PhaseReport(phase, message.step, message.went_on_to, message.round_before)


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


def worker_request_from_wire(message: pb.ManagerQuorumRequest) -> WorkerRequest:
    # Workers of an older version do not tell the reason.
    drain_reason = message.drain_reason or f"group rank {message.rank} has to end"
    return WorkerRequest(
        group_rank=message.rank,
        step=message.step,
        checkpoint_address=message.checkpoint_server_addr,
        shrink_only=message.shrink_only,
        commit_failures=message.commit_failures,
        init_sync=message.init_sync if message.HasField("init_sync") else True,
        worker_id=message.worker_id,
        drain_reason=drain_reason if message.draining else "",
        unhealed=message.unhealed,
        last_quorum_id=message.last_quorum_id,
        last_num_groups=message.last_num_groups,
        last_round=message.last_round,
        layout=message.layout,
        step_quorum_id=message.step_quorum_id,
        steady=message.steady,
        agreed=message.agreed,
        question=message.question,
    )


def vote_from_wire(message: pb.ShouldCommitRequest) -> Vote:
    return Vote(
        group_rank=message.rank,
        step=message.step,
        should_commit=message.should_commit,
        round=message.round,
        worker_id=message.worker_id,
        wish=_wish_from_wire(message),
    )


def _wish_from_wire(message: pb.ShouldCommitRequest) -> Wish:
    if message.wishes_alone:
        return Wish.ALONE
    return Wish.NONE if message.wishes_none else Wish.SOME


_FATES: dict[Fate, pb.Fate] = {
    Fate.GOES_ON: pb.FATE_GOES_ON,
    Fate.ENDS: pb.FATE_ENDS,
    Fate.BREAKS_OFF: pb.FATE_BREAKS_OFF,
}
_FATES_OF_WIRE = {number: fate for fate, number in _FATES.items()}


def decision_to_wire(decided: AnswerVote) -> pb.ShouldCommitResponse:
    return pb.ShouldCommitResponse(should_commit=decided.should_commit, fate=_FATES[decided.fate])


def fate_from_wire(number: pb.Fate) -> Fate:
    """A manager of an older version does not tell it, and knows no quorum that goes on."""
    return _FATES_OF_WIRE.get(number, Fate.BREAKS_OFF)


def term_ends_from_wire(message: pb.TermEnds) -> TermEnds:
    step = message.step if message.HasField("step") else None
    return TermEnds(message.quorum_id, step, message.reason)


def worker_answer(answer: AnswerWorker) -> bytes:
    """What the worker has to do: the fields of an `Assignment` have the same names on the wire."""
    part = answer.assignment
    return pb.ManagerQuorumResponse(
        heal=part.heal,
        round=answer.round,
        **{each.name: getattr(part, each.name) for each in fields(part)},
    ).SerializeToString()
