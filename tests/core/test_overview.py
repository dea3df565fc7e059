"""Tests what people are told about jobs."""

from __future__ import annotations

import pytest

from torchft_svc.core.overview import GroupStatus, JobStatus
from torchft_svc.core.step import Phase
from torchft_svc.errors import RequestRefused

from .scenes import JOB, Scene, config, formed


def test_a_job_in_the_middle_of_a_step() -> None:
    scene = formed("a:1", "b:1", step=3, settings=config(hang_timeout_s=8.0))
    scene.does("a:1", Phase.TRAINING, step=3)
    scene.until(109)
    scene.beat("a:1")
    scene.ask("b:1", step=4, address="moved:1", min_replicas=2)
    scene.ask("c:1", step=0)
    assert scene.house.status(JOB, 111.0) == [
        JobStatus(
            job=JOB,
            quorum_id=1,
            committed_step=3,
            min_replicas=2,
            waiting_for="waiting for a:1: alive, but has not asked",
            groups=(
                GroupStatus(
                    replica_id="a:1",
                    address="a:1",
                    in_quorum=True,
                    step=3,
                    phase=Phase.TRAINING,
                    phase_s=11.0,
                    silent_s=2.0,
                    hung=True,
                ),
                GroupStatus(
                    replica_id="b:1",
                    address="moved:1",
                    in_quorum=True,
                    asking=True,
                    step=4,
                    phase=Phase.QUORUM,
                    phase_s=2.0,
                    silent_s=2.0,
                ),
                GroupStatus(
                    replica_id="c:1",
                    address="c:1",
                    asking=True,
                    phase=Phase.QUORUM,
                    phase_s=2.0,
                    silent_s=2.0,
                ),
            ),
        )
    ]


def test_a_group_that_waits_for_its_name_is_asking() -> None:
    scene = formed("a:1")
    scene.ask("a:2", step=5)
    (job,) = scene.house.status(JOB, scene.now)
    assert [(each.replica_id, each.asking, each.step) for each in job.groups] == [
        ("a:1", False, 0),
        ("a:2", True, 5),
    ]
    assert job.waiting_for.startswith("a:2 waits until a:1, which had its name before")


def test_all_jobs_or_one() -> None:
    scene = Scene()
    assert scene.house.status("", 0.0) == []
    scene.beat("a:1", job="y")
    scene.beat("a:1", job="x")
    quiet = (GroupStatus(replica_id="a:1"),)
    x, y = (JobStatus(job=name, groups=quiet) for name in "xy")
    assert scene.house.status("", 0.0) == [x, y]
    assert scene.house.status("y", 0.0) == [y]
    with pytest.raises(RequestRefused, match="this lighthouse serves no job 'z' now"):
        scene.house.status("z", 0.0)
