"""Tests the timeline of a job: what its points say, and that it forgets what is older."""

from __future__ import annotations

from torchft_svc.core.quorum.lighthouse.incidents import Goodput
from torchft_svc.core.quorum.lighthouse.overview import GroupStatus, JobStatus
from torchft_svc.core.quorum.lighthouse.timeline import MAX_POINTS, Timeline, TimelinePoint


def status(step: int, wall_s: float = 0.0, committed_s: float = 0.0) -> JobStatus:
    groups = tuple(
        GroupStatus(replica_id=f"g:{number}", in_quorum=number < 2) for number in range(3)
    )
    return JobStatus(
        job="j",
        committed_step=step,
        groups=groups,
        num_heals=4,
        num_discarded=1,
        goodput=Goodput(wall_s=wall_s, committed_s=committed_s),
    )


def test_a_point_says_what_happened_since_the_one_before() -> None:
    timeline = Timeline()
    assert timeline.points() == ()
    assert timeline.last_point() is None
    timeline.record_sample(status(10, wall_s=20.0, committed_s=10.0), 100.0)
    timeline.record_sample(status(30, wall_s=30.0, committed_s=18.0), 110.0)
    first, second = timeline.points()
    assert first == TimelinePoint(
        at=100.0,
        committed_step=10,
        steps_per_s=0.0,
        num_groups=3,
        num_in_quorum=2,
        num_heals=4,
        num_discarded=1,
        goodput=None,
    )
    assert (second.steps_per_s, second.goodput) == (2.0, 0.8)
    assert timeline.last_point() == second


def test_a_job_that_goes_back_has_no_negative_speed() -> None:
    timeline = Timeline()
    timeline.record_sample(status(10), 100.0)
    timeline.record_sample(status(4), 105.0)
    timeline.record_sample(status(4), 105.0)
    assert [point.steps_per_s for point in timeline.points()] == [0.0, 0.0, 0.0]


def test_goodput_stays_within_its_bounds() -> None:
    """A lighthouse that takes over from another one may count anew."""
    timeline = Timeline()
    for wall_s, committed_s in ((10.0, 8.0), (12.0, 1.0), (13.0, 5.0)):
        timeline.record_sample(status(1, wall_s, committed_s), wall_s)
    assert [point.goodput for point in timeline.points()] == [None, 0.0, 1.0]


def test_it_keeps_an_hour() -> None:
    timeline = Timeline()
    for number in range(MAX_POINTS + 50):
        timeline.record_sample(status(number), 5.0 * number)
    points = timeline.points()
    assert len(points) == MAX_POINTS
    assert (points[0].at, points[0].committed_step) == (250.0, 50)
    assert {point.steps_per_s for point in points[1:]} == {0.2}
