"""Tests of the ledger: one record for each fault, with its cause and what it has cost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.core.scenes import JOB, Scene, config, formed

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.incidents import (
    MAX_INCIDENTS,
    Incident,
    IncidentKind,
    Ledgers,
    Moment,
)
from torchft_svc.core.quorum.session_messages import Departure, Leave
from torchft_svc.core.quorum.tally import EventKind, GroupEvent
from torchft_svc.core.quorum.types import DifferenceReport


def records(scene: Scene) -> list[Incident]:
    found: list[Incident] = scene.jobs.incidents(JOB)
    return found


def kinds(scene: Scene) -> list[str]:
    return [each.kind.value for each in records(scene)]


def test_n1_a_lost_group_is_one_record_and_its_return_another() -> None:
    scene = formed("a:1", "b:1", "c:1", step=4)
    (begun,) = records(scene)
    assert (begun.kind, begun.groups) == (IncidentKind.JOINED, ("a:1", "b:1", "c:1"))
    scene.now = 110.0
    scene.jobs.leave(JOB, "b:1", Leave("its process ended"), scene.now)
    lost = records(scene)[1]
    assert lost.number == begun.number + 1
    assert (lost.kind, lost.cause) == (IncidentKind.LOST, "its process ended")
    assert (lost.groups, lost.at, lost.quorum_id, lost.step) == (("b:1",), 110.0, 1, 4)
    assert (lost.detected_after_s, lost.is_open) == (10.0, True)
    scene.now = 111.0
    scene.ask_all("a:1", "c:1", step=4)
    scene.now = 113.0
    scene.report("a:1", Phase.TRAINING, step=5)
    lost = records(scene)[1]
    assert (lost.decided_after_s, lost.first_commit_after_s) == (1.0, 3.0)
    assert lost.is_open, "it has not come back"
    scene.ask("b:2", step=0)
    scene.now = 114.0
    scene.ask_all("a:1", "c:1", step=6)
    lost, joined = records(scene)[1:]
    assert not lost.is_open
    assert (joined.kind, joined.groups, joined.at) == (IncidentKind.JOINED, ("b:2",), 113.0)
    assert (joined.decided_after_s, joined.cause) == (1.0, "it was restarted")
    scene.report("a:1", Phase.TRAINING, step=7)
    assert [each.number for each in records(scene) if each.is_open] == [joined.number]
    scene.report("b:2", Phase.TRAINING, step=7)
    assert not any(each.is_open for each in records(scene))


def test_n1_how_a_group_ends_is_the_kind_of_its_record() -> None:
    scene = formed("a:1", "b:1", "c:1", "d:1", "e:1")
    leaves = {
        "b:1": Leave("drained", between_steps=True, ends=True, departure=Departure.DRAINED),
        "c:1": Leave("killed", ends=True, departure=Departure.KILLED),
        "d:1": Leave("bye", ends=True),
        "e:1": Leave("it died"),
    }
    for replica_id, leave in leaves.items():
        scene.jobs.leave(JOB, replica_id, leave, scene.now)
    assert kinds(scene) == ["joined", "drained", "killed", "left", "lost"]
    scene.ask("a:1", step=1)
    scene.ask("a:1", step=2)
    assert [each.kind.value for each in records(scene) if each.is_open] == ["lost"]


def test_n2_a_hang_that_ends_in_a_kill_or_an_eviction_is_one_record() -> None:
    settings = config(hang_timeout_s=5.0, on_hang="evict")
    scene = formed("a:1", "b:1", step=4, settings=settings)
    scene.report("a:1", Phase.QUORUM, step=4)
    scene.report("b:1", Phase.TRAINING, step=4)
    scene.until(106.0)
    scene.ask("a:1", step=4)
    assert kinds(scene) == ["joined", "evicted"]
    evicted = records(scene)[1]
    assert (evicted.groups, evicted.at, evicted.detected_after_s) == (("b:1",), 105.0, 5.0)
    assert evicted.decided_after_s == 1.0
    scene.ask("b:1", step=4)
    scene.ask("a:1", step=5)
    scene.ask_all("a:1", "b:1", step=6)
    assert kinds(scene) == ["joined", "evicted"], "its return belongs to its record"
    assert not any(each.is_open for each in records(scene))


def test_n2_a_group_that_goes_on_by_itself_ends_its_hang() -> None:
    scene = formed("a:1", "b:1", step=4, settings=config(hang_timeout_s=5.0))
    scene.report("b:1", Phase.TRAINING, step=4)
    scene.until(106.0)
    assert [each.is_open for each in records(scene)][1]
    scene.report("b:1", Phase.VOTING, step=4)
    hung = records(scene)[1]
    assert (hung.kind, hung.is_open) == (IncidentKind.HUNG, False)


def test_n2_a_straggler_that_turns_out_to_be_dead_is_lost() -> None:
    scene = formed("a:1", "b:1", step=4, settings=config(heartbeat_timeout_s=30.0))
    scene.ask("a:1", step=5)
    scene.until(112.0)
    assert kinds(scene) == ["joined", "straggled"]
    scene.until(125.0)
    scene.beat("a:1")
    scene.until(131.0)
    assert kinds(scene) == ["joined", "lost"]
    assert records(scene)[1].cause == "no sign of life for 30 s"


@pytest.mark.parametrize("on_hang", ["report", "evict"])
def test_n2_a_silent_group_that_seemed_to_hang_is_lost(on_hang: str) -> None:
    settings = config(hang_timeout_s=6.0, heartbeat_timeout_s=8.0, on_hang=on_hang)
    scene = formed("a:1", "b:1", step=4, settings=settings)
    scene.report("b:1", Phase.TRAINING, step=4)
    scene.now = 102.0
    scene.report("b:1", Phase.TRAINING, step=4, for_s=2.0)  # the last sign of life
    scene.report("a:1", Phase.QUORUM, step=4, for_s=2.0)
    scene.until(106.0)
    scene.report("a:1", Phase.QUORUM, step=4, for_s=6.0)
    assert kinds(scene) == ["joined", "hung" if on_hang == "report" else "evicted"]
    scene.until(111.0)
    lost = records(scene)[1]
    assert kinds(scene) == ["joined", "lost"]
    assert (lost.cause, lost.groups) == ("no sign of life for 8 s", ("b:1",))
    assert (lost.at, lost.detected_after_s, lost.is_open) == (106.0, 4.0, True)


def test_n2_a_group_that_hangs_with_signs_of_life_stays_hung_when_it_is_gone() -> None:
    settings = config(hang_timeout_s=6.0, heartbeat_timeout_s=8.0)
    scene = formed("a:1", "b:1", step=4, settings=settings)
    scene.report("b:1", Phase.TRAINING, step=4)
    scene.until(105.0)
    scene.report("b:1", Phase.TRAINING, step=4, for_s=5.0)
    scene.beat("a:1")
    scene.until(112.0)
    scene.beat("a:1")
    scene.until(114.0)
    assert kinds(scene) == ["joined", "hung"]
    hung = records(scene)[1]
    assert (hung.at, hung.detected_after_s) == (106.0, 6.0)
    assert hung.cause.endswith("for 6.0 s; no sign of life for 8 s")


def test_n3_the_ledger_of_a_job_is_bounded() -> None:
    scene = formed("a:0")
    for number in range(1, MAX_INCIDENTS + 20):
        scene.ask(f"b:{number}")
        scene.ask("a:0", step=number)
        scene.jobs.leave(JOB, f"b:{number}", Leave("it died"), scene.now)
    found = records(scene)
    assert len(found) == MAX_INCIDENTS
    numbers = [each.number for each in found]
    assert numbers == list(range(numbers[0], numbers[0] + MAX_INCIDENTS))
    assert scene.jobs.incidents(JOB, after=numbers[-3]) == found[-2:]


# -- what groups report ----------------------------------------------------------------------------


def event(kind: EventKind, quorum_id: int = 1, step: int = 4, **fields: Any) -> GroupEvent:
    """An event of a source and with a number of its own."""
    number = next(_NUMBERS)
    return GroupEvent(
        **{"source": f"s{number}", "number": 1, "quorum_id": quorum_id, "step": step, **fields},
        kind=kind,
    )


_NUMBERS = itertools.count()


def report(scene: Scene, replica_id: str, *events: GroupEvent) -> None:
    scene.jobs.record_report(JOB, replica_id, None, events, scene.now)


def discarded(cause: str, **fields: Any) -> GroupEvent:
    return event(EventKind.DISCARDED, cause=cause, **fields)


def test_n2_the_step_that_a_loss_costs_belongs_to_its_record() -> None:
    """Whichever the lighthouse learns first."""
    for loss_first in (True, False):
        scene = formed("a:1", "b:1", "c:1", step=4)
        if loss_first:
            scene.leave("b:1")
        report(scene, "a:1", discarded("the connection to another group has ended"))
        if not loss_first:
            scene.leave("b:1")
        report(scene, "c:1", discarded("lost group b", lost=("b:1",)))
        scene.ask_all("a:1", "c:1", step=4)
        assert kinds(scene) == ["joined", "lost"]
        assert records(scene)[1].steps_discarded == 1


def test_n2_the_step_of_a_loss_may_be_reported_after_the_next_quorum() -> None:
    scene = formed("a:1", "b:1", "c:1", step=4)
    scene.leave("b:1")
    scene.ask_all("a:1", "c:1", step=4)
    report(scene, "a:1", discarded("lost group b", lost=("b:1",), ago_s=1.0))
    assert kinds(scene) == ["joined", "lost"]
    assert records(scene)[1].steps_discarded == 1


def test_n2_a_step_that_no_loss_explains_is_blamed_on_the_group_that_is_the_cause() -> None:
    scene = formed("a:1", "b:1", "c:1", step=4)
    report(scene, "a:1", discarded("the connection to another group has ended"))
    report(scene, "b:1", discarded("a bad sum", is_own=True, lasts_s=0.5))
    assert kinds(scene) == ["joined"], "a member may be gone, which is not known yet"
    for replica_id in ("a:1", "b:1", "c:1"):
        scene.ask(replica_id, step=4, commit_failures=1)
    report(scene, "c:1", discarded("the connection to another group has ended"))
    assert kinds(scene) == ["joined", "discarded"]
    found = records(scene)[1]
    assert (found.cause, found.groups, found.steps_discarded) == ("a bad sum", ("b:1",), 1)
    assert (found.quorum_id, found.step, found.is_open) == (1, 4, True)
    report(scene, "a:1", event(EventKind.RECOVERED, 1, 5), event(EventKind.RECOVERED, 2, 5))
    assert not records(scene)[1].is_open


def test_n2_a_step_that_fails_again_and_again_is_one_record() -> None:
    scene = formed("a:1", "b:1", step=4)
    for quorum_id in range(1, 6):
        for replica_id in ("a:1", "b:1"):
            report(scene, replica_id, discarded("too few contribute", quorum_id=quorum_id))
        scene.ask("a:1", step=4, commit_failures=1)
        scene.ask("b:1", step=4)
    assert kinds(scene) == ["joined", "discarded"]
    assert records(scene)[1].steps_discarded == 5


def test_n2_a_late_report_of_the_cause_replaces_what_the_others_noticed() -> None:
    scene = formed("a:1", "b:1", step=4)
    report(scene, "a:1", discarded("the connection to another group has ended"))
    scene.ask("a:1", step=4, commit_failures=1)
    scene.ask("b:1", step=4, commit_failures=1)
    assert records(scene)[1].groups == ("a:1",)
    report(scene, "b:1", discarded("a bad sum", is_own=True))
    found = records(scene)[1]
    assert (found.cause, found.groups, found.steps_discarded) == ("a bad sum", ("b:1",), 1)


def test_n5_an_event_that_is_repeated_counts_once() -> None:
    scene = formed("a:1", "b:1", step=4)
    first = discarded("too few contribute")
    died = event(EventKind.MANAGER_DIED, 0, 0, cause="it died")
    for _ in range(3):
        report(scene, "b:1", died)
    assert kinds(scene) == ["joined", "manager_died"]
    scene = formed("a:1", "b:1", step=4)
    for repeated in range(3):
        report(scene, "a:1", first)
        scene.ask("a:1", step=4, commit_failures=1 + repeated)
        scene.ask("b:1", step=4)
    assert kinds(scene) == ["joined", "discarded"]
    assert records(scene)[1].steps_discarded == 1


def test_n1_the_first_commit_completes_the_anatomy() -> None:
    scene = formed("a:1", "b:1", step=4)
    scene.leave("b:1")
    scene.now = 101.0
    scene.ask("a:1", step=4)
    scene.now = 103.0
    recovered = {"paused_s": 1.5, "reconfigured_s": 0.25}
    report(scene, "a:1", event(EventKind.RECOVERED, 2, 5, ago_s=0.5, **recovered))
    lost = records(scene)[1]
    assert (lost.paused_s, lost.reconfigured_s, lost.first_commit_after_s) == (1.5, 0.25, 2.5)
    scene.ask("b:2")
    scene.ask("a:1", step=5)
    healed = {"healed_s": 0.75, "healed_bytes": 4096, "reconfigured_s": 0.5}
    report(scene, "a:1", event(EventKind.RECOVERED, 3, 6, paused_s=0.125))
    assert records(scene)[2].is_open, "it heals"
    report(scene, "b:2", event(EventKind.RECOVERED, 3, 6, **healed))
    joined = records(scene)[2]
    assert (joined.healed_s, joined.healed_bytes, joined.paused_s) == (0.75, 4096, 0.125)
    assert not joined.is_open
    assert not records(scene)[1].is_open


def test_n2_a_heal_that_fails_without_a_loss_is_a_record() -> None:
    scene = formed("a:1", "b:1", step=4)
    report(scene, "b:1", event(EventKind.HEAL_FAILED, cause="it does not fit", is_own=True))
    scene.ask("b:1", step=0, unhealed=True, commit_failures=1)
    scene.ask("a:1", step=5)
    found = records(scene)[-1]
    assert (found.kind, found.groups, found.cause) == (
        IncidentKind.HEAL_FAILED,
        ("b:1",),
        "it does not fit",
    )


def test_n2_the_step_in_which_a_difference_is_found_belongs_to_that() -> None:
    scene = formed("a:1", "b:1", step=4)
    scene.jobs.record_difference(JOB, "a:1", DifferenceReport(1, 4, "they differ"), scene.now)
    report(scene, "a:1", discarded("they differ", is_own=True))
    scene.ask("a:1", step=4, commit_failures=1)
    scene.ask("b:1", step=4, commit_failures=1)
    assert kinds(scene) == ["joined", "state_differs"]
    assert records(scene)[1].steps_discarded == 1


def test_n2_a_manager_that_died_is_no_lost_group() -> None:
    scene = formed("a:1", "b:1", step=4)
    scene.leave("b:1")
    scene.ask("a:1", step=4)
    scene.beat("b:2")
    report(scene, "b:2", event(EventKind.MANAGER_DIED, 0, 0, cause="it died", ago_s=0.5))
    scene.ask("b:2")
    scene.ask("a:1", step=5)
    assert kinds(scene) == ["joined", "manager_died", "joined"]
    died = records(scene)[1]
    assert (died.cause, died.at) == ("it died", records(scene)[2].at - 0.5)
    assert (died.decided_after_s, died.detected_after_s) == (0.5, None)


@pytest.mark.parametrize(("ago_s", "num_records"), [(5.5, 1), (0.5, 2)], ids=["before", "later"])
def test_n2_a_group_seems_to_hang_after_its_manager_has_died(
    ago_s: float, num_records: int
) -> None:
    scene = formed("a:1", "b:1", step=4, settings=config(hang_timeout_s=5.0))
    scene.report("b:1", Phase.TRAINING, step=4)
    scene.until(106.0)
    assert kinds(scene) == ["joined", "hung"]
    report(scene, "b:1", event(EventKind.MANAGER_DIED, 0, 0, cause="it died", ago_s=ago_s))
    scene.report("b:1", Phase.VOTING, step=4)
    found = records(scene)[1:]
    assert (len(found), found[-1].kind, found[-1].cause) == (
        num_records,
        IncidentKind.MANAGER_DIED,
        "it died",
    )
    assert not any(each.is_open for each in found)


def test_n2_a_manager_that_died_in_a_term_costs_nothing_and_is_a_record() -> None:
    scene = formed("a:1", "b:1", step=4)
    report(scene, "b:1", event(EventKind.MANAGER_DIED, 0, 0, cause="it died"))
    assert kinds(scene) == ["joined", "manager_died"]
    assert not records(scene)[1].is_open


def test_n1_a_manager_that_dies_after_the_group_was_back_is_another_fault() -> None:
    scene = formed("a:1", "b:1", step=4)
    scene.leave("b:1")
    scene.ask("a:1", step=4)
    scene.now = 105.0
    scene.ask("b:2")
    scene.ask("a:1", step=5)
    scene.now = 120.0
    report(scene, "b:2", event(EventKind.MANAGER_DIED, 0, 0, cause="it died"))
    assert kinds(scene) == ["joined", "lost", "joined", "manager_died"]
    assert records(scene)[3].at == records(scene)[1].at + 20.0


def test_n2_a_dead_manager_that_is_reported_after_the_return_is_no_lost_group() -> None:
    scene = formed("a:1", "b:1", step=4)
    scene.leave("b:1")
    scene.ask("a:1", step=4)
    scene.now = 105.0
    scene.ask("b:2")
    scene.ask("a:1", step=5)
    report(scene, "b:2", event(EventKind.MANAGER_DIED, 0, 0, cause="it died", ago_s=2.0))
    assert kinds(scene) == ["joined", "manager_died", "joined"]


def away(lasts_s: float = 3.0) -> GroupEvent:
    return event(EventKind.LIGHTHOUSE_AWAY, 0, 0, cause="it ended", lasts_s=lasts_s)


def test_n2_an_absence_of_the_lighthouse_is_one_record_of_all_groups() -> None:
    scene = Scene()
    scene.now = 100.0
    scene.opened("a:1", quorum_id=7, max_step=4, num_groups=2)
    report(scene, "a:1", away())
    scene.now = 101.0
    scene.opened("b:1", quorum_id=7, max_step=4, num_groups=2)
    report(scene, "b:1", away(4.0))
    (found,) = records(scene)
    assert (found.kind, found.groups) == (IncidentKind.LIGHTHOUSE_AWAY, ("a:1", "b:1"))
    assert (found.at, found.is_open) == (97.0, False)
    assert found.cause == "the lighthouse could not be reached for 3.0 s: it ended"


def test_n2_a_group_that_was_cut_off_is_lost_and_no_absence_of_the_lighthouse() -> None:
    scene = formed("a:1", "b:1", step=4)
    scene.leave("b:1", "no sign of life")
    scene.ask("a:1", step=4)
    scene.now = 105.0
    scene.beat("b:1")
    report(scene, "b:1", away(5.0))
    assert kinds(scene) == ["joined", "lost"]


@pytest.mark.parametrize(
    ("away_s", "kind", "at"), [(5.0, "lighthouse_away", 102.0), (2.0, "hung", 105.0)]
)
def test_n2_a_group_seems_to_hang_while_it_is_cut_off(away_s: float, kind: str, at: float) -> None:
    scene = formed("a:1", "b:1", step=4, settings=config(hang_timeout_s=5.0))
    scene.report("b:1", Phase.TRAINING, step=4)
    scene.until(107.0)
    assert kinds(scene) == ["joined", "hung"]
    report(scene, "b:1", away(away_s))
    scene.report("b:1", Phase.TRAINING, step=6)
    assert kinds(scene) == ["joined", kind]
    found = records(scene)[1]
    assert (found.groups, found.at, found.is_open) == (("b:1",), at, False)


def test_n5_a_new_lighthouse_learns_of_the_losses_that_groups_know() -> None:
    scene = Scene()
    scene.now = 100.0
    scene.opened("a:1", quorum_id=9, max_step=4, num_groups=2)
    lost = {"cause": "lost group b: it died", "lost": ("b:1",), "quorum_id": 8, "ago_s": 30.0}
    healed = {"healed_s": 0.5, "healed_bytes": 64, "quorum_id": 9, "ago_s": 20.0}
    report(scene, "a:1", discarded(**lost))
    scene.opened("c:1", quorum_id=9, max_step=4, num_groups=2)
    report(scene, "c:1", discarded(**lost), event(EventKind.RECOVERED, **healed))
    found = records(scene)
    assert [(each.kind.value, each.groups, each.at) for each in found] == [
        ("lost", ("b:1",), 70.0),
        ("joined", ("c:1",), 80.0),
    ]
    assert found[1].healed_bytes == 64
    assert not any(each.is_open for each in found)


@pytest.mark.parametrize(
    ("ago_s", "shown"),
    [
        (1.0, ["lost", "lost", "joined", "joined", "manager_died"]),
        (9.0, ["lost", "manager_died", "joined", "joined"]),
    ],
)
def test_n2_a_manager_that_dies_later_is_no_loss_of_a_whole_job(
    ago_s: float, shown: list[str]
) -> None:
    """All groups were lost at once, so nobody was awaited, and they came back."""
    scene = formed("a:1", "b:1", step=4)
    scene.leave("a:1")
    scene.leave("b:1")
    assert kinds(scene) == ["joined", "lost", "lost"]
    scene.now += 1.0
    scene.ask("a:1", step=4)
    scene.ask("b:1", step=4)
    scene.ask("a:1", step=5)
    scene.now += 5.0
    died = event(EventKind.MANAGER_DIED, 0, 0, cause="it was killed", ago_s=ago_s)
    report(scene, "b:1", died)
    assert kinds(scene) == ["joined", *shown]


@pytest.mark.parametrize(
    ("ago_s", "shown"), [(20.0, ["lost", "manager_died"]), (29.5, ["manager_died"])]
)
def test_n5_a_manager_that_dies_later_is_no_loss_of_before(ago_s: float, shown: list[str]) -> None:
    scene = Scene()
    scene.now = 100.0
    scene.opened("a:1", quorum_id=9, max_step=4, num_groups=2)
    lost = {"cause": "lost group b: it died", "lost": ("b:1",), "quorum_id": 8, "ago_s": 30.0}
    report(scene, "a:1", discarded(**lost))
    scene.opened("b:2", quorum_id=9, max_step=4, num_groups=2)
    report(scene, "b:2", event(EventKind.MANAGER_DIED, 0, 0, cause="it was killed", ago_s=ago_s))
    assert kinds(scene) == shown


def test_a_pause_of_a_launched_run_and_the_world_that_follows_are_one_record() -> None:
    ledgers = Ledgers(max_jobs=1)
    run = ledgers.open_ledger("run", 0.0)
    run.record_run_change("no world: a node is out", ("n1",), Moment(10.0), is_over=False)
    assert [each.is_open for each in run.incidents()] == [True]
    run.record_run_change("world of round 2", ("n1", "n2"), Moment(12.0), is_over=True)
    (found,) = run.incidents()
    assert (found.cause, found.groups) == (
        "no world: a node is out; world of round 2",
        ("n1", "n2"),
    )
    assert (found.decided_after_s, found.is_open) == (2.0, False)
    ledgers.open_ledger("another", 0.0)
    assert ledgers.find("run") is None, "the limit of jobs"


def test_n2_two_absences_that_follow_each_other_are_two_records() -> None:
    scene = Scene()
    scene.now = 100.0
    scene.opened("a:1", quorum_id=7, max_step=4, num_groups=2)
    report(scene, "a:1", away())
    scene.now = 104.0
    report(scene, "a:1", away())
    assert [each.at for each in records(scene)] == [97.0, 101.0]


def test_n2_a_group_that_came_back_may_miss_the_lighthouse_later() -> None:
    scene = formed("a:1", "b:1", step=4)
    scene.leave("b:1", "no sign of life")
    scene.ask("a:1", step=4)
    scene.ask("b:1", step=4)
    scene.ask("a:1", step=5)
    scene.now = 120.0
    report(scene, "b:1", away(5.0))
    assert kinds(scene) == ["joined", "lost", "joined", "lighthouse_away"]


def test_n5_what_several_groups_know_of_one_old_step_is_one_record() -> None:
    scene = Scene()
    scene.now = 100.0
    for replica_id, fields in (
        ("a:1", {"cause": "b did not begin in time"}),
        ("b:1", {"cause": "lost group b", "lost": ("b:1",), "step": 3}),
    ):
        scene.opened(replica_id, quorum_id=9, max_step=4, num_groups=2)
        report(scene, replica_id, discarded(quorum_id=8, ago_s=30.0, **fields))  # type: ignore[arg-type]
    (found,) = records(scene)
    assert (found.kind, found.groups, found.steps_discarded) == (IncidentKind.LOST, ("b:1",), 2)
