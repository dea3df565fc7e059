"""What groups do, for how long, and when that counts as a hang."""

from __future__ import annotations

import pytest
from support.core.scenes import JOB, Scene, config, formed

from torchft_svc.core.quorum.activity import (
    HANGING_PHASES,
    Activity,
    HangWatch,
    Phase,
    PhaseReport,
    WorkerActivities,
)
from torchft_svc.core.quorum.lighthouse.jobs import ReportHang
from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.errors import ConfigError

HANG = config(hang_timeout_s=5, on_hang="kill")


def hang(replica_id: str, phase: Phase = Phase.TRAINING, for_s: float = 5.0) -> ReportHang:
    return ReportHang(JOB, replica_id, phase, 7, for_s, kill=True)


def training() -> Scene:
    """A scene in which groups a and b have begun step 7 at 100."""
    scene = formed("a:1", "b:1", step=7, settings=HANG)
    for replica_id in ("a:1", "b:1"):
        scene.report(replica_id, Phase.TRAINING, 7)
    assert scene.pop_orders() == []
    return scene


def test_a_group_does_what_its_slowest_worker_does() -> None:
    workers = WorkerActivities()
    assert workers.slowest() is None
    workers.reported(0, PhaseReport(Phase.TRAINING, 3), 10.0)
    workers.reported(1, PhaseReport(Phase.TRAINING, 3), 11.0)
    workers.reported(0, PhaseReport(Phase.VOTING, 3), 12.0)
    assert workers.slowest() == Activity(Phase.TRAINING, 3, 11.0)
    workers.reported(1, PhaseReport(Phase.QUORUM, 3), 13.0)
    assert workers.slowest() == Activity(Phase.QUORUM, 3, 13.0), "who votes waits for its peers"
    workers.gone(1)
    assert workers.slowest() == Activity(Phase.VOTING, 3, 12.0)


@pytest.mark.parametrize("phase", [Phase.HEALING, Phase.QUORUM], ids=lambda phase: phase.value)
def test_a_worker_that_is_held_up_counts_before_those_that_wait_for_it(phase: Phase) -> None:
    """The others wait in a collective of the group: to its manager they only train."""
    workers = WorkerActivities()
    workers.reported(0, PhaseReport(Phase.TRAINING, 3), 10.0)
    workers.reported(1, PhaseReport(phase, 3), 11.0)
    assert workers.slowest() == Activity(phase, 3, 11.0)
    workers.reported(1, PhaseReport(Phase.TRAINING, 3), 20.0)
    assert workers.slowest() == Activity(Phase.TRAINING, 3, 10.0)


def test_a_worker_that_asks_waits_for_the_slowest_of_its_group() -> None:
    workers = WorkerActivities()
    workers.reported(0, PhaseReport(Phase.TRAINING, 3), 10.0)
    workers.asks(1, 4, 11.0)
    assert workers.slowest() == Activity(Phase.TRAINING, 3, 10.0)


def test_whoever_stands_in_one_phase_is_reported_once() -> None:
    scene = training()
    scene.before(105)
    assert scene.pop_orders() == []
    scene.until(105)
    assert scene.pop_orders() == [hang("a:1"), hang("b:1")]
    assert scene.group("a:1").hung
    scene.report("a:1", Phase.TRAINING, 7, for_s=5)
    scene.until(120)
    assert scene.pop_orders() == []


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
def test_only_what_a_group_has_to_end_by_itself_can_hang(phase: Phase) -> None:
    scene = training()
    scene.report("a:1", phase, 7)
    scene.report("b:1", Phase.IDLE, 7)
    scene.until(150)
    assert scene.pop_orders() == ([hang("a:1", phase)] if phase in HANGING_PHASES else [])
    assert scene.group("a:1").hung == (phase in HANGING_PHASES)


def test_another_spell_in_the_same_phase_is_another_time() -> None:
    """A step that was discarded is done again: same phase, same step."""
    scene = training()
    scene.until(103)
    scene.report("a:1", Phase.TRAINING, 7, for_s=1)
    scene.until(105)
    assert scene.pop_orders() == [hang("b:1")]
    scene.until(107)
    assert scene.pop_orders() == [hang("a:1")]


def test_who_moves_again_has_not_hung_and_may_hang_again() -> None:
    scene = training()
    scene.until(105)
    scene.pop_orders()
    scene.report("a:1", Phase.VOTING, 7)
    assert not scene.group("a:1").hung
    assert scene.group("b:1").hung
    scene.until(110)
    assert scene.pop_orders() == [hang("a:1", Phase.VOTING)]


def test_a_request_ends_a_hang() -> None:
    """A fast trainer asks so often that its beats are left out."""
    scene = training()
    scene.ask("a:1", 8)
    scene.until(105)
    assert scene.pop_orders() == [hang("b:1")]
    reported = scene.group("a:1")
    assert (reported.phase, reported.step, reported.phase_s) == (Phase.QUORUM, 8, 5.0)


def test_a_hang_that_is_reported_late_is_reported_at_once() -> None:
    scene = training()
    scene.until(101)
    scene.report("a:1", Phase.TRAINING, 7, for_s=60)
    assert scene.pop_orders() == [hang("a:1", for_s=60)]
    assert scene.jobs.next_deadline() > scene.now


def test_nobody_hangs_where_no_timeout_is_set() -> None:
    scene = formed("a:1", settings=config())
    scene.report("a:1", Phase.TRAINING, 7, for_s=10**6)
    assert scene.pop_orders() == []
    assert not scene.group("a:1").hung


def test_i7_the_dead_are_forgotten() -> None:
    watch = HangWatch(5.0)
    watch.record_activity("a:1", Activity(Phase.TRAINING, 1, 0.0), 0.0)
    assert watch.newly_hung(5.0) == [("a:1", Activity(Phase.TRAINING, 1, 0.0))]
    watch.forget_group("a:1")
    assert (watch.activity("a:1"), watch.is_hung("a:1")) == (None, False)
    assert watch.look_at() is None


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_hang_timeout_that_cannot_work(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="hang_timeout_s"):
        QuorumConfig(hang_timeout_s=timeout_s)


def test_what_to_do_with_a_hang() -> None:
    with pytest.raises(
        ConfigError, match="on_hang='ignore' cannot work: use report, kill or evict"
    ):
        QuorumConfig(on_hang="ignore")  # type: ignore[arg-type]
