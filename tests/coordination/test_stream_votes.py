"""Tests the worker's end of votes on its stream, against managers of a test's own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import grpc
import pytest
from support.running import attach, grpc_server

from torchft_svc.coordination import ManagerClient
from torchft_svc.coordination import outgoing as outgoing_module
from torchft_svc.coordination.outgoing import Outgoing
from torchft_svc.coordination.stream_votes import StreamVotes
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.term import Fate, Wish
from torchft_svc.core.quorum.types import Vote
from torchft_svc.errors import CommitFailed, DeadlineExceeded, QuorumFailed
from torchft_svc.proto import torchft_pb2 as pb

LONG = timedelta(seconds=20)
END_S = LONG.total_seconds()
VOTE = Vote(group_rank=1, step=7, should_commit=True, wish=Wish.NONE)
COMMITS = pb.ShouldCommitResponse(should_commit=True, fate=pb.FATE_CONTINUES)


class ScriptedManager:
    """A manager that keeps what a worker sends, and sends what the test puts in ``news``.

    None ends the stream.
    """

    def __init__(self, *, welcomes: bool) -> None:
        self.received: queue.SimpleQueue[pb.AttachRequest] = queue.SimpleQueue()
        self.calls: list[pb.ShouldCommitRequest] = []
        self.news: queue.SimpleQueue[pb.AttachNews | None] = queue.SimpleQueue()
        self.is_away = False  # for workers that attach from now on
        self._welcomes = welcomes

    def service(self, details: Any) -> Any:
        if details.method.endswith("/Attach"):
            return grpc.stream_stream_rpc_method_handler(
                self._attach, pb.AttachRequest.FromString, pb.AttachNews.SerializeToString
            )
        return grpc.unary_unary_rpc_method_handler(
            self._call,
            pb.ShouldCommitRequest.FromString,
            pb.ShouldCommitResponse.SerializeToString,
        )

    def _attach(self, requests: Iterator[pb.AttachRequest], call: Any) -> Iterator[pb.AttachNews]:
        if self.is_away:
            call.abort(grpc.StatusCode.UNAVAILABLE, "away")
        has_ended = threading.Event()
        arguments = requests, has_ended
        listening = threading.Thread(target=self._listen, args=arguments, name="listens")
        listening.start()
        if self._welcomes:
            yield pb.AttachNews(welcome=pb.AttachWelcome())
        yield from iter(self.news.get, None)
        has_ended.set()

    def _listen(self, requests: Iterator[pb.AttachRequest], has_ended: threading.Event) -> None:
        with contextlib.suppress(Exception):
            for request in requests:
                self.received.put(request)
            if not has_ended.is_set():
                self.news.put(None)

    def _call(self, request: pb.ShouldCommitRequest, _: Any) -> pb.ShouldCommitResponse:
        self.calls.append(request)
        return COMMITS

    def next_of(self, kind: str) -> Any:
        """The next message of a ``kind``."""
        while (message := self.received.get(timeout=END_S)).WhichOneof("kind") != kind:
            pass
        return getattr(message, kind)

    def decides(self, number: int, **decision: Any) -> None:
        self.news.put(pb.AttachNews(decision=pb.AttachDecision(number=number, **decision)))


class Worker:
    def __init__(
        self, manager: ScriptedManager, client: ManagerClient, thread: ThreadPoolExecutor
    ) -> None:
        self.manager = manager
        self.client = client
        self.losses: list[str] = []
        self._thread = thread

    def vote(self, timeout: timedelta = LONG) -> Future[tuple[bool, Fate]]:
        return self._thread.submit(self.client.vote, VOTE, timeout)

    def listen(self, timeout: timedelta = LONG) -> Future[None]:
        return self._thread.submit(self.client.listen, timeout)


@contextlib.contextmanager
def worker_of(*, welcomes: bool) -> Iterator[Worker]:
    manager = ScriptedManager(welcomes=welcomes)
    handler: Any = manager
    with (
        grpc_server(handler, let_go=lambda: manager.news.put(None)) as address,
        ManagerClient(address, LONG) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        worker = Worker(manager, client, thread)
        losses = worker.losses
        attach(client, 1, welcomes=welcomes, on_loss=lambda lost, *_: losses.append(lost))
        yield worker
        manager.news.put(None)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with worker_of(welcomes=True) as worker:
        yield worker


def test_a_vote_on_the_stream_says_what_a_call_says(worker: Worker) -> None:
    voting = worker.vote()
    cast = worker.manager.next_of("vote")
    assert cast.timeout_ms == LONG.total_seconds() * 1000
    worker.manager.decides(cast.number, decided=COMMITS)
    assert voting.result(END_S) == (True, Fate.CONTINUES)
    assert worker.manager.calls == []
    with worker_of(welcomes=False) as other:
        assert other.vote().result(END_S) == (True, Fate.CONTINUES)
        (call,) = other.manager.calls
    call.worker_id = worker.client._calls.worker_id
    assert call == cast.vote


def test_no_vote_is_sent_on_a_stream_without_a_welcome() -> None:
    with worker_of(welcomes=False) as worker:
        assert worker.vote().result(END_S) == (True, Fate.CONTINUES)
        worker.client.close()
        kinds = []
        while not kinds or kinds[-1] != "detach":
            kinds.append(worker.manager.received.get(timeout=END_S).WhichOneof("kind"))
        assert "vote" not in kinds


def test_a_stream_that_ends_in_a_vote_leads_to_a_call_with_the_same_vote(worker: Worker) -> None:
    voting = worker.vote()
    cast = worker.manager.next_of("vote")
    worker.manager.news.put(None)
    assert voting.result(END_S) == (True, Fate.CONTINUES)
    assert worker.manager.calls == [cast.vote]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("CommitFailed", CommitFailed),
        ("DeadlineExceeded", DeadlineExceeded),
        ("NoErrorOfOurs", QuorumFailed),  # not `CommitFailed`, which says that nobody commits
    ],
)
def test_an_error_is_that_of_a_call(worker: Worker, name: str, kind: type[Exception]) -> None:
    voting = worker.vote()
    number = worker.manager.next_of("vote").number
    worker.manager.decides(number, error=name, reason="group rank 0\nis gone")
    error = voting.exception(END_S)
    assert type(error) is kind
    assert str(error).endswith("group rank 0?is gone")
    assert worker.manager.calls == []


def test_a_vote_without_an_answer_ends_by_its_deadline_and_is_withdrawn(worker: Worker) -> None:
    late = worker.vote(timedelta(milliseconds=50))
    first = worker.manager.next_of("vote").number
    assert str(late.exception(END_S)) == "manager's ShouldCommit timed out after 0.05 s"
    assert worker.manager.next_of("withdrawal").number == first
    voting = worker.vote()
    second = worker.manager.next_of("vote").number
    worker.manager.decides(first, decided=pb.ShouldCommitResponse())
    worker.manager.decides(second, decided=COMMITS)
    assert voting.result(END_S) == (True, Fate.CONTINUES), "not the decision on the vote before"


def test_an_interrupted_vote_is_withdrawn() -> None:
    sent: list[pb.AttachRequest] = []

    def send(message: pb.AttachRequest) -> None:
        sent.append(message)
        if message.WhichOneof("kind") == "vote":
            raise KeyboardInterrupt

    votes = StreamVotes(send)
    votes.opened()
    for number in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            votes.cast(pb.ShouldCommitRequest(), END_S)
        assert sent.pop().withdrawal.number == number
        assert sent.pop().vote.number == number


def test_only_one_thread_at_a_time_votes_on_a_stream() -> None:
    sent: queue.SimpleQueue[pb.AttachRequest] = queue.SimpleQueue()
    votes = StreamVotes(sent.put)
    vote = pb.ShouldCommitRequest()
    assert votes.cast(vote, END_S) is None, "not welcomed yet"
    votes.opened()
    with ThreadPoolExecutor(1) as thread:
        voting = thread.submit(votes.cast, vote, END_S)
        number = sent.get(timeout=END_S).vote.number
        assert votes.cast(vote, END_S) is None
        votes.answered(pb.AttachDecision(number=number))
        assert voting.result(END_S) == pb.AttachDecision(number=number)
    votes.closed()
    assert votes.cast(vote, END_S) is None
    assert sent.empty()


def test_who_listens_receives_first_what_the_manager_had_sent_before(worker: Worker) -> None:
    listening = worker.listen()
    ping = worker.manager.next_of("ping")
    for replica_id in "abc":
        worker.manager.news.put(pb.AttachNews(lost=pb.MemberLost(replica_id=replica_id)))
    assert not listening.done()
    worker.manager.news.put(pb.AttachNews(pong=pb.AttachPong(number=ping.number)))
    listening.result(END_S)
    assert worker.losses == ["a", "b", "c"]


def test_nobody_listens_for_longer_than_the_manager_may_take(worker: Worker) -> None:
    listening = worker.listen(timedelta(milliseconds=50))
    late = worker.manager.next_of("ping").number
    listening.result(END_S)
    listening = worker.listen()
    number = worker.manager.next_of("ping").number
    worker.manager.news.put(pb.AttachNews(pong=pb.AttachPong(number=late)))
    assert not concurrent.futures.wait([listening], 0.1).done, "that was the one before"
    worker.manager.news.put(pb.AttachNews(pong=pb.AttachPong(number=number)))
    listening.result(END_S)
    assert number > late


def test_who_listens_waits_for_the_next_stream_if_one_has_ended(worker: Worker) -> None:
    """A stream ends where the worker stood still, and the manager counted it as gone."""
    listening = worker.listen()
    worker.manager.next_of("ping")
    worker.manager.news.put(None)
    worker.manager.next_of("hello")
    worker.manager.news.put(pb.AttachNews(lost=pb.MemberLost(replica_id="a")))
    ping = worker.manager.next_of("ping")
    assert not listening.done()
    worker.manager.news.put(pb.AttachNews(pong=pb.AttachPong(number=ping.number)))
    listening.result(END_S)
    assert worker.losses == ["a"]


def test_a_manager_that_does_not_come_back_is_waited_for_once(worker: Worker) -> None:
    listening = worker.listen(timedelta(milliseconds=100))
    worker.manager.next_of("ping")
    worker.manager.is_away = True
    worker.manager.news.put(None)
    listening.result(END_S)
    started = time.monotonic()
    worker.client.listen(LONG)
    assert time.monotonic() - started < END_S


def test_listen_returns_at_once_without_a_welcome_and_after_the_end() -> None:
    with worker_of(welcomes=False) as worker:
        worker.listen().result(END_S)
        worker.client.close()
        worker.listen().result(END_S)
        assert worker.manager.received.get(timeout=END_S).WhichOneof("kind") == "hello"
        kinds = []
        while not kinds or kinds[-1] != "detach":
            kinds.append(worker.manager.received.get(timeout=END_S).WhichOneof("kind"))
        assert "ping" not in kinds


def test_a_vote_does_not_wait_for_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing_module, "PHASE_INTERVAL_S", 1000.0)
    outgoing = Outgoing(pb.AttachHello())
    messages = outgoing.messages()
    assert next(messages).WhichOneof("kind") == "hello"
    outgoing.report_phase(PhaseReport(Phase.TRAINING, 3))
    assert next(messages).phase.step == 3
    outgoing.report_phase(PhaseReport(Phase.VOTING, 3))
    outgoing.send(pb.AttachRequest(vote=pb.AttachVote(number=1)))
    assert next(messages).vote.number == 1
    outgoing.end(pb.AttachDetach())
    assert [message.WhichOneof("kind") for message in messages] == ["detach"]


def test_the_latest_phase_is_sent_although_votes_come_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing_module, "PHASE_INTERVAL_S", 0.0)
    outgoing = Outgoing(pb.AttachHello())
    messages = outgoing.messages()
    next(messages)
    for step in range(3):
        outgoing.report_phase(PhaseReport(Phase.VOTING, step))
        outgoing.send(pb.AttachRequest(vote=pb.AttachVote(number=step)))
        sent = [next(messages) for _ in range(2)]
        assert [message.WhichOneof("kind") for message in sent] == ["vote", "phase"]
        assert sent[1].phase.step == step
    outgoing.end()
    assert list(messages) == []
