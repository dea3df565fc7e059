"""What people are told about jobs passes over the wire whole."""

from __future__ import annotations

import pytest

from torchft_svc.core.overview import GoneGroup, GroupStatus, JobStatus
from torchft_svc.core.step import Phase
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec_status import status_from_wire, status_to_wire


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
        stalled_s=8.25,
        gone=(GoneGroup(replica_id="c:1", reason="bye", orderly=True, gone_s=0.5),),
        ended_s=ended_s,
        finished=ended_s is not None,
    )
    encoded = status_to_wire([job]).SerializeToString()
    assert status_from_wire(pb.LighthouseStatusResponse.FromString(encoded)) == [job]
