"""Tests the timeline of a job: what its points say, and that it forgets what is older."""

from __future__ import annotations

from support.core.scenes import JOB, Scene, formed

from torchft_svc.core.pieces import finish
from torchft_svc.core.quorum.lighthouse.incidents import Goodput
from torchft_svc.core.quorum.lighthouse.overview import JobSample
from torchft_svc.core.quorum.lighthouse.timeline import MAX_POINTS, Timeline, TimelinePoint
from torchft_svc.core.quorum.session_messages import Leave


def sample(step: int, wall_s: float = 0.0, committed_s: float = 0.0) -> JobSample:
    return JobSample(
        committed_step=step,
        num_groups=3,
        num_in_quorum=2,
        num_heals=4,
        num_discarded=1,
        goodput=Goodput(wall_s=wall_s, committed_s=committed_s),
    )


def test_a_point_says_what_happened_since_the_one_before() -> None:
    timeline = Timeline()
    assert timeline.points() == ()
    assert timeline.last_point() is None
    timeline.record_sample(sample(10, wall_s=20.0, committed_s=10.0), 100.0)
    timeline.record_sample(sample(30, wall_s=30.0, committed_s=18.0), 110.0)
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


def test_a_sample_is_what_the_status_shows() -> None:
    scene = formed("a:1", "b:1", "c:1", step=4)
    scene.jobs.leave(JOB, "b:1", Leave("it died"), scene.now)
    scene.ask("d:1")
    scene.ask("a:1", step=4, commit_failures=1)
    scene.ask("c:1", step=4)
    scene.leave("c:1")
    scene.ask("a:1", step=6)
    scene.ask("d:1", step=6)
    scene.beat("e:1", job="another")
    scene.leave("e:1", job="another")
    scene.jobs.opened_by_spare("spares", "s:1", scene.now)
    samples = finish(scene.jobs.samples_in_pieces(scene.now))
    found = samples[JOB]
    assert found is not None
    (shown,) = scene.jobs.status(JOB, scene.now)
    assert (found.num_heals, found.num_discarded, found.num_groups) == (1, 1, 2)
    for name in ("committed_step", "num_heals", "num_discarded", "goodput"):
        assert getattr(found, name) == getattr(shown, name)
    assert found.num_groups == len(shown.groups)
    assert found.num_in_quorum == sum(group.in_quorum for group in shown.groups) == 2
    assert samples.keys() == {each.job for each in scene.jobs.status("", scene.now)}
    assert samples["spares"] == JobSample()
    scene.leave("a:1")
    scene.leave("d:1")
    assert finish(scene.jobs.samples_in_pieces(scene.now))[JOB] is None


def test_a_sample_is_what_the_status_of_a_restarted_lighthouse_shows() -> None:
    """The groups report the quorum that they train in, and none was published here."""
    scene = Scene()
    scene.opened("a:1", quorum_id=9, max_step=4, num_groups=2)
    scene.opened("b:1", quorum_id=9, max_step=4, num_groups=2)
    (shown,) = scene.jobs.status(JOB, scene.now)
    found = finish(scene.jobs.samples_in_pieces(scene.now))[JOB]
    assert found is not None
    assert found.num_in_quorum == sum(group.in_quorum for group in shown.groups) == 2


def test_a_job_that_goes_back_has_no_negative_speed() -> None:
    timeline = Timeline()
    timeline.record_sample(sample(10), 100.0)
    timeline.record_sample(sample(4), 105.0)
    timeline.record_sample(sample(4), 105.0)
    assert [point.steps_per_s for point in timeline.points()] == [0.0, 0.0, 0.0]


def test_goodput_stays_within_its_bounds() -> None:
    """A lighthouse that takes over from another one may count anew."""
    timeline = Timeline()
    for wall_s, committed_s in ((10.0, 8.0), (12.0, 1.0), (13.0, 5.0)):
        timeline.record_sample(sample(1, wall_s, committed_s), wall_s)
    assert [point.goodput for point in timeline.points()] == [None, 0.0, 1.0]


def test_it_keeps_an_hour() -> None:
    timeline = Timeline()
    for number in range(MAX_POINTS + 50):
        timeline.record_sample(sample(number), 5.0 * number)
    points = timeline.points()
    assert len(points) == MAX_POINTS
    assert (points[0].at, points[0].committed_step) == (250.0, 50)
    assert {point.steps_per_s for point in points[1:]} == {0.2}
