"""Copies the messages of a lighthouse session to the wire and back."""

from __future__ import annotations

from torchft_svc.core.limits import MAX_DURATION_MS, one_line
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Departure,
    Hello,
    Kill,
    Leave,
    Lost,
    NewcomerWaits,
    News,
    NoQuorumYet,
    Question,
    Refusal,
    SessionMessage,
    Welcome,
    Withdrawal,
)
from torchft_svc.core.quorum.tally import MAX_EVENTS_SENT, GroupEvent
from torchft_svc.core.quorum.types import (
    MAX_DIFFERENCES,
    DifferenceReport,
    LastQuorum,
    check_count,
    check_step,
)
from torchft_svc.errors import RequestRefused
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.calls import MAX_WAIT_S
from torchft_svc.rpc.codec import (
    DRAIN,
    TERM_ENDS,
    difference_from_wire,
    difference_to_wire,
    event_to_wire,
    events_from_wire,
    member_from_wire,
    member_to_wire,
    phase_from_wire,
    phase_to_wire,
    tally_from_wire,
    tally_to_wire,
)
from torchft_svc.rpc.records import Codec, Field, HandWritten, OneOf, milliseconds, numbered
from torchft_svc.rpc.status import error_to_wire

# -- from the manager ------------------------------------------------------------------------------


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
    return Hello(hello.replica_id, last, hello.last_num_groups, hello.prepared_spare)


def _hello_to_wire(hello: Hello) -> pb.SessionHello:
    return pb.SessionHello(
        replica_id=hello.replica_id,
        last_quorum_id=hello.last.quorum_id,
        last_max_step=hello.last.max_step,
        last_num_groups=hello.num_groups,
        prepared_spare=hello.is_spare,
    )


def beat_from_wire(message: pb.SessionBeat) -> Beat:
    """The heartbeat; its step and duration count only with a phase.

    Raises:
        RequestRefused: a field is out of bounds.
    """
    phase = phase_from_wire(message.phase)
    differences: tuple[DifferenceReport, ...] = ()
    events: tuple[GroupEvent, ...] = ()
    if message.differences:  # rare, and a beat is not: lists that are empty take time, too
        differences = tuple(map(difference_from_wire, message.differences[-MAX_DIFFERENCES:]))
    if message.events:
        events = tuple(events_from_wire(message.events[-MAX_EVENTS_SENT:]))
    tally = tally_from_wire(message.tally) if message.HasField("tally") else None
    if phase is None:
        return Beat(differences=differences, tally=tally, events=events)
    check_step(message.step)
    check_count("received_bytes", message.received_bytes)
    check_count("state_bytes", message.state_bytes)
    phase_ms = min(max(0, message.phase_ms), MAX_DURATION_MS)  # it is passed on
    return Beat(
        phase,
        message.step,
        phase_ms / 1000,
        differences,
        tally,
        events,
        message.received_bytes,
        message.state_bytes,
    )


def _beat_to_wire(beat: Beat) -> pb.SessionBeat:
    message = pb.SessionBeat(
        differences=map(difference_to_wire, beat.differences),
        tally=None if beat.tally is None else tally_to_wire(beat.tally),
        events=map(event_to_wire, beat.events),
    )
    if beat.phase is not None:
        message.phase, message.step = phase_to_wire(beat.phase), beat.step
        message.phase_ms = max(0, int(beat.lasts_s * 1000))
        message.received_bytes, message.state_bytes = beat.received_bytes, beat.state_bytes
    return message


_DEPARTURES = {
    Departure.OTHER: pb.DEPARTURE_OTHER,
    Departure.DRAINED: pb.DEPARTURE_DRAINED,
    Departure.KILLED: pb.DEPARTURE_KILLED,
}
_MESSAGES = OneOf(
    pb.SessionRequest,
    "a session",
    {
        "beat": HandWritten(Beat, _beat_to_wire, beat_from_wire),
        "question": Codec(
            Question,
            pb.SessionQuestion,
            fields={
                "member": Field("requester", member_to_wire, member_from_wire),
                "timeout_s": Field(
                    "timeout_ms",
                    lambda seconds: max(1, int(seconds * 1000)),
                    lambda number: min(max(number, 0) / 1000, MAX_WAIT_S),
                ),
            },
        ),
        "withdrawal": Codec(Withdrawal, pb.SessionWithdrawal),
        "leave": Codec(
            Leave,
            pb.SessionLeave,
            fields={"departure": numbered(_DEPARTURES, default=Departure.OTHER)},
        ),
    },
)


def session_message_to_wire(message: Hello | SessionMessage) -> pb.SessionRequest:
    if isinstance(message, Hello):
        return pb.SessionRequest(hello=_hello_to_wire(message))
    return _MESSAGES.to_wire(message)


def session_message_from_wire(request: pb.SessionRequest) -> SessionMessage:
    """A message behind the first one.

    Raises:
        RequestRefused: it has no place there, or is out of bounds.
    """
    message: SessionMessage = _MESSAGES.from_wire(request)
    return message


# -- from the lighthouse, besides the quorum -------------------------------------------------------

_NEWS = OneOf(
    pb.SessionNews,
    "a manager",
    {
        "welcome": Codec(
            Welcome,
            pb.SessionWelcome,
            fields={"min_interval_s": milliseconds("min_interval_ms")},
        ),
        "lost": Codec(Lost, pb.MemberLost),
        "kill": Codec(Kill, pb.Kill),
        "drain": DRAIN,
        "waiting": Codec(NewcomerWaits, pb.MemberWaiting),
        "term_ends": TERM_ENDS,
        "no_quorum_yet": Codec(NoQuorumYet, pb.NoQuorumYet, texts=one_line),
    },
)


def session_news_to_wire(news: News) -> bytes:
    """The encoded news, the same for all sessions; a worker's stream has the same bytes for it."""
    if isinstance(news, Refusal):
        name, text = error_to_wire(news.error)
        refusal = pb.SessionRefusal(number=news.number, error=name, reason=text)
        return pb.SessionNews(refusal=refusal).SerializeToString()
    return _NEWS.to_wire(news).SerializeToString()


def session_news_from_wire(message: pb.SessionNews) -> News | None:
    """The news in ``message``; None: it has none, but the outcome of a question."""
    if message.WhichOneof("kind") in ("quorum", "refusal", None):
        return None
    news: News = _NEWS.from_wire(message)
    return news
