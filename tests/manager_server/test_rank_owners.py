"""Strangers at a manager's port who claim to be one of its workers: they are refused, and the
worker itself notices nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest
from support.running import (
    Line,
    Process,
    attach,
    eventually,
    failure,
    lighthouse_process,
    line_to,
    manager_process,
    start_manager,
)

from torchft_svc.coordination import (
    LighthouseServer,
    ManagerClient,
    QuorumResult,
)
from torchft_svc.proto import torchft_pb2 as pb

pytestmark = pytest.mark.processes
LONG = timedelta(seconds=20)
TAKEN = (
    grpc.StatusCode.INVALID_ARGUMENT,
    "group rank 0 is taken: another worker with this rank is there; "
    "give every worker of the group a rank of its own",
)


@pytest.fixture
def manager() -> Iterator[Process]:
    with (
        lighthouse_process() as lighthouse,
        manager_process(lighthouse.address) as manager,
    ):
        yield manager


@pytest.fixture
def stranger(manager: Process) -> Iterator[Line]:
    with line_to(manager.address) as line:
        yield line


def open_line(line: Line, worker_id: str) -> Any:
    """The news that a worker receives over a stream of its own, open until it is cancelled."""
    ended = threading.Event()

    def messages() -> Iterator[pb.AttachRequest]:
        yield pb.AttachRequest(hello={"rank": 0, "worker_id": worker_id})
        ended.wait()

    news = line.channel.stream_stream(
        "/torchft.ManagerService/Attach",
        request_serializer=pb.AttachRequest.SerializeToString,
        response_deserializer=pb.AttachNews.FromString,
    )(messages())
    news.add_callback(ended.set)
    return news


class Worker:
    """A worker of a group of one, which commits one step after the other."""

    def __init__(self, client: ManagerClient) -> None:
        self._client = client
        self.step = 0
        self.ids: set[str] = set()

    def asks(self) -> QuorumResult:
        answer = self._client._quorum(0, self.step, "here", False, LONG)
        self.ids |= set(answer.replica_ids)
        return answer

    def commits(self) -> None:
        assert self._client.should_commit(0, self.step, True, LONG)
        self.step += 1


@pytest.mark.parametrize("attached", [True, False])
def test_a_worker_does_not_notice_a_stranger_with_its_rank(
    manager: Process, stranger: Line, attached: bool
) -> None:
    with ManagerClient(manager.address, LONG) as client:
        if attached:
            attach(client, 0)
        worker = Worker(client)
        worker.asks()
        for _ in range(3):
            asked = stranger.ask_manager(
                rank=0, step=1 << 62, worker_id="evil", checkpoint_server_addr="evil"
            )
            stranger.flush()
            no = stranger.vote(rank=0, step=worker.step, should_commit=False, worker_id="evil")
            assert failure(no) == TAKEN
            with pytest.raises(grpc.RpcError) as refused:
                next(open_line(stranger, "evil"))
            assert (refused.value.code(), refused.value.details()) == TAKEN
            worker.commits()
            assert failure(asked) == TAKEN
            waits = stranger.ask_manager(rank=0, worker_id="evil", timeout_s=20)
            stranger.flush()
            worker.asks()
            assert failure(waits) == TAKEN
        assert len(worker.ids) == 1, "it is no other incarnation"
        assert client._checkpoint_metadata(0, LONG) == "here"


def test_nor_does_one_without_a_worker_id(manager: Process, stranger: Line) -> None:
    """The public release's workers have no id."""
    with line_to(manager.address) as line:
        for step in range(3):
            asked = line.ask_manager(rank=0, step=step)
            assert asked.result().max_step == step
            evil = stranger.ask_manager(rank=0, step=step, worker_id="evil")
            stranger.flush()
            assert failure(stranger.vote(rank=0, step=step, worker_id="evil")) == TAKEN
            assert line.vote(rank=0, step=step, should_commit=True).result().should_commit
            assert failure(evil) == TAKEN


def test_a_stranger_does_not_shorten_the_patience_of_its_group() -> None:
    """The stranger's request is held, and its deadline counts for nobody else."""
    with (
        lighthouse_process("--min-replicas=2") as lighthouse,
        manager_process(lighthouse.address) as manager,
        ManagerClient(manager.address, LONG) as client,
        line_to(manager.address) as evil,
        line_to(lighthouse.address) as peer,
    ):
        attach(client, 0)
        short = evil.ask_manager(rank=0, worker_id="evil", timeout_s=0.5)
        evil.flush()
        worker = Worker(client)
        answers: list[QuorumResult] = []
        thread = threading.Thread(target=lambda: answers.append(worker.asks()))
        thread.start()
        failure(short)
        quorum = peer.quorum("zzz:1", timeout_s=20)
        thread.join()
        assert answers[0].replica_world_size == len(quorum.result().quorum.participants) == 2


@pytest.mark.parametrize("asks_first", [True, False])
def test_the_next_process_takes_over_when_the_line_of_the_one_before_breaks(
    manager: Process, asks_first: bool
) -> None:
    """The next process may be there before the manager has noticed."""
    with contextlib.ExitStack() as stack:
        before, after = (stack.enter_context(line_to(manager.address)) for _ in range(2))
        news = open_line(before, "before")
        next(news)
        first = before.ask_manager(rank=0, step=5, worker_id="before").result()
        if asks_first:
            asked = after.ask_manager(rank=0, step=5, worker_id="after")
            after.flush()
        news.cancel()
        if not asks_first:
            eventually(lambda: "worker gone group_rank=0" in manager.errors())
            later_news = open_line(after, "after")  # open for as long as it is referenced
            next(later_news)
            asked = after.ask_manager(rank=0, step=5, worker_id="after")
        answer = asked.result()
        assert answer.replica_ids != first.replica_ids, "to the others it is another group"
        assert after.vote(rank=0, step=5, should_commit=True, worker_id="after").result()


@pytest.mark.usefixtures("early_news")
def test_the_next_process_takes_over_from_one_without_a_line_that_is_silent() -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse,
        start_manager(lighthouse.address()) as manager,
        line_to(manager.address()) as stranger,
    ):
        with line_to(manager.address()) as before:
            first = before.ask_manager(rank=0, worker_id="before").result()
        answer = stranger.ask_manager(rank=0, worker_id="after", timeout_s=20).result()
        assert answer.replica_ids != first.replica_ids
