"""A lighthouse that takes back what it sent: ids of quorums, the interval of heartbeats."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent import futures
from datetime import timedelta
from typing import Any

import grpc
import pytest
from support.bounds import Late
from support.running import eventually, lighthouse_process, manager_process

from torchft_svc.coordination import ManagerClient
from torchft_svc.errors import QuorumFailed
from torchft_svc.proto import torchft_pb2 as pb

LONG = timedelta(seconds=10)
# Several times the interval of heartbeats.
BEATS_S = 0.8


class Scripted(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each question with a quorum of the asker alone, ``num_times``, under the next of
    ``ids``."""

    def __init__(self, ids: list[int], has_sessions: bool, num_times: int = 1) -> None:
        self._num_times = num_times
        self._ids = iter(ids)
        self._has_sessions = has_sessions

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        if method == "Session" and self._has_sessions:
            return grpc.stream_stream_rpc_method_handler(
                self._session,
                pb.SessionRequest.FromString,
                pb.SessionNews.SerializeToString,
            )
        if method == "Quorum":
            return grpc.unary_unary_rpc_method_handler(
                self._quorum,
                pb.LighthouseQuorumRequest.FromString,
                pb.LighthouseQuorumResponse.SerializeToString,
            )
        if method == "Heartbeat":
            return grpc.unary_unary_rpc_method_handler(lambda *_: b"")
        return None

    def _quorum(self, request: Any, context: Any) -> Any:
        if not request.HasField("requester"):  # as who looks whether it would be taken
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "nobody asks")
        return pb.LighthouseQuorumResponse(quorum=self._next(request))

    def _next(self, question: Any) -> Any:
        members = [question.requester] * self._num_times
        return pb.Quorum(quorum_id=next(self._ids), participants=members)

    def _session(self, requests: Iterator[Any], _: Any) -> Iterator[Any]:
        yield pb.SessionNews(welcome=pb.SessionWelcome())
        for request in requests:
            kind = request.WhichOneof("kind")
            if kind == "question":
                number = request.question.number
                yield pb.SessionNews(quorum=self._next(request.question), answers=number)
            elif kind == "leave":
                return


@contextlib.contextmanager
def scripted(*ids: int, has_sessions: bool) -> Iterator[str]:
    with serving(Scripted(list(ids), has_sessions)) as address:
        yield address


@contextlib.contextmanager
def serving(handler: grpc.GenericRpcHandler) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(10))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(10)


def ask(client: ManagerClient, step: int) -> int:
    return client._quorum(0, step, "", False, LONG).quorum_id


@pytest.mark.processes
def test_i1_a_manager_refuses_an_older_quorum_and_asks_again() -> None:
    with (
        scripted(7, 6, 8, has_sessions=True) as stale,
        manager_process(stale) as manager,
        ManagerClient(manager.address, LONG) as client,
    ):
        assert ask(client, 0) == 7
        with pytest.raises(QuorumFailed, match="quorum 6 is older than quorum 7"):
            ask(client, 1)
        assert ask(client, 1) == 8


@pytest.mark.processes
@pytest.mark.parametrize("has_sessions", [True, False], ids=["session", "calls"])
@pytest.mark.parametrize("wrong", [-1, 2**62, 2**63 - 1])
def test_a_worker_does_not_end_with_an_id_that_no_lighthouse_has_issued(
    wrong: int, has_sessions: bool
) -> None:
    """The manager, and each lighthouse, would refuse the next question, which reports the id."""
    with (
        scripted(7, wrong, 8, has_sessions=has_sessions) as odd,
        manager_process(odd) as manager,
        ManagerClient(manager.address, LONG) as client,
    ):
        assert ask(client, 0) == 7
        with pytest.raises(QuorumFailed, match="the lighthouse answered with a wrong quorum: "):
            ask(client, 1)
        assert ask(client, 1) == 8


@pytest.mark.processes
def test_a_quorum_that_has_a_member_twice() -> None:
    with (
        serving(Scripted([7], has_sessions=True, num_times=2)) as odd,
        manager_process(odd) as manager,
        ManagerClient(manager.address, LONG) as client,
        pytest.raises(QuorumFailed, match="has a member twice"),
    ):
        ask(client, 0)


@pytest.mark.processes
def test_i1_a_manager_with_retries_does_not_send_its_workers_an_older_quorum() -> None:
    with (
        scripted(7, 6, 8, has_sessions=True) as stale,
        manager_process(stale, "--quorum-retries=1") as manager,
        ManagerClient(manager.address, LONG) as client,
    ):
        assert [ask(client, step) for step in (0, 1)] == [7, 8]


@pytest.mark.processes
def test_the_ids_of_a_public_lighthouse_may_begin_anew() -> None:
    with (
        scripted(7, 1, has_sessions=False) as restarted,
        manager_process(restarted) as manager,
        ManagerClient(manager.address, LONG) as client,
    ):
        assert [ask(client, step) for step in (0, 1)] == [7, 1]


@pytest.mark.processes
def test_a_public_lighthouse_in_a_list_takes_over_from_a_dead_one() -> None:
    with (
        scripted(1, 2, has_sessions=False) as public,
        lighthouse_process() as ours,
        manager_process(f"{ours.address},{public}") as manager,
        ManagerClient(manager.address, LONG) as client,
    ):
        if ask(client, 0) <= 2:
            raise Late("ours did not answer in time, so the manager went on to the other one")
        ours.kill()
        assert ask(client, 1) == 1


class Slowing(Scripted):
    """Wants no more beats than one a minute, after the first one."""

    num_beats = 0

    def _session(self, requests: Iterator[Any], _: Any) -> Iterator[Any]:
        yield pb.SessionNews(welcome=pb.SessionWelcome())
        for request in requests:
            self.num_beats += request.WhichOneof("kind") == "beat"
            yield pb.SessionNews(welcome=pb.SessionWelcome(min_interval_ms=60_000))


@pytest.mark.processes
def test_a_manager_beats_less_often_as_soon_as_it_has_to() -> None:
    slowing = Slowing([], has_sessions=True)
    with serving(slowing) as address, manager_process(address):
        eventually(lambda: slowing.num_beats > 0)
        time.sleep(BEATS_S)
        assert slowing.num_beats < 4  # those that were under way
