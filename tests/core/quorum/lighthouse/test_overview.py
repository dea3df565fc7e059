"""Tests the status of jobs for people."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core.scenes import JOB, Scene, config, formed

from torchft_svc.core.pieces import finish
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.overview import (
    GROUPS_AT_ONCE,
    MAX_DIFFERENCES_KEPT,
    MAX_GONE_KEPT,
    MAX_REASON_KEPT,
    GoneGroup,
    GroupStatus,
    JobStatus,
)
from torchft_svc.core.quorum.types import DifferenceReport, LastQuorum
from torchft_svc.errors import RequestRefused


def test_a_job_in_the_middle_of_a_step() -> None:
    scene = formed("a:1", "b:1", step=3, settings=config(hang_timeout_s=8.0))
    scene.report("a:1", Phase.TRAINING, step=3)
    scene.until(109)
    scene.beat("a:1")
    scene.ask("b:1", step=4, address="moved:1", min_replicas=2)
    scene.ask("c:1", step=0)
    assert scene.jobs.status(JOB, 111.0) == [
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
            num_expected=2,
            num_places=2,
            stalled_s=11.0,
        )
    ]


def test_a_group_that_waits_for_its_name_is_asking() -> None:
    scene = formed("a:1")
    scene.ask("a:2", step=5)
    (job,) = scene.jobs.status(JOB, scene.now)
    assert [(each.replica_id, each.asking, each.step) for each in job.groups] == [
        ("a:1", False, 0),
        ("a:2", True, 5),
    ]
    assert job.waiting_for.startswith("a:2 waits until a:1, which had its name before")


def test_all_jobs_or_one() -> None:
    scene = Scene()
    assert scene.jobs.status("", 0.0) == []
    scene.beat("a:1", job="y")
    scene.beat("a:1", job="x")
    quiet = (GroupStatus(replica_id="a:1"),)
    x, y = (JobStatus(job=name, groups=quiet, num_expected=1) for name in "xy")
    assert scene.jobs.status("", 0.0) == [x, y]
    assert scene.jobs.status("y", 0.0) == [y]
    with pytest.raises(RequestRefused, match="this lighthouse serves no job 'z' now"):
        scene.jobs.status("z", 0.0)


def test_the_members_of_a_job_are_those_of_its_quorum_that_live() -> None:
    def shown(scene: Scene, job: str = JOB) -> tuple[list[str], int]:
        members, step = scene.jobs.members(job)
        return [each.address for each in members], step

    scene = Scene(config())
    assert shown(scene) == ([], 0)
    scene = formed("a:1", "b:1", "c:1", step=3)
    scene.opened("starts:1")
    assert shown(scene) == (["a:1", "b:1", "c:1"], 3)
    scene.leave("b:1")
    assert shown(scene) == (["a:1", "c:1"], 3)
    assert shown(scene, "another") == ([], 0)
    restarted = Scene(config())
    restarted.jobs.opened(JOB, "a:1", LastQuorum(5, 7), restarted.now, num_groups=2)
    assert shown(restarted) == ([], 7), "it lives, and its address is not known yet"
    restarted.leave("a:1")
    assert shown(restarted) == ([], 0)


def status(scene: Scene) -> JobStatus:
    (job,) = scene.jobs.status(JOB, scene.now)
    return job


def test_who_was_lost_and_who_left_on_purpose() -> None:
    scene = formed("a:1", "b:1", "c:1", step=3)
    scene.leave("b:1", "its session ended")
    scene.until(105)
    scene.leave("c:1", "it has shut down", ends=True)
    scene.until(110)
    assert status(scene).gone == (
        GoneGroup(replica_id="c:1", reason="it has shut down", orderly=True, gone_s=5.0),
        GoneGroup(replica_id="b:1", reason="its session ended", gone_s=10.0),
    )
    assert status(scene).num_expected == 2, "b is missed, c is not"


def test_only_the_last_of_those_that_are_gone_are_kept() -> None:
    scene = formed("a")
    for number in range(3 * MAX_GONE_KEPT):
        scene.beat(f"b{number}")
        scene.leave(f"b{number}", "x" * 1000)
    names = [group.replica_id for group in status(scene).gone]
    newest = range(3 * MAX_GONE_KEPT - 1, 2 * MAX_GONE_KEPT - 1, -1)
    assert names == [f"b{number}" for number in newest]
    assert max(len(group.reason) for group in status(scene).gone) == MAX_REASON_KEPT


def test_heals_and_discarded_steps_are_counted() -> None:
    scene = formed("a", "b", step=3)
    scene.ask("a", step=3, commit_failures=1)
    scene.ask("b", step=3, commit_failures=1)
    assert (status(scene).num_discarded, status(scene).num_heals) == (1, 0), "one step, of both"
    scene.ask("c", step=0)
    scene.ask_all("a", "b", step=4)
    scene.ask("c", step=0, unhealed=True)
    scene.ask_all("a", "b", step=5)
    assert status(scene).num_heals == 0
    scene.ask_all("a", "b", "c", step=6)
    assert (status(scene).num_discarded, status(scene).num_heals) == (1, 1)
    scene.ask("a", step=7, commit_failures=1)  # it only needs new connections
    scene.ask_all("b", "c", step=7)
    assert (status(scene).num_discarded, status(scene).num_heals) == (1, 1)


def test_since_when_a_job_makes_no_progress() -> None:
    scene = formed("a", step=3)
    for at, step, stalled_s in ((104, 3, 4.0), (105, 4, 0.0), (109, 4, 4.0)):
        scene.until(at)
        scene.ask("a", step=step)
        assert status(scene).stalled_s == stalled_s
    scene.leave("a")
    scene.ask("b", step=2)  # from an older checkpoint
    scene.until(112)
    assert status(scene).stalled_s == 3.0


@pytest.mark.parametrize("ends", [True, False])
def test_a_job_that_has_ended_is_remembered(ends: bool) -> None:
    scene = formed("a", "b", step=3)
    scene.leave("a", ends=True)
    scene.leave("b", ends=ends)
    scene.until(110)
    job = status(scene)
    assert (job.ended_s, job.finished, job.groups) == (10.0, ends, ())
    assert (job.quorum_id, job.committed_step, job.num_expected) == (1, 3, 1)
    assert [each.replica_id for each in job.gone] == ["b", "a"]
    assert scene.jobs.status("", scene.now) == [job]
    scene.ask("a", step=3)
    assert (status(scene).ended_s, status(scene).finished) == (None, False)


def test_a_check_that_found_a_difference_is_counted_once() -> None:
    scene = formed("a", "b", step=3)
    report = DifferenceReport(7, 4, "they differ")
    for replica_id in ("a", "b", "a"):
        scene.jobs.record_difference(JOB, replica_id, report, scene.now)
    scene.jobs.record_difference(JOB, "a", DifferenceReport(7, 6, "they still differ"), scene.now)
    scene.jobs.record_difference(JOB, "b", DifferenceReport(8, 6, "and again"), scene.now)
    scene.jobs.record_difference(JOB, "a", DifferenceReport(7, 6, "late"), scene.now)
    scene.jobs.record_difference(JOB, "nobody", DifferenceReport(9, 9, "made up"), scene.now)
    scene.jobs.record_difference("another", "a", DifferenceReport(9, 9, "made up"), scene.now)
    assert (status(scene).num_differences, status(scene).last_difference) == (3, "and again")


def test_only_the_last_checks_are_kept() -> None:
    scene = formed("a", step=3)
    for step in range(3 * MAX_DIFFERENCES_KEPT):
        scene.jobs.record_difference(JOB, "a", DifferenceReport(7, step, ""), scene.now)
    assert status(scene).num_differences == 3 * MAX_DIFFERENCES_KEPT
    scene.jobs.record_difference(JOB, "a", DifferenceReport(7, 0, "forgotten"), scene.now)
    assert status(scene).num_differences == 3 * MAX_DIFFERENCES_KEPT + 1


def test_a_job_may_change_while_it_is_described() -> None:
    names = [f"g{number:03}" for number in range(2 * GROUPS_AT_ONCE + 50)]
    scene = formed(*names, step=7)
    whole = scene.jobs.status(JOB, scene.now)
    pieces = scene.jobs.status_in_pieces(JOB, scene.now)
    for _ in range(2):
        next(pieces)
    for name in (names[0], names[-1]):
        scene.leave(name)
    (status,) = finish(pieces)
    assert [each.replica_id for each in status.groups] == names[:-1], "the rest of them"
    assert replace(status, groups=(), gone=()) == replace(whole[0], groups=())
    pieces = scene.jobs.status_in_pieces(JOB, scene.now)
    next(pieces)
    for name in names[1:-1]:
        scene.leave(name)
    (status,) = finish(pieces)
    assert len(status.groups) == GROUPS_AT_ONCE - 1
    assert scene.jobs.status(JOB, scene.now)[0].ended_s == 0.0


def test_f1_a_restarted_lighthouse_shows_the_quorum_that_groups_report() -> None:
    """The groups train on in it, and ask nobody."""
    scene = Scene(config())
    scene.opened("a:1", quorum_id=7, max_step=4, num_groups=2)
    scene.opened("late:1")
    (status,) = scene.jobs.status(JOB, scene.now)
    assert (status.quorum_id, status.committed_step, status.num_places) == (7, 4, 2)
    assert [group.in_quorum for group in status.groups] == [True, False]
    scene.opened("b:1", quorum_id=9, max_step=5, num_groups=1)  # a was left behind
    (status,) = scene.jobs.status(JOB, scene.now)
    assert status.quorum_id == 9
    assert [group.replica_id for group in status.groups if group.in_quorum] == ["b:1"]
