"""Tests the lighthouse over gRPC: quorums, signs of life, callers that give up, jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import grpc
import pytest
from support.bounds import Late, check, raises_in_time
from support.running import Line, failure, line_to, members

from torchft_svc.coordination import LighthouseClient, LighthouseServer
from torchft_svc.errors import DeadlineExceeded
from torchft_svc.proto import torchft_pb2 as pb

# How long a living group that has not asked is waited for here.
JOIN_S = 0.3
# The reason is sent a twentieth earlier, at most 0.1 s; with less patience a busy machine could let
# the caller's own clock end the call first.
IMPATIENT = timedelta(seconds=2)
PATIENT = timedelta(seconds=20)


@pytest.fixture
def server() -> Iterator[LighthouseServer]:
    """Wants two groups; waits a moment for living ones that have not asked."""
    join_timeout_ms = int(JOIN_S * 1000)
    with LighthouseServer("127.0.0.1:0", 2, join_timeout_ms) as server:
        yield server


@pytest.fixture
def line(server: LighthouseServer) -> Iterator[Line]:
    with line_to(server.address()) as line:
        yield line


def test_all_members_get_the_same_quorum_sorted_and_untouched(line: Line) -> None:
    late = line.quorum("b:2", step=7, address="b:1", store_address="b:2", world_size=4, data="[1]")
    early = line.quorum("a:1", step=7, world_size=4, shrink_only=True, commit_failures=3)

    answer = early.result()

    assert answer == late.result()
    first, second = answer.quorum.participants
    assert (first.replica_id, first.step, first.shrink_only) == ("a:1", 7, True)
    assert first.commit_failures == 3
    assert (second.address, second.store_address, second.data) == ("b:1", "b:2", "[1]")
    assert second.world_size == 4
    assert abs(answer.quorum.created.ToNanoseconds() / 1e9 - time.time()) < 60


def test_fields_of_newer_clients_are_passed_on_as_they_came(line: Line) -> None:
    """The public release has added one to its members, which its process groups need."""
    ninth = b"\x4a\x06handle"
    late = line.quorum("b:1", step=3)
    member = pb.QuorumMember(replica_id="a:1", step=3)
    member.MergeFromString(ninth)
    request = pb.LighthouseQuorumRequest(requester=member)
    answer = line.call("LighthouseService/Quorum", request, 10.0, None).result()
    assert answer == late.result()
    first, second = answer.quorum.participants
    assert (first.replica_id, first.step) == ("a:1", 3)
    assert first.SerializeToString() == member.SerializeToString()
    assert (
        second.SerializeToString() == pb.QuorumMember(replica_id="b:1", step=3).SerializeToString()
    )


def test_the_id_stays_while_the_members_do(line: Line) -> None:
    def round_(*replica_ids: str, failures: int = 0) -> int:
        asked = [line.quorum(key, commit_failures=failures) for key in replica_ids]
        return asked[0].result().quorum.quorum_id  # type: ignore[no-any-return]

    first = round_("a:1", "b:1")
    assert round_("b:1", "a:1") == first
    grown = round_("a:1", "b:1", failures=1)
    assert grown > first
    line.leave("b:1")
    assert round_("a:1", "c:1") > grown


def test_a_living_group_is_waited_for_and_one_that_leaves_is_not(line: Line) -> None:
    line.beat("late:1")
    began_at = time.monotonic()
    asked = [line.quorum("a:1"), line.quorum("b:1")]
    assert members(asked[0].result()) == ["a:1", "b:1"]
    assert time.monotonic() - began_at >= JOIN_S

    began_at = time.monotonic()
    asked = [line.quorum("a:1")]
    line.leave("b:1", "test")
    asked.append(line.quorum("c:1"))
    assert members(asked[0].result()) == ["a:1", "c:1"]
    if time.monotonic() - began_at >= JOIN_S:
        raise Late("b:1 has left, nobody has to wait for it")


def test_a_caller_that_cancelled_does_not_get_into_the_next_quorum(line: Line) -> None:
    given_up = line.quorum("a:1")
    line.await_askers("a:1")
    given_up.cancel()
    line.await_askers()

    asked = [line.quorum("b:1"), line.quorum("c:1")]

    assert members(asked[0].result()) == members(asked[1].result()) == ["b:1", "c:1"]


def test_a_caller_that_timed_out_does_not_get_into_the_next_quorum(line: Line) -> None:
    code, _ = failure(line.quorum("a:1", timeout_s=0.2))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    line.await_askers()  # the caller's own clock may have been the first

    asked = [line.quorum("b:1"), line.quorum("c:1")]

    assert members(asked[0].result()) == members(asked[1].result()) == ["b:1", "c:1"]


def test_the_reason_is_reported_before_the_callers_deadline(server: LighthouseServer) -> None:
    with LighthouseClient(server.address(), PATIENT) as client:
        began_at = time.monotonic()
        with raises_in_time(TimeoutError, "1 of at least 2 groups ask") as caught:
            client.quorum("a:1", IMPATIENT)
        took_s = time.monotonic() - began_at
    assert took_s > 0.9 * IMPATIENT.total_seconds()
    assert isinstance(caught.value, DeadlineExceeded)
    assert str(caught.value) == (
        "lighthouse's Quorum timed out after 2 s: 1 of at least 2 groups ask (--min-replicas)"
    )


@pytest.mark.usefixtures("early_reasons")
def test_the_reason_names_the_group_that_is_waited_for() -> None:
    waits_long = LighthouseServer("127.0.0.1:0", 2, join_timeout_ms=60_000)
    with waits_long as server, line_to(server.address()) as line:
        asked = [line.quorum(key, timeout_s=100.0) for key in ("a:1", "b:1")]
        assert [members(each.result()) for each in asked] == [["a:1", "b:1"]] * 2
        _, reason = failure(line.quorum("a:1"))
        assert "waiting for b:1: alive, but has not asked" in reason


def test_a_hung_group_that_still_heartbeats_blocks_the_others_only_once(line: Line) -> None:
    for name in ("a:1", "b:1", "hung:1"):
        line.beat(name)
    trained = [line.quorum(key) for key in ("a:1", "b:1", "hung:1")]
    assert len(members(trained[0].result())) == 3

    def round_() -> float:
        began_at = time.monotonic()
        asked = [line.quorum(key) for key in ("a:1", "b:1")]
        line.beat("hung:1")
        assert members(asked[0].result()) == ["a:1", "b:1"]
        return time.monotonic() - began_at

    check("a round with a group that hangs", round_(), JOIN_S)
    if round_() >= JOIN_S:
        raise Late("it is known to be late, and not waited for again")


def test_members_that_arrive_just_after_a_newcomers_join_timeout_are_not_thrown_out(
    line: Line,
) -> None:
    trained = [line.quorum(key) for key in ("a:1", "b:1")]
    assert members(trained[0].result()) == ["a:1", "b:1"]
    newcomer = line.quorum("new:1")
    line.await_askers("new:1")
    line.beat("a:1")
    line.beat("b:1")
    time.sleep(JOIN_S + 0.05)  # the newcomer's own join timeout is over: that is what this is about
    began_at = time.monotonic()
    asked = [newcomer, line.quorum("a:1"), line.quorum("b:1")]
    found = [members(each.result()) for each in asked[:2]]
    if time.monotonic() - began_at >= JOIN_S:
        raise Late("between the members' questions there may have been a join timeout")
    assert [*found, members(asked[2].result())] == [["a:1", "b:1", "new:1"]] * 3


def test_a_repeated_request_takes_the_place_of_the_first(line: Line) -> None:
    first = line.quorum("a:1", step=1)
    line.await_askers("a:1")
    second = line.quorum("a:1", step=1)
    code, reason = failure(first)
    assert code is grpc.StatusCode.ABORTED
    assert reason == "a newer request of 'a:1' has taken the place of this one"
    peer = line.quorum("b:1", step=1)
    assert members(peer.result()) == members(second.result()) == ["a:1", "b:1"]


def test_a_second_group_with_the_name_is_refused_at_once(line: Line) -> None:
    trained = [line.quorum(key) for key in ("a:1", "b:1")]
    assert members(trained[0].result()) == ["a:1", "b:1"]
    twin = line.quorum("a:2")
    line.await_askers("a:2")
    line.beat("a:1")
    code, reason = failure(twin)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert reason == (
        "the name of 'a:2' is taken: 'a:1' is alive; give every replica group a name of its own"
    )


def test_a_group_of_another_size_is_refused_at_once_and_disturbs_nobody(line: Line) -> None:
    trained = [line.quorum(key, world_size=8) for key in ("a:1", "b:1")]
    assert members(trained[0].result()) == ["a:1", "b:1"]
    code, reason = failure(line.quorum("c:1", world_size=4))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "'c:1' has a group world size of 4, 'a:1' of 8: all groups of a job need" in reason
    again = [line.quorum(key, world_size=8) for key in ("a:1", "b:1")]
    assert members(again[0].result()) == ["a:1", "b:1"]


def test_jobs_never_see_each_other(line: Line) -> None:
    fast = [line.quorum(key, job="fast") for key in ("a:1", "b:1")]
    alone = line.quorum("a:1", job="slow")
    unnamed = line.quorum("a:1")
    default = line.quorum("z:1", job="default")

    assert members(fast[0].result()) == ["a:1", "b:1"]
    assert members(unnamed.result()) == members(default.result()) == ["a:1", "z:1"]
    assert not alone.done()
    alone.cancel()


def test_the_client_names_its_job(server: LighthouseServer, line: Line) -> None:
    waiting = line.quorum("a:1", job="mine")
    with LighthouseClient(server.address(), PATIENT, job_id="mine") as client:
        quorum = client.quorum("b:1", PATIENT, data={"k": 1})
    assert [member.replica_id for member in quorum.participants] == ["a:1", "b:1"]
    assert [member.data for member in quorum.participants] == [None, {"k": 1}]
    assert waiting.result().quorum.quorum_id == quorum.quorum_id


def test_200_callers_at_once_get_one_quorum() -> None:
    names = [f"group-{i:03}:1" for i in range(200)]
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=200) as server,
        line_to(server.address()) as line,
    ):
        for _ in range(2):
            answers = [asked.result() for asked in [line.quorum(name) for name in names]]
            assert members(answers[0]) == names
            assert all(answer == answers[0] for answer in answers)


def test_a_job_may_set_its_own_minimum(line: Line) -> None:
    """The lighthouse's is two; another job on it keeps that."""
    small = line.quorum("a:1", job="small", min_replicas=1)
    assert members(small.result()) == ["a:1"]
    large = [line.quorum(key, job="large", min_replicas=3) for key in ("a:1", "b:1")]
    line.await_askers("a:1", "b:1", job="large")
    large.append(line.quorum("c:1", job="large"))
    assert members(large[0].result()) == members(large[2].result()) == ["a:1", "b:1", "c:1"]


def test_a_cold_start_waits_for_a_group_that_comes_a_little_later() -> None:
    server = LighthouseServer("127.0.0.1:0", 1, 60_000, startup_wait_ms=3_000)
    with server, line_to(server.address()) as line:
        early = line.quorum("a:1")
        assert not early.done()
        late = line.quorum("b:1")
        assert members(early.result()) == members(late.result()) == ["a:1", "b:1"]
        # From then on, nobody waits for groups that are not there.
        begun = time.monotonic()
        early, late = line.quorum("a:1", step=1), line.quorum("b:1", step=1)
        assert members(early.result()) == members(late.result()) == ["a:1", "b:1"]
        check("the next quorum", time.monotonic() - begun, 0.5)


def test_a_cold_start_alone_waits_no_longer() -> None:
    server = LighthouseServer("127.0.0.1:0", 1, 60_000, startup_wait_ms=200)
    with server, line_to(server.address()) as line:
        assert members(line.quorum("a:1", timeout_s=20).result()) == ["a:1"]
