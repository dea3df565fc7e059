"""Tests that garbage on either port disturbs nobody, and that logs stay short."""

from __future__ import annotations

import contextlib
import math
import random
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from support.hostile import PREFACE, frame
from support.running import (
    Line,
    Process,
    eventually,
    failure,
    lighthouse_process,
    line_to,
    manager_process,
)

from torchft_svc.core.limits import MAX_DURATION_MS, MAX_REASON_LENGTH
from torchft_svc.core.pieces import finish
from torchft_svc.core.quorum.activity import HANGING_PHASES
from torchft_svc.core.quorum.lighthouse.overview import GroupStatus, JobStatus
from torchft_svc.core.quorum.tally import MAX_EVENTS_SENT, MAX_LOST_NAMED
from torchft_svc.core.quorum.types import MAX_DIFFERENCES
from torchft_svc.errors import RequestRefused
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import difference_from_wire, difference_to_wire, report_from_wire
from torchft_svc.rpc.codec_session import beat_from_wire
from torchft_svc.rpc.codec_status import status_to_wire

pytestmark = pytest.mark.processes

MAX_LOG_BYTES = 6000
CALL_S = 20.0


GARBAGE = {
    "random bytes": random.Random(7).randbytes(4096),
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/1 post": b"POST /torchft.ManagerService/Kill HTTP/1.1\r\nContent-Length: 4\r\n\r\nkill",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(150),
    "nothing": b"",
    "half a preface": PREFACE[:10],
    "headers that cannot be decoded": PREFACE + frame(4, 0, 0) + frame(1, 4, 1, b"\xff" * 100),
    "a frame of 16 MB": PREFACE + frame(4, 0, 0) + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "a flood of pings": PREFACE + frame(4, 0, 0) + frame(6, 0, 0, bytes(8)) * 2000,
    "a flood of resets": PREFACE + frame(4, 0, 0) + frame(3, 0, 1, bytes(4)) * 2000,
}


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Process]:
    # On a slow machine too, no line of the log is about a group that asks too seldom.
    with lighthouse_process("--log-level=info", "--heartbeat-timeout-ms=60000") as process:
        yield process
        assert "Traceback" not in process.errors(), process.errors()
        assert len(process.errors()) < MAX_LOG_BYTES, process.errors()


@pytest.fixture(scope="module")
def manager(lighthouse: Process) -> Iterator[Process]:
    with manager_process(lighthouse.address, "--job-id=garbage") as process:
        yield process
        assert "Traceback" not in process.errors(), process.errors()
        assert len(process.errors()) < MAX_LOG_BYTES, process.errors()


@pytest.fixture(params=["lighthouse", "manager"])
def service(
    request: pytest.FixtureRequest, lighthouse: Process, manager: Process
) -> Iterator[tuple[Process, Line]]:
    """Either service, with a line that was there before the garbage and must go on after it."""
    process = {"lighthouse": lighthouse, "manager": manager}[request.param]
    with line_to(process.address) as line:
        check_serves(process, line)
        yield process, line
        check_serves(process, line)
        with line_to(process.address) as newcomer:
            check_serves(process, newcomer)


def check_serves(process: Process, line: Line) -> None:
    assert process.is_running()
    if "lighthouse" in process.module:
        assert line.quorum("a:1", timeout_s=CALL_S).result().quorum.quorum_id
    else:
        assert line.ask_manager(worker_id="w", timeout_s=CALL_S).result().quorum_id


def method(process: Process, name: str) -> str:
    service = "LighthouseService" if "lighthouse" in process.module else "ManagerService"
    return f"/torchft.{service}/{name}"


def raw_call(line: Line, path: str, body: bytes) -> tuple[grpc.StatusCode, str]:
    """The failure of a call whose message is ``body``."""
    return failure(line.channel.unary_unary(path).future(body, timeout=CALL_S))


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_bytes_disturb_nobody(service: tuple[Process, Line], kind: str) -> None:
    process, _ = service
    for _ in range(3):
        with (
            contextlib.suppress(OSError),  # the server may hang up while we talk
            socket.create_connection(("127.0.0.1", process.port), timeout=CALL_S) as raw,
        ):
            raw.sendall(GARBAGE[kind])
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(65536):
                pass


@pytest.mark.parametrize(
    "body",
    [b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 9, b"\x0a\x05abc"],
    ids=["a huge claim", "no field", "cut off"],
)
def test_a_truncated_message_is_refused_with_one_sentence(
    service: tuple[Process, Line], body: bytes
) -> None:
    process, line = service
    code, reason = raw_call(line, method(process, "Quorum"), body)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert reason == "the request is not a message of torchft.proto"
    refusal = f"refused '{method(process, 'Quorum')}' from ipv4:127.0.0.1:"
    eventually(lambda: refusal in process.errors())


def test_an_oversized_message_is_refused(service: tuple[Process, Line]) -> None:
    process, line = service
    code, reason = raw_call(line, method(process, "Quorum"), bytes(1_000_000))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in reason


def test_an_unknown_method_is_refused(service: tuple[Process, Line]) -> None:
    process, line = service
    code, _ = raw_call(line, method(process, "Nonsense"), b"")
    assert code is grpc.StatusCode.UNIMPLEMENTED
    refusal = "refused 'an unknown method' from a caller: there is no "
    eventually(lambda: refusal in process.errors())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "replica_id is empty"),
        ("a\nb:1", "replica_id 'a\\nb:1' contains characters that cannot be printed"),
        ("\x1b[2J", "replica_id '\\x1b[2J' contains characters that cannot be printed"),
        ("x" * 100_000, "replica_id has 100000 characters, 256 are allowed"),
    ],
)
def test_names_that_would_break_a_log_are_refused_by_the_lighthouse(
    lighthouse: Process, name: str, sentence: str
) -> None:
    beat = pb.LighthouseHeartbeatRequest(replica_id=name)
    leave = pb.LighthouseLeaveRequest(replica_id=name)
    with line_to(lighthouse.address) as line:
        calls = [
            line.quorum(name),
            line.call("LighthouseService/Heartbeat", beat, CALL_S, None),
            line.call("LighthouseService/Leave", leave, CALL_S, None),
        ]
        for call in calls:
            assert failure(call) == (grpc.StatusCode.INVALID_ARGUMENT, sentence)


def test_a_name_of_a_megabyte_is_refused_in_a_session_too(lighthouse: Process) -> None:
    with line_to(lighthouse.address) as line:
        for name in ("x" * 200_000, "a\nb", ""):
            code, reason = session_failure(line, pb.SessionRequest(hello={"replica_id": name}))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert reason.startswith("replica_id ")


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        ([], "a session begins with a hello; none came"),
        ([{"beat": {}}], "a session begins with a hello"),
        ([{"hello": {"replica_id": "s:1"}}, {}], "a session does not accept an empty message"),
        (
            [{"hello": {"replica_id": "s:1"}}, {"hello": {"replica_id": "s:1"}}],
            "a session does not accept hello",
        ),
        (
            [
                {"hello": {"replica_id": "s:1"}},
                {"question": {"requester": {"replica_id": "t:1"}}},
            ],
            "the session of 's:1' cannot ask for 't:1'",
        ),
    ],
)
def test_a_session_that_breaks_the_protocol_is_informed(
    lighthouse: Process, requests: list[dict[str, object]], sentence: str
) -> None:
    with line_to(lighthouse.address) as line:
        found = session_failure(line, *(pb.SessionRequest(**fields) for fields in requests))
    assert found == (grpc.StatusCode.INVALID_ARGUMENT, sentence)


GOOD_NODE: dict[str, Any] = {"node_id": "n", "host": "h", "num_workers": 1}
GOOD_HELLO: dict[str, Any] = {
    "run_id": "garbage",
    "node": GOOD_NODE,
    "settings": {"min_nodes": 2, "max_nodes": 2, "join_timeout_ms": 60_000},
    "state": {"status": pb.AGENT_JOINING},
}


def hello(**changes: object) -> dict[str, Any]:
    return {"hello": {**GOOD_HELLO, **changes}}


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        ([], "an agent's stream begins with a hello; none came"),
        ([{"state": {}}], "an agent's stream begins with a hello"),
        ([{"hello": {}}], "run_id is empty"),
        ([hello(run_id="x" * 257)], "run_id has 257 characters, 256 are allowed"),
        ([hello(run_id="a\nb")], "run_id 'a\\nb' contains characters that cannot be printed"),
        ([hello(node={})], "node_id is empty"),
        ([hello(node={"node_id": "n"})], "node 'n' names no host"),
        (
            [hello(node={**GOOD_NODE, "num_workers": 2**40})],
            "node 'n' has 1099511627776 workers, must have 1 to 1024",
        ),
        ([hello(node={**GOOD_NODE, "rank": -1})], "node rank -1 is not in 0 to 9999"),
        ([hello(settings={})], "0:0 nodes: 1 <= min <= max <= 10000 is needed"),
        (
            [hello(settings={"min_nodes": 1, "max_nodes": 1, "join_timeout_ms": -1})],
            "join_timeout_s is -0.001, must be 0 to 1e7 seconds",
        ),
        ([hello(state={})], "an agent's status 0 is not known"),
        ([hello(state={"status": 99})], "an agent's status 99 is not known"),
        (
            [hello(state={"status": pb.AGENT_JOINING, "store_port": 2**16})],
            "port 65536 is not in 0 to 65535",
        ),
        ([hello(world=b"\xff" * 9)], "the world is not a message of torchft.proto"),
        ([hello(), {}], "an agent's stream does not accept an empty message"),
        ([hello(), hello()], "an agent's stream does not accept hello"),
        (
            [hello(), {"leave": {"reason": "x" * 2000}}],
            "reason has 2000 characters, 1000 are allowed",
        ),
    ],
)
def test_an_agent_that_breaks_the_protocol_is_informed(
    lighthouse: Process, requests: list[dict[str, Any]], sentence: str
) -> None:
    with line_to(lighthouse.address) as line:
        found = agent_failure(line, *(pb.AgentRequest(**fields) for fields in requests))
    assert found == (grpc.StatusCode.INVALID_ARGUMENT, sentence)


@pytest.mark.parametrize(
    "changes",
    [
        {"round": -1},
        {"round": 2**60},
        {"master_port": 0},
        {"nodes": []},
        {"nodes": [GOOD_NODE, GOOD_NODE]},
        {"nodes": [{"node_id": "n"}]},
    ],
)
def test_a_world_that_cannot_be_is_refused(lighthouse: Process, changes: dict[str, object]) -> None:
    fields = {"round": 3, "nodes": [GOOD_NODE], "master_port": 1, **changes}
    request = pb.AgentRequest(**hello(world=pb.World(**fields).SerializeToString()))
    with line_to(lighthouse.address) as line:
        code, reason = agent_failure(line, request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(reason.splitlines()) == 1


def agent_failure(line: Line, *requests: pb.AgentRequest) -> tuple[grpc.StatusCode, str]:
    invoke = line.channel.stream_stream(
        "/torchft.LighthouseService/Rendezvous",
        request_serializer=pb.AgentRequest.SerializeToString,
        response_deserializer=pb.AgentNews.FromString,
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(invoke(iter(requests), timeout=CALL_S))
    return caught.value.code(), caught.value.details()


def test_a_phase_that_only_a_newer_client_knows_is_not_the_one_before() -> None:
    for found in (pb.PHASE_TRAINING, 77):
        beat = beat_from_wire(pb.SessionBeat(phase=found, step=3))
        assert (beat.phase in HANGING_PHASES) == (found == pb.PHASE_TRAINING)


@pytest.mark.parametrize("field", ["received_bytes", "state_bytes"])
def test_a_heal_of_fewer_than_no_bytes_is_refused(field: str) -> None:
    with pytest.raises(RequestRefused, match=f"{field} is -1"):
        beat_from_wire(pb.SessionBeat(phase=pb.PHASE_HEALING, **{field: -1}))
    with pytest.raises(RequestRefused, match=f"{field} is -1"):
        report_from_wire(pb.AttachPhase(phase=pb.PHASE_HEALING, **{field: -1}))


@pytest.mark.parametrize("phase_ms", [2**63 - 1, -(2**63)])
def test_a_phase_of_all_times_does_not_spoil_the_status(phase_ms: int) -> None:
    beat = beat_from_wire(pb.SessionBeat(phase=pb.PHASE_TRAINING, phase_ms=phase_ms))
    group = GroupStatus(replica_id="a:1", phase=beat.phase, phase_s=beat.lasts_s)
    (job,) = finish(status_to_wire([JobStatus(job="job", groups=(group,))])).jobs
    assert job.groups[0].phase_ms in (0, MAX_DURATION_MS)


def session_failure(line: Line, *requests: pb.SessionRequest) -> tuple[grpc.StatusCode, str]:
    invoke = line.channel.stream_stream(
        "/torchft.LighthouseService/Session",
        request_serializer=pb.SessionRequest.SerializeToString,
        response_deserializer=pb.SessionNews.FromString,
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(invoke(iter(requests), timeout=CALL_S))
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1},
        {"step": 1, "commit_failures": -5},
        {"checkpoint_server_addr": "x" * 1000},
        {"checkpoint_server_addr": "a\nb"},
        {"worker_id": "\x00"},
    ],
)
def test_fields_out_of_bounds_are_refused_by_the_manager(
    manager: Process, fields: dict[str, object]
) -> None:
    with line_to(manager.address) as line:
        code, reason = failure(line.ask_manager(**fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(reason.splitlines()) == 1


def test_a_jobs_name_is_checked(lighthouse: Process) -> None:
    with line_to(lighthouse.address) as line:
        assert failure(line.quorum("a:1", job="x" * 300)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "job has 300 characters, 256 are allowed",
        )


def test_garbage_in_a_session_is_refused(lighthouse: Process) -> None:
    with line_to(lighthouse.address) as line:
        invoke = line.channel.stream_stream("/torchft.LighthouseService/Session")
        hello = pb.SessionRequest(hello={"replica_id": "s:1"}).SerializeToString()
        with pytest.raises(grpc.RpcError, match="the request is not a message"):
            list(invoke(iter([hello, b"\xff" * 9]), timeout=CALL_S))


def test_a_name_that_is_not_text_is_refused_in_one_sentence(lighthouse: Process) -> None:
    with line_to(lighthouse.address) as line:
        code, reason = raw_call(
            line, "/torchft.LighthouseService/Heartbeat", b"\x0a\x03\xff\xfe\xfd"
        )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert reason == "the request is not a message of torchft.proto"


def test_reported_differences_are_limited() -> None:
    differences = [pb.StateDifference(quorum_id=7, step=step, sentence="x") for step in range(100)]
    beat = beat_from_wire(pb.SessionBeat(differences=differences))
    assert [each.step for each in beat.differences] == list(range(100 - MAX_DIFFERENCES, 100))
    for wrong in (
        pb.StateDifference(quorum_id=-1),
        pb.StateDifference(step=-1),
        pb.StateDifference(sentence="x" * (MAX_REASON_LENGTH + 1)),
        pb.StateDifference(sentence="\x1b[31m"),
    ):
        with pytest.raises(RequestRefused):
            beat_from_wire(pb.SessionBeat(differences=[wrong]))
        with pytest.raises(RequestRefused):
            difference_from_wire(wrong)
    assert difference_from_wire(difference_to_wire(beat.differences[0])) == beat.differences[0]


def test_reported_events_are_limited() -> None:
    def made(**fields: Any) -> pb.GroupEvent:
        return pb.GroupEvent(**{"kind": pb.GroupEvent.DISCARDED, "source": "w", **fields})

    beat = beat_from_wire(pb.SessionBeat(events=[made(number=number) for number in range(100)]))
    assert [each.number for each in beat.events] == list(range(100 - MAX_EVENTS_SENT, 100))
    shown = beat_from_wire(pb.SessionBeat(events=[made(cause="\x1b[31m", lost=["a"] * 99)]))
    assert shown.events[0].cause == "?[31m"
    assert len(shown.events[0].lost) == MAX_LOST_NAMED
    assert not beat_from_wire(pb.SessionBeat(events=[pb.GroupEvent(source="w")])).events
    for wrong in (
        made(source=""),
        made(number=-1),
        made(step=-1),
        made(quorum_id=-1),
        made(ago_s=-1.0),
        made(lasts_s=math.nan),
        made(paused_s=math.inf),
        made(healed_bytes=-1),
        made(lost=["\x1b[31m"]),
    ):
        with pytest.raises(RequestRefused):
            beat_from_wire(pb.SessionBeat(events=[wrong]))
    with pytest.raises(RequestRefused, match="waiting_s is nan"):
        beat_from_wire(pb.SessionBeat(tally=pb.Tally(waiting_s=math.nan)))
