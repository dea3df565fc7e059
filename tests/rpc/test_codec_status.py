"""Tests that the status of jobs and runs passes over the wire whole."""

from __future__ import annotations

import pytest

from torchft_svc.core.launch.launched_run import NodeStatus, RunStatus
from torchft_svc.core.launch.world import AgentStatus
from torchft_svc.core.pieces import finish
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.incidents import Goodput, Incident, IncidentKind
from torchft_svc.core.quorum.lighthouse.overview import (
    GROUPS_AT_ONCE,
    GoneGroup,
    GroupStatus,
    JobStatus,
)
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec_status import (
    incidents_from_wire,
    incidents_to_wire,
    runs_from_wire,
    status_from_wire,
    status_to_wire,
)


@pytest.mark.parametrize("ended_s", [None, 0.0, 2.5])
def test_a_status_passes_over_the_wire(ended_s: float | None) -> None:
    job = JobStatus(
        job="job",
        quorum_id=7,
        committed_step=5,
        min_replicas=2,
        waiting_for="b: alive, but has not asked",
        groups=(GroupStatus(replica_id="a:1", step=5, phase=Phase.VOTING, phase_s=1.5),),
        num_expected=3,
        num_discarded=4,
        num_heals=1,
        num_differences=3,
        last_difference="in the check of step 4, they differ",
        stalled_s=8.25,
        gone=(GoneGroup(replica_id="c:1", reason="bye", orderly=True, gone_s=0.5),),
        ended_s=ended_s,
        finished=ended_s is not None,
    )
    encoded = finish(status_to_wire([job])).SerializeToString()
    assert status_from_wire(pb.LighthouseStatusResponse.FromString(encoded)) == [job]


@pytest.mark.parametrize(("node_rank", "waits_for_s"), [(0, None), (None, 0.0), (3, 2.5)])
def test_a_runs_status_passes_over_the_wire(
    node_rank: int | None, waits_for_s: float | None
) -> None:
    node = NodeStatus(
        node_id="n",
        host="h",
        node_rank=node_rank,
        num_workers=8,
        status=AgentStatus.WARMING,
        reached=True,
        num_restarts=2,
        silent_s=0.5,
        waits_for_s=waits_for_s,
    )
    run = RunStatus(
        run="run",
        round=7,
        min_nodes=1,
        max_nodes=4,
        phase="paused",
        why="fewer than 2 nodes are left",
        nodes=(node,),
    )
    encoded = finish(status_to_wire([], [run])).SerializeToString()
    message = pb.LighthouseStatusResponse.FromString(encoded)
    assert (status_from_wire(message), runs_from_wire(message)) == ([], [run])


INCIDENT = Incident(
    number=7,
    job="job",
    kind=IncidentKind.MANAGER_DIED,
    cause="its manager died",
    groups=("a:1", "b:1"),
    at=1_795_000_000.25,
    quorum_id=9,
    step=4,
    is_open=True,
    detected_after_s=0.0,
    paused_s=0.125,
    healed_bytes=1 << 40,
    steps_discarded=2,
)
GOODPUT = Goodput(wall_s=10.0, committed_s=7.5, lost_s={"waiting": 2.5}, ratio=0.75)


@pytest.mark.parametrize("goodput", [None, GOODPUT])
def test_a_ledger_passes_over_the_wire(goodput: Goodput | None) -> None:
    encoded = incidents_to_wire([INCIDENT], goodput).SerializeToString()
    message = pb.LighthouseIncidentsResponse.FromString(encoded)
    message.incidents.add(kind="of a newer version")
    assert incidents_from_wire(message) == ([INCIDENT], goodput)


def test_the_texts_of_a_ledger_are_fit_for_a_terminal() -> None:
    message = incidents_to_wire([INCIDENT], GOODPUT)
    message.incidents[0].cause = "\x1b[31m"
    message.incidents[0].groups[0] = "a\n:1"
    message.goodput.lost_s["\x1b"] = 1.0
    (read,), goodput = incidents_from_wire(message)
    assert (read.cause, read.groups) == ("?[31m", ("a?:1", "b:1"))
    assert goodput is not None
    assert set(goodput.lost_s) == {"waiting", "?"}


def test_the_goodput_is_a_part_of_the_status() -> None:
    encoded = finish(status_to_wire([JobStatus(job="job", goodput=GOODPUT)])).SerializeToString()
    (read,) = status_from_wire(pb.LighthouseStatusResponse.FromString(encoded))
    assert read.goodput == GOODPUT


def test_the_loop_is_free_between_some_groups() -> None:
    groups = tuple(GroupStatus(replica_id=f"g{number:03}") for number in range(1000))
    jobs = [JobStatus(job="a", groups=groups), JobStatus(job="b", groups=groups[:1])]
    pieces = status_to_wire(jobs)
    for _ in range(1000 // GROUPS_AT_ONCE + 1):
        next(pieces)
    assert status_from_wire(finish(pieces)) == jobs
