"""Tests a session's questions: which one is answered, and which is withdrawn."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from support.running import Line, eventually, failure, line_to, members

from torchft_svc.coordination import LighthouseServer
from torchft_svc.core.quorum.lighthouse.lighthouse import MAX_SESSIONS_PER_GROUP
from torchft_svc.proto import torchft_pb2 as pb


class RawSession:
    """A session of group ``a:1``, message by message."""

    def __init__(self, line: Line, **last: int) -> None:
        self._outgoing: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        invoke = line.channel.stream_stream(
            "/torchft.LighthouseService/Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionNews.FromString,
        )
        self.news: Any = invoke(iter(self._outgoing.get, None), timeout=20)
        self.send(hello={"replica_id": "a:1", **last})
        assert next(self.news).WhichOneof("kind") == "welcome"

    def send(self, **fields: Any) -> None:
        self._outgoing.put(pb.SessionRequest(**fields))

    def ask(self, number: int, timeout_ms: int = 10_000) -> None:
        asked = {"requester": {"replica_id": "a:1"}, "number": number, "timeout_ms": timeout_ms}
        self.send(question=asked)

    def close(self) -> None:
        self._outgoing.put(None)
        list(self.news)


@pytest.fixture
def line() -> Iterator[Line]:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=300) as server,
        line_to(server.address()) as line,
    ):
        yield line


@pytest.fixture
def session(line: Line) -> Iterator[RawSession]:
    session = RawSession(line)
    yield session
    session.close()


def test_an_answer_names_its_question(line: Line, session: RawSession) -> None:
    for number in (1, 2):
        session.ask(number)
        peer = line.quorum("b:1")
        news = next(session.news)
        assert (news.WhichOneof("kind"), news.answers) == ("quorum", number)
        assert members(news) == members(peer.result()) == ["a:1", "b:1"]


def test_who_is_back_after_its_session_broke_learns_that_it_is_out(
    line: Line, session: RawSession
) -> None:
    """The group's workers wait for sums that will not come. Who leaves knows that itself."""
    session.ask(1)
    peer = line.quorum("b:1")
    quorum = next(session.news).quorum
    peer.result()
    session.close()
    back = RawSession(line, last_quorum_id=quorum.quorum_id, last_max_step=0)
    lost = next(back.news).lost
    assert (lost.replica_id, lost.quorum_id) == ("a:1", quorum.quorum_id)
    back.send(leave={"reason": "enough"})
    assert list(back.news) == []
    back.close()


def test_who_was_silent_learns_that_it_is_out_when_it_moves_again() -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=300) as server,
        line_to(server.address()) as line,
    ):
        session = RawSession(line)
        session.ask(1)
        received = [next(session.news)]
        while received[-1].WhichOneof("kind") != "lost" or not received[-1].lost.quorum_id:
            received.append(next(session.news))  # it does not beat
        (quorum,) = [news.quorum for news in received if news.WhichOneof("kind") == "quorum"]
        lost = received[-1].lost
        assert (lost.replica_id, lost.quorum_id) == ("a:1", quorum.quorum_id)
        session.close()


def _kill(line: Line) -> None:
    request = pb.LighthouseKillRequest(replica_id="a:1", reason="enough")
    line.call("LighthouseService/Kill", request, 10, None).result()


@pytest.mark.parametrize("stays", [True, False])
def test_a_stranger_under_a_living_id_takes_no_news_from_the_group(
    line: Line, session: RawSession, *, stays: bool
) -> None:
    """The end of the stranger's session is no loss of the group either."""
    session.ask(1)
    peer = line.quorum("b:1")
    quorum_id = next(session.news).quorum.quorum_id
    peer.result()
    stranger = RawSession(line)
    if not stays:
        stranger.close()
    session.ask(2)
    line.await_askers("a:1")
    peer = line.quorum("b:1")
    news = next(session.news)
    assert (news.WhichOneof("kind"), news.quorum.quorum_id) == ("quorum", quorum_id)
    peer.result()
    _kill(line)
    assert next(session.news).kill.reason == "enough"
    if stays:
        assert next(stranger.news).kill.reason == "enough"
        stranger.close()


def test_of_many_sessions_under_one_id_the_most_silent_is_ended(
    line: Line, session: RawSession
) -> None:
    others = []
    for _ in range(MAX_SESSIONS_PER_GROUP):
        session.send(beat={"phase": pb.PHASE_TRAINING, "step": len(others)})
        eventually(lambda: _step(line) == len(others))
        others.append(RawSession(line))
    code, reason = failure(others.pop(0).news)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"has {MAX_SESSIONS_PER_GROUP} others" in reason
    _kill(line)
    assert next(session.news).kill.reason == "enough"
    for other in others:
        other.close()


def _step(line: Line) -> int:
    request = pb.LighthouseStatusRequest()
    (job,) = line.call("LighthouseService/Status", request, 10, None).result().jobs
    return int(job.groups[0].step)


def test_a_withdrawal_that_was_overtaken_leaves_the_newer_question(session: RawSession) -> None:
    """A question that was withdrawn is not refused at its deadline: it is forgotten."""
    session.ask(1)
    session.ask(2, timeout_ms=300)
    session.send(withdrawal={"number": 1})
    news = next(session.news)
    assert news.refusal.number == 2
    assert "1 of at least 2 groups ask" in news.refusal.reason


def test_a_withdrawn_question_does_not_get_into_the_next_quorum(
    line: Line, session: RawSession
) -> None:
    session.ask(1)
    line.await_askers("a:1")
    session.send(withdrawal={"number": 1})
    session.send(beat={})
    line.await_askers()
    line.beat("b:1")
    asked = [line.quorum("b:1"), line.quorum("c:1")]
    assert [members(each.result()) for each in asked] == [["b:1", "c:1"]] * 2


@pytest.mark.usefixtures("early_news")
def test_who_waits_long_learns_why_and_when_that_changes(line: Line, session: RawSession) -> None:
    session.ask(1)
    assert next(session.news).no_quorum_yet.reason == "1 of at least 2 groups ask (--min-replicas)"
    session.send(beat={})
    peers = [line.quorum("b:1", min_replicas=3)]
    assert next(session.news).no_quorum_yet.reason == "2 of at least 3 groups ask (--min-replicas)"
    peers.append(line.quorum("c:1"))
    assert members(next(session.news)) == ["a:1", "b:1", "c:1"]
    for peer in peers:
        peer.result()


@pytest.mark.usefixtures("early_news")
def test_who_comes_to_a_wait_that_is_known_learns_why_too(line: Line, session: RawSession) -> None:
    session.ask(1)
    why = next(session.news).no_quorum_yet.reason
    session.ask(2)
    assert next(session.news).no_quorum_yet.reason == why
