"""Tests votes over gRPC: on the workers' streams, by calls, and by both, with the same results."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from support.running import Line, attach, line_to, start_manager

from torchft_svc.coordination import LighthouseServer, ManagerClient
from torchft_svc.coordination.stream_votes import StreamVotes
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.manager.commit_barrier import CommitBarrier
from torchft_svc.core.quorum.term import Fate, Wish
from torchft_svc.core.quorum.types import Vote, WorkerRequest
from torchft_svc.errors import CommitFailed, RequestRefused, Unreachable
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.testing.proxy import Proxy

LONG = timedelta(seconds=10)
END_S = 30.0
# gRPC has begun the call by then: an interrupt within that would leave its locks taken for good.
CALLED_S = 0.2
Decision = tuple[bool, Fate]


@pytest.fixture
def manager() -> Iterator[str]:
    """The manager of a group of two workers, the only one of its job."""
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse,
        start_manager(lighthouse.address(), world_size=2) as manager,
    ):
        yield manager.address()


class Worker:
    """``num_calls``: how many votes were sent by a call."""

    def __init__(self, address: str, rank: int) -> None:
        self.client = ManagerClient(address, LONG)
        self.rank = rank
        self.num_calls = 0
        self.breaks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(2)
        send = self.client._send_vote

        def count(request: pb.ShouldCommitRequest, timeout: timedelta) -> pb.ShouldCommitResponse:
            self.num_calls += 1
            return send(request, timeout)

        self.client._send_vote = count
        attach(self.client, rank, on_break=lambda: self.breaks.put(True))

    def ask(self, step: int) -> Future[Any]:
        request = WorkerRequest(group_rank=self.rank, step=step, steady=True)
        return self._threads.submit(self.client.ask, request, LONG)

    def vote(
        self, step: int, *, yes: bool = True, timeout: timedelta = LONG, wish: Wish = Wish.NONE
    ) -> Future[Decision]:
        vote = Vote(group_rank=self.rank, step=step, should_commit=yes, wish=wish)
        return self._threads.submit(self.client.vote, vote, timeout)

    def close(self) -> None:
        self.client.close()
        self._threads.shutdown()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[Vote | None]:
    """The votes that managers of this process have received, as they come, and None for each that
    was withdrawn."""
    seen: queue.SimpleQueue[Vote | None] = queue.SimpleQueue()
    count, withdraw = CommitBarrier.count_vote, CommitBarrier.withdraw_vote

    def record_vote(barrier: CommitBarrier, vote: Vote, *rest: Any) -> Any:
        answers = count(barrier, vote, *rest)
        seen.put(vote)
        return answers

    def record_withdrawal(barrier: CommitBarrier, caller: int) -> Any:
        answers = withdraw(barrier, caller)
        seen.put(None)
        return answers

    monkeypatch.setattr(CommitBarrier, "count_vote", record_vote)
    monkeypatch.setattr(CommitBarrier, "withdraw_vote", record_withdrawal)
    return seen


@pytest.fixture(params=["on streams", "by calls"])
def num_calls(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """The way to send votes; the result counts the calls that were made for that many votes."""
    if request.param == "on streams":
        return lambda votes: 0
    monkeypatch.setattr(StreamVotes, "opened", lambda _: None)  # as with an older manager
    return lambda votes: votes


@pytest.fixture
def workers(manager: str, num_calls: Any) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Worker(manager, rank))) for rank in range(2)]


def meet(workers: list[Worker], step: int = 0) -> None:
    for asked in [worker.ask(step) for worker in workers]:
        asked.result(END_S)


def decisions(*votes: Future[Decision]) -> list[Decision]:
    return [vote.result(END_S) for vote in votes]


def failures(*votes: Future[Decision]) -> list[str]:
    found = [vote.exception(END_S) for vote in votes]
    assert all(isinstance(each, CommitFailed) for each in found), found
    return [str(each) for each in found]


CONTINUES, ENDS, ABORTED = ((True, Fate.CONTINUES), (True, Fate.ENDS), (False, Fate.ABORTED))


def test_all_workers_get_the_same_decision_step_after_step(
    workers: list[Worker], num_calls: Callable[[int], int]
) -> None:
    a, b = workers
    meet(workers)
    for step in range(5):
        assert decisions(a.vote(step), b.vote(step)) == [CONTINUES] * 2
    assert decisions(a.vote(5, wish=Wish.SOME), b.vote(5)) == [ENDS] * 2
    meet(workers, step=6)
    lost = (True, Fate.ABORTED)
    assert decisions(a.vote(6, wish=Wish.ALONE), b.vote(6)) == [lost] * 2
    meet(workers, step=7)
    assert decisions(a.vote(7, yes=False)) == [ABORTED], "it does not wait for the other"
    assert decisions(b.vote(7)) == [ABORTED]
    assert [worker.num_calls for worker in workers] == [num_calls(8)] * 2


def test_a_worker_that_has_gone_on_shows_another_manager_what_the_last_one_decided(
    workers: list[Worker],
) -> None:
    """The last update of the worker may have failed, so that its weights are still at that step."""
    a, b = workers
    a.client._calls.record_answer(quorum_id=1, num_groups=1, round_=7)
    vote = a.vote(8)
    b.client.report_phase(PhaseReport(Phase.TRAINING, 8, went_on_to=9))
    assert decisions(vote) == [CONTINUES]


def test_a_worker_of_an_older_version_votes_by_a_call(
    manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        contextlib.closing(Worker(manager, 0)) as a,
        monkeypatch.context() as patched,
    ):
        patched.setattr(StreamVotes, "opened", lambda _: None)
        with contextlib.closing(Worker(manager, 1)) as b:
            meet([a, b])
            for step in range(2):
                assert decisions(a.vote(step), b.vote(step)) == [CONTINUES] * 2
            assert (a.num_calls, b.num_calls) == (0, 2)


def test_a_vote_that_is_refused(workers: list[Worker]) -> None:
    a, _ = workers
    vote = a.vote(0)
    assert isinstance(vote.exception(END_S), RequestRefused)
    meet(workers, step=5)
    refused = a.vote(4).exception(END_S)
    assert isinstance(refused, RequestRefused)
    assert str(refused) == "the vote is for step 4, the group is at step 5"
    assert decisions(*(worker.vote(5) for worker in workers)) == [CONTINUES] * 2


@pytest.mark.usefixtures("early_reasons")
def test_a_vote_that_nobody_joins_ends_with_the_reason(workers: list[Worker]) -> None:
    a, b = workers
    meet(workers)
    late = a.vote(0).exception(END_S)
    assert str(late) == (
        "manager's ShouldCommit timed out after 10 s: group rank 1 of 2 workers has not voted"
    )
    assert failures(b.vote(0)) == ["no commit decision: group rank 0 gave up waiting"]


def test_a_worker_that_stops_in_the_vote_of_the_others(workers: list[Worker]) -> None:
    a, b = workers
    meet(workers)
    voting = a.vote(0)
    b.client.close()
    assert failures(voting) == ["no commit decision: group rank 1 is gone: it has shut down"]


def test_an_interrupted_vote_is_withdrawn(
    workers: list[Worker], counted: queue.SimpleQueue[Vote | None]
) -> None:
    a, b = workers
    meet(workers)

    def interrupt() -> None:
        counted.get(timeout=END_S)
        time.sleep(CALLED_S)
        signal.raise_signal(signal.SIGUSR1)  # to this thread: the other one is not woken

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupted)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            a.client.vote(Vote(group_rank=0, step=0, should_commit=True), timedelta(days=1))
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert counted.get(timeout=END_S) is None
    assert failures(b.vote(0)) == ["no commit decision: group rank 0 gave up waiting"]


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not noticed"])
def test_a_connection_that_breaks_while_others_have_not_voted(
    manager: str, num_calls: Any, counted: queue.SimpleQueue[Vote | None], noticed: bool
) -> None:
    """The manager considers the worker gone, so nobody commits; the worker itself learns that when
    it votes again."""
    with (
        Proxy(manager) as proxy,
        contextlib.closing(Worker(proxy.url, 0)) as a,
        contextlib.closing(Worker(manager, 1)) as b,
    ):
        meet([a, b])
        if not noticed:
            proxy.hold()
        voting = a.vote(0)
        if noticed:
            counted.get(timeout=END_S)
        proxy.cut()
        proxy.release()
        assert a.breaks.get(timeout=END_S)
        reasons = failures(vote_again(a, voting), b.vote(0))
        assert len(set(reasons)) == 1
        # By a call, its end may be noticed before that of the stream.
        assert reasons[0].startswith("no commit decision: group rank 0 ")


def test_a_decision_that_is_lost_on_the_way_is_sent_again(
    manager: str, num_calls: Any, counted: queue.SimpleQueue[Vote | None]
) -> None:
    """The repeated vote is not counted twice."""
    with (
        Proxy(manager) as proxy,
        contextlib.closing(Worker(proxy.url, 0)) as a,
        contextlib.closing(Worker(manager, 1)) as b,
    ):
        meet([a, b])
        voting = a.vote(0)
        counted.get(timeout=END_S)
        proxy.hold()
        assert decisions(b.vote(0)) == [CONTINUES]
        proxy.cut()
        proxy.release()
        assert decisions(vote_again(a, voting)) == [CONTINUES]


def vote_again(worker: Worker, voting: Future[Decision], step: int = 0) -> Future[Decision]:
    """Vote as a round does while its manager cannot be reached."""
    while isinstance(voting.exception(END_S), Unreachable):
        voting = worker.vote(step)
    return voting


class Stream:
    """A stream of an attached worker: its messages, and those that it receives."""

    def __init__(self, line: Line, rank: int, worker_id: str) -> None:
        self._said: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._rank, self._worker_id = rank, worker_id
        self.send(hello={"rank": rank, "worker_id": worker_id})
        self._news: Any = line.channel.stream_stream(
            "/torchft.ManagerService/Attach",
            request_serializer=pb.AttachRequest.SerializeToString,
            response_deserializer=pb.AttachNews.FromString,
        )(iter(self._said.get, None), timeout=END_S)
        assert next(self._news) == pb.AttachNews(welcome=pb.AttachWelcome())

    def send(self, **message: Any) -> None:
        self._said.put(pb.AttachRequest(**message))

    def vote(self, number: int, step: int, *, yes: bool = True, timeout_ms: int = 10_000) -> None:
        vote = {
            "rank": self._rank,
            "worker_id": self._worker_id,
            "step": step,
            "should_commit": yes,
        }
        self.send(vote={"vote": vote, "number": number, "timeout_ms": timeout_ms})

    def decision(self) -> pb.AttachDecision:
        found = next(self._news)
        assert found.WhichOneof("kind") == "decision", found
        return found.decision

    def end(self) -> None:
        self._said.put(None)
        for _ in self._news:
            pass


@pytest.fixture
def streams(manager: str) -> Iterator[list[Stream]]:
    """Streams of both workers, which have met at step 0."""
    with line_to(manager) as line:
        streams = [Stream(line, rank, f"w{rank}") for rank in range(2)]
        asked = [line.ask_manager(rank=rank, worker_id=f"w{rank}") for rank in range(2)]
        for each in asked:
            each.result()
        yield streams
        for stream in streams:
            stream.end()


def test_a_withdrawn_vote_frees_the_others(streams: list[Stream]) -> None:
    a, b = streams
    a.vote(3, step=0)
    a.send(withdrawal={"number": 2})  # that of an earlier vote, which has its decision
    a.send(withdrawal={"number": 3})
    a.vote(4, step=0)
    gave_up = {"error": "CommitFailed", "reason": "group rank 0 gave up waiting"}
    assert a.decision() == pb.AttachDecision(number=4, **gave_up)
    b.vote(1, step=0)
    assert b.decision() == pb.AttachDecision(number=1, **gave_up)


def test_a_late_withdrawal_changes_nothing(
    streams: list[Stream], counted: queue.SimpleQueue[Vote | None]
) -> None:
    a, b = streams
    a.vote(1, step=0)
    a.send(withdrawal={"number": 7})
    counted.get(timeout=END_S)
    b.vote(1, step=0)
    commits = pb.ShouldCommitResponse(should_commit=True, fate=pb.FATE_ENDS)
    assert [each.decision() for each in streams] == [
        pb.AttachDecision(number=1, decided=commits)
    ] * 2
    a.send(withdrawal={"number": 1})
    a.vote(2, step=0)
    assert a.decision() == pb.AttachDecision(number=2, decided=commits), "sent once more"


def test_the_next_vote_takes_the_place_of_one_that_was_not_withdrawn(
    streams: list[Stream],
) -> None:
    a, b = streams
    a.vote(1, step=0)
    a.vote(2, step=0, yes=False)
    decided = a.decision()
    assert (decided.number, decided.error, decided.reason) == (
        2,
        "CommitFailed",
        "group rank 0 gave up waiting",
    )
    b.vote(1, step=0)
    assert b.decision().reason == decided.reason


def test_a_vote_ends_with_its_stream_also_if_the_worker_has_another(
    manager: str, streams: list[Stream], counted: queue.SimpleQueue[Vote | None]
) -> None:
    a, b = streams
    a.vote(1, step=0)
    counted.get(timeout=END_S)
    with line_to(manager) as line:
        again = Stream(line, 0, "w0")
        a.end()
        b.vote(1, step=0)
        assert b.decision().reason == "group rank 0 gave up waiting"
        again.end()


@pytest.mark.parametrize("timeout_ms", [0, -1])
def test_a_vote_waits_no_longer_than_its_worker(streams: list[Stream], timeout_ms: int) -> None:
    a, _ = streams
    a.vote(1, step=0, timeout_ms=timeout_ms)
    decided = a.decision()
    assert (decided.number, decided.error) == (1, "DeadlineExceeded")
    assert decided.reason.endswith("group rank 1 of 2 workers has not voted")
