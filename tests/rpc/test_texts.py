"""Texts from the network reach logs and terminals as one line, whoever sends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest
from support.running import (
    attach,
    eventually,
    failure,
    grpc_server,
    lighthouse_process,
    line_to,
    manager_process,
)

from torchft_svc.coordination import LighthouseClient, ManagerClient
from torchft_svc.core.limits import MAX_REASON_LENGTH, one_line
from torchft_svc.errors import QuorumFailed, TorchFTError
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import fit_for_logs, quorum_from_wire
from torchft_svc.rpc.codec_status import status_from_wire

HOSTILE = "all is well\n2026 ERROR forged \x1b[2J\x07\u202e"
PLAIN = "all is well?2026 ERROR forged ?[2J??"
LONG = "x" * (MAX_REASON_LENGTH + 1)
CALL = timedelta(seconds=20)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("as it is: \N{SNOWMAN}", "as it is: \N{SNOWMAN}"),
        (HOSTILE, PLAIN),
        ("\udcff\x00", "??"),
        (LONG, "x" * (MAX_REASON_LENGTH - 3) + "..."),
        ("", ""),
    ],
)
def test_one_line(text: str, shown: str) -> None:
    assert one_line(text) == shown


@pytest.mark.parametrize(
    "news",
    [
        pb.SessionNews(kill={"reason": HOSTILE}),
        pb.SessionNews(drain={"reason": HOSTILE}),
        pb.SessionNews(lost={"reason": HOSTILE, "replica_id": HOSTILE, "quorum_id": 7}),
        pb.SessionNews(waiting={"replica_id": HOSTILE}),
        pb.SessionNews(refusal={"reason": HOSTILE, "error": HOSTILE}),
        pb.AttachNews(over={"reason": HOSTILE}),
        pb.AttachNews(decision={"reason": HOSTILE, "error": HOSTILE}),
        pb.AttachNews(kill={"reason": LONG}),
    ],
    ids=lambda news: str(news.WhichOneof("kind")),
)
def test_each_kind_of_news(news: Any) -> None:
    shown = str(fit_for_logs(news))
    assert r"\n2026" not in shown
    assert r"\033" not in shown
    assert LONG not in shown
    assert ("quorum_id" in shown) == (news.WhichOneof("kind") == "lost")


@pytest.mark.parametrize("field", ["replica_id", "address", "store_address"])
def test_a_quorum_whose_members_cannot_be_shown_is_not_taken(field: str) -> None:
    message = pb.Quorum(participants=[{"replica_id": "a:1"}, {field: HOSTILE}])
    with pytest.raises(QuorumFailed, match="cannot be printed") as caught:
        quorum_from_wire(message)
    assert str(caught.value).isprintable()


def test_what_status_shows() -> None:
    message = pb.LighthouseStatusResponse()
    message.jobs.add(job=HOSTILE, waiting_for=HOSTILE).groups.add(replica_id=HOSTILE)
    (job,) = status_from_wire(message)
    assert (job.job, job.waiting_for, job.groups[0].replica_id) == (PLAIN, PLAIN, PLAIN)


@pytest.mark.processes
@pytest.mark.parametrize("order", ["kill", "drain"])
def test_a_manager_s_orders_reach_its_workers_as_one_line(order: str) -> None:
    shown: list[str] = []
    with (
        lighthouse_process() as lighthouse,
        manager_process(lighthouse.address) as manager,
        ManagerClient(manager.address, CALL) as worker,
        ManagerClient(manager.address, CALL) as stranger,
    ):
        attach(
            worker, 0, on_kill=shown.append, on_drain=lambda command: shown.append(command.reason)
        )
        getattr(stranger, order)(HOSTILE + LONG)
        eventually(lambda: shown)
        assert shown[0].startswith(PLAIN)
        assert len(shown[0]) == MAX_REASON_LENGTH
        assert "\x1b" not in manager.errors()


@pytest.mark.processes
def test_the_lighthouse_learns_why_a_group_was_killed_whatever_the_reason() -> None:
    with (
        lighthouse_process("--min-replicas=2") as lighthouse,
        manager_process(lighthouse.address) as manager,
        ManagerClient(manager.address, CALL) as stranger,
        line_to(manager.address) as line,
        LighthouseClient(lighthouse.address, CALL) as client,
    ):
        line.ask_manager(worker_id="w", timeout_s=20)
        eventually(client.status)  # it has a session
        stranger.kill(HOSTILE + LONG)
        eventually(lambda: PLAIN in lighthouse.errors())
        assert "group left" in lighthouse.errors()
        assert "group lost" not in lighthouse.errors()


class _Liar(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A lighthouse and a manager that says what it likes."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def service(self, details: Any) -> Any:
        if details.method.endswith(("/Session", "/Attach")):
            return grpc.stream_stream_rpc_method_handler(self._news)
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    def _refuse(self, request: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, HOSTILE)
        return b""

    def _news(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield pb.SessionNews(welcome={}).SerializeToString()
        yield pb.SessionNews(lost={"replica_id": HOSTILE, "reason": HOSTILE}).SerializeToString()
        self.is_over.wait(10)
        context.abort(grpc.StatusCode.UNAVAILABLE, HOSTILE)


@pytest.mark.processes
def test_a_lying_lighthouse_forges_no_line_in_a_manager_s_log() -> None:
    liar = _Liar()
    with (
        grpc_server(liar, liar.is_over.set) as address,
        manager_process(address, "--connect-timeout-ms=300") as manager,
    ):
        eventually(lambda: f"group lost replica={PLAIN}" in manager.errors())
        liar.is_over.set()
        eventually(lambda: "lost the lighthouse" in manager.errors())
        assert "\n2026 ERROR forged" not in manager.errors()
        assert "\x1b" not in manager.errors()
        with line_to(manager.address) as line:
            assert failure(line.ask_manager(worker_id="w", timeout_s=20))[1].isprintable()


@pytest.mark.processes
def test_a_lying_service_forges_no_line_in_a_trainer_s_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    liar = _Liar()
    received: list[str] = []
    with grpc_server(liar, liar.is_over.set) as address:
        with LighthouseClient(address, CALL) as client, pytest.raises(TorchFTError) as caught:
            client.heartbeat("a:1", CALL)
        assert str(caught.value) == PLAIN
        with ManagerClient(address, CALL) as worker:
            attach(worker, 0, on_loss=lambda *news: received.extend(map(str, news)))
            eventually(lambda: received)
            liar.is_over.set()
            eventually(lambda: "no stream to the manager" in caplog.text)
    assert received[:2] == [PLAIN, PLAIN]
    assert all(record.getMessage().isprintable() for record in caplog.records)
