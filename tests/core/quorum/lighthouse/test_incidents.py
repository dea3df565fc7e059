"""Tests of the ledger: one record for each fault, with its cause and what it has cost."""

from __future__ import annotations

from support.core.scenes import JOB, Scene, config, formed

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.incidents import MAX_INCIDENTS, Incident, IncidentKind
from torchft_svc.core.quorum.session_messages import Departure, Leave


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
