"""Between the messages of a lighthouse session on the wire and their values."""

from __future__ import annotations

from torchft_svc.core.limits import MAX_DURATION_MS, one_line
from torchft_svc.core.quorum.difference import MAX_DIFFERENCES
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Drain,
    Hello,
    Kill,
    Leave,
    Lost,
    NewcomerWaits,
    News,
    NoQuorumYet,
    Question,
    SessionMessage,
    Welcome,
    Withdrawal,
)
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import LastQuorum, check_step
from torchft_svc.errors import RequestRefused
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import (
    difference_from_wire,
    difference_to_wire,
    member_from_wire,
    member_to_wire,
    phase_from_wire,
    phase_to_wire,
)
from torchft_svc.rpc.deadline import MAX_WAIT_S
from torchft_svc.rpc.parsing import is_of_a_newer_kind
from torchft_svc.rpc.status import error_to_wire


def hello_from_wire(request: pb.SessionRequest | None) -> Hello:
    """The first message of a stream (None: none came).

    Raises:
        RequestRefused: it is another one.
    """
    if request is None:
        raise RequestRefused("a session begins with a hello; none came")
    if request.WhichOneof("kind") != "hello":
        raise RequestRefused("a session begins with a hello")
    hello = request.hello
    last = LastQuorum(hello.last_quorum_id, hello.last_max_step)
    return Hello(hello.replica_id, last, hello.last_num_groups)


def session_message_to_wire(message: Hello | SessionMessage) -> pb.SessionRequest:
    if isinstance(message, Beat):
        beat = pb.SessionBeat()
        if message.phase is not None:
            beat.phase, beat.step = phase_to_wire(message.phase), message.step
            beat.phase_ms = max(0, int(message.lasts_s * 1000))
        beat.differences.extend(map(difference_to_wire, message.differences))
        return pb.SessionRequest(beat=beat)
    if isinstance(message, Question):
        question = pb.SessionQuestion(
            requester=member_to_wire(message.member),
            number=message.number,
            timeout_ms=max(1, int(message.timeout_s * 1000)),
            agreed=message.agreed,
        )
        return pb.SessionRequest(question=question)
    if isinstance(message, Withdrawal):
        return pb.SessionRequest(withdrawal=pb.SessionWithdrawal(number=message.number))
    if isinstance(message, Hello):
        last = message.last
        hello = pb.SessionHello(
            replica_id=message.replica_id,
            last_quorum_id=last.quorum_id,
            last_max_step=last.max_step,
            last_num_groups=message.num_groups,
        )
        return pb.SessionRequest(hello=hello)
    leave = pb.SessionLeave(
        reason=message.reason, between_steps=message.between_steps, ends=message.ends
    )
    return pb.SessionRequest(leave=leave)


def session_message_from_wire(request: pb.SessionRequest) -> SessionMessage | None:
    """None: only a newer version knows what it is, and does not need it here.

    Raises:
        RequestRefused: it has no place behind the first message, or is out of bounds.
    """
    kind = request.WhichOneof("kind")
    if kind == "beat":
        return beat_from_wire(request.beat)
    if kind == "question":
        question = request.question
        timeout_s = min(max(question.timeout_ms, 0) / 1000, MAX_WAIT_S)
        member = member_from_wire(question.requester)
        return Question(question.number, member, timeout_s, question.agreed)
    if kind == "withdrawal":
        return Withdrawal(request.withdrawal.number)
    if kind == "leave":
        leave = request.leave
        return Leave(leave.reason, leave.between_steps, leave.ends)
    if kind is None and is_of_a_newer_kind(request):
        return None
    raise RequestRefused(f"a session does not accept {kind or 'an empty message'}")


def beat_from_wire(message: pb.SessionBeat) -> Beat:
    phase = phase_from_wire(message.phase)
    last = message.differences[-MAX_DIFFERENCES:]
    differences = tuple(map(difference_from_wire, last))
    if phase is None:
        return Beat(differences=differences)
    check_step(message.step)
    phase_ms = min(max(0, message.phase_ms), MAX_DURATION_MS)  # it is told on
    return Beat(phase, message.step, phase_ms / 1000, differences)


def session_news_to_wire(news: News) -> bytes:
    """Encoded, for all sessions that are told the same; what a worker is told, too, has the same
    bytes for it."""
    if isinstance(news, Lost):
        lost = pb.MemberLost(
            replica_id=news.replica_id, reason=news.reason, quorum_id=news.quorum_id
        )
        message = pb.SessionNews(lost=lost)
    elif isinstance(news, NoQuorumYet):
        message = pb.SessionNews(no_quorum_yet=pb.NoQuorumYet(reason=one_line(news.reason)))
    elif isinstance(news, Kill):
        message = pb.SessionNews(kill=pb.Kill(reason=news.reason))
    elif isinstance(news, Drain):
        message = pb.SessionNews(drain=pb.Drain(reason=news.reason))
    elif isinstance(news, Welcome):
        interval_ms = int(news.min_interval_s * 1000)
        message = pb.SessionNews(welcome=pb.SessionWelcome(min_interval_ms=interval_ms))
    elif isinstance(news, NewcomerWaits):
        message = pb.SessionNews(waiting=pb.MemberWaiting(replica_id=news.replica_id))
    elif isinstance(news, TermEnds):
        ends = pb.TermEnds(quorum_id=news.quorum_id, step=news.step, reason=one_line(news.reason))
        message = pb.SessionNews(term_ends=ends)
    else:
        name, text = error_to_wire(news.error)
        refusal = pb.SessionRefusal(number=news.number, error=name, reason=text)
        message = pb.SessionNews(refusal=refusal)
    return message.SerializeToString()
