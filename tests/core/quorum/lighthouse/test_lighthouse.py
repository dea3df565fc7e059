"""Many jobs in one lighthouse, its limits, and inputs that it rejects."""

from __future__ import annotations

from enum import Enum

import pytest
from support.core.scenes import JOB, Scene, config, formed

from torchft_svc.core.quorum.lighthouse.jobs import MAX_LOSSES_SENT, ReportLoss
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.errors import RequestRefused


def test_jobs_never_see_each_other() -> None:
    scene = Scene(config(min_replicas=2))
    scene.ask("a", job="one")
    scene.ask("b", job="two")
    assert scene.pop_orders() == []
    scene.leave("a", job="two")
    scene.ask("c", job="one")
    assert scene.pop_quorums() == [(1, ["a", "c"])]
    assert scene.why("two") == "1 of at least 2 groups ask (--min-replicas)"
    assert scene.why("three") == "no group asks for a quorum"


def test_the_living_others_of_the_last_quorum_are_informed_of_a_loss() -> None:
    scene = formed("a", "b", "c")
    scene.beat("d")
    for replica_id in ("c", "d", "a"):
        scene.leave(replica_id)
    reported = [sorted(order.recipients) for order in scene.pop_orders()]
    assert reported == [["a", "b", "c"], [], ["a", "b"]], "and itself, if it can receive that"


def test_nobody_gives_a_step_up_for_a_group_that_has_finished_it() -> None:
    scene = formed("a", "b")
    (order,) = scene.jobs.leave(JOB, "a", Leave("preempted", between_steps=True), scene.now)
    assert isinstance(order, ReportLoss)
    assert (order.replica_id, order.between_steps, order.recipients) == ("a", True, ())


def test_a_late_heartbeat_does_not_bring_a_group_back_that_has_left() -> None:
    """Otherwise the others would wait for it, and be informed of its loss again."""
    scene = formed("a", "b")
    scene.jobs.leave(JOB, "b", Leave("it moves", between_steps=True), scene.now)
    scene.beat("b")
    scene.ask("a", 1)
    assert scene.pop_quorums() == [(2, ["a"])]
    scene = formed("a", "b")
    scene.jobs.leave(JOB, "b", Leave("it moves", between_steps=True), scene.now)
    scene.opened("b", quorum_id=1)
    scene.ask("a", 1)
    assert scene.why().startswith("waiting for b"), "a session is no late message"
    scene = formed("a", "b")
    scene.jobs.leave(JOB, "b", Leave("it moves", between_steps=True), scene.now)
    scene.now += config().heartbeat_timeout_s
    scene.beat("b")
    scene.ask("a", 1)
    assert scene.why().startswith("waiting for b"), "nor is a heartbeat that comes much later"


@pytest.mark.parametrize("begins_again", [False, True])
def test_a_late_heartbeat_does_not_revive_a_job_that_has_ended(begins_again: bool) -> None:
    scene = formed("a", "b")
    for name in ("a", "b"):
        scene.jobs.leave(JOB, name, Leave("finished", True, ends=True), scene.now)
    if begins_again:
        scene.opened("c", quorum_id=0)
    scene.beat("a", "b")
    (status,) = scene.jobs.status(JOB, scene.now)
    assert [each.replica_id for each in status.groups] == (["c"] if begins_again else [])
    assert status.finished is not begins_again
    scene.now += config().heartbeat_timeout_s
    scene.beat("a")
    (status,) = scene.jobs.status(JOB, scene.now)
    assert "a" in [each.replica_id for each in status.groups], "it lives: this is no late one"


def test_of_many_that_die_at_once_a_few_are_informed() -> None:
    names = [f"g{number}" for number in range(MAX_LOSSES_SENT + 6)]
    scene = formed(*names)
    for name in names[4:]:
        scene.leave(name)
    reported = [set(order.recipients) - {order.replica_id} for order in scene.pop_orders()]
    assert [bool(others) for others in reported] == [True] * MAX_LOSSES_SENT + [False] * 2
    scene.ask_all(*names[:4], step=1)
    assert scene.pop_quorums() == [(2, names[:4])]
    scene.leave(names[0])  # its peers are in another step now
    assert sorted(scene.pop_orders()[0].recipients) == names[:4]


def test_one_clock_serves_all_jobs() -> None:
    scene = Scene()
    scene.beat("b", job="one")
    scene.ask("a", job="one")
    scene.until(3)
    scene.beat("b", job="two")
    scene.ask("a", job="two")
    scene.until(20)
    assert [(order.job, scene.now) for order in scene.pop_orders()] == [("one", 20)]
    scene.until(23)
    assert [(order.job, scene.now) for order in scene.pop_orders()] == [("two", 23)]


def test_the_step_of_an_ended_job_is_remembered_for_as_many_jobs_as_are_served() -> None:
    scene = Scene(config(max_jobs=2))
    for job in ("one", "two", "three"):
        scene.ask("a", step=7, job=job)
        scene.leave("a", job=job)
    for number in range(10):  # names without any progress push nothing out
        scene.beat("a", job=f"noise {number}")
        scene.leave("a", job=f"noise {number}")
    scene.pop_orders()
    for job in ("one", "two"):
        scene.ask("a", step=1, job=job)
    assert [order.lost_from for order in scene.pop_orders()] == [None, 7]


def test_a_job_too_many_is_refused() -> None:
    scene = Scene(config(max_jobs=1))
    scene.beat("a", job="one")
    with pytest.raises(RequestRefused, match="already serves 1 jobs, its limit: job 'two'"):
        scene.ask("a", job="two")
    with pytest.raises(RequestRefused, match="job 'two' has to go to another one"):
        scene.beat("a", job="two")
    with pytest.raises(RequestRefused, match="job 'two' has to go to another one"):
        scene.jobs.check_room("two")
    scene.jobs.check_room("one")
    scene.leave("a", job="one")
    scene.ask("a", job="two")


def test_a_group_too_many_is_refused() -> None:
    scene = Scene(config(max_members_per_job=2))
    scene.beat("a", "b")
    with pytest.raises(RequestRefused, match="job 'job' has 2 groups, the limit"):
        scene.beat("c")
    with pytest.raises(RequestRefused, match="job 'job' has 2 groups, the limit"):
        scene.ask("c")
    with pytest.raises(RequestRefused, match="job 'job' has 2 groups, the limit"):
        scene.jobs.check_room("job")
    scene.ask_all("a", "b")
    assert scene.pop_quorums() == [(1, ["a", "b"])]


def test_a_quorum_that_would_be_too_long_is_refused_to_who_makes_it_so() -> None:
    scene = Scene(config(min_replicas=4, max_quorum_bytes=1500, heartbeat_timeout_s=100))
    caller = scene.ask("a:1", data="x" * 400)
    scene.ask("a:2", data="x" * 400)  # held until the name is free
    limit = r"would have \d+ bytes, and the limit of this lighthouse is 1500 \(--max-quorum-b"
    with pytest.raises(RequestRefused, match=limit):
        scene.ask("b:1", data="x" * 600)
    scene.ask("a:2", data="x" * 400)  # asked again, it counts once
    with pytest.raises(RequestRefused, match=limit):
        scene.ask("b:1", data="\N{SNOWMAN}" * 200)  # three bytes each
    scene.leave("a:2")
    scene.ask("b:1", data="x" * 600)
    scene.leave("b:1")
    scene.withdraw(caller)
    for name in ("c:1", "d:1"):
        scene.ask(name, data="x" * 600)
    with pytest.raises(RequestRefused, match=limit):
        scene.ask("first:1", job="other", data="x" * 1500)
    with pytest.raises(RequestRefused, match="serves no job 'other'"):
        scene.jobs.status("other", scene.now)


def test_what_was_published_leaves_room_for_the_next_quorum() -> None:
    scene = Scene(config(max_quorum_bytes=1000))
    for step in range(5):
        scene.ask("a", step=step, data="x" * 600)
    assert len(scene.pop_quorums()) == 5


@pytest.mark.parametrize("job", ["", "x" * 257, "a\nb"])
def test_a_job_with_a_bad_name_is_refused(job: str) -> None:
    scene = Scene()
    with pytest.raises(RequestRefused, match="job"):
        scene.ask("a", job=job)
    with pytest.raises(RequestRefused, match="job"):
        scene.beat("a", job=job)


@pytest.mark.parametrize("replica_id", ["", "x" * 257, "a\nb"])
def test_a_beat_with_a_bad_name_is_refused_although_there_is_room(replica_id: str) -> None:
    scene = Scene()
    with pytest.raises(RequestRefused, match="replica_id"):
        scene.beat(replica_id)
    assert scene.jobs.next_deadline() is None


def test_a_rejected_input_leaves_the_state_as_it_was() -> None:
    scene = Scene(config(min_replicas=3, max_jobs=1, max_members_per_job=3))
    scene.ask_all("a:1", "b:1")
    scene.ask("a:2")  # held
    before = snapshot(scene)
    scene.now = 7.0
    for bad in (
        lambda: scene.ask("b:1", step=-1),
        lambda: scene.ask("a:2", seen_quorum_id=2**62),
        lambda: scene.ask("b:1", data="x" * 20_000),
        lambda: scene.ask("new"),
        lambda: scene.ask("a:1", job="other"),
        lambda: scene.beat("new"),
        lambda: scene.beat(""),
        lambda: scene.beat("b\n1"),
        lambda: scene.beat("b:1", job="other"),
    ):
        with pytest.raises(RequestRefused):
            bad()
        assert snapshot(scene) == before


def test_a_question_leaves_the_state_as_it_was() -> None:
    """A question changes nothing, even when a deadline is over that no tick has acted on yet."""
    scene = formed("a", "b", settings=config(min_replicas=2))
    scene.ask_all("a", "c")
    before = snapshot(scene)
    scene.now = 1000.0
    assert scene.why() == "a quorum is being published"
    scene.jobs.beat_interval_s("job")
    scene.jobs.check_room("job")
    scene.jobs.check_room("other")
    assert snapshot(scene) == before


def snapshot(scene: Scene) -> object:
    """All that the lighthouse knows, as text."""

    def dump(value: object) -> object:
        fields = getattr(value, "__dict__", None)
        if fields is None and hasattr(value, "__slots__"):
            fields = {name: getattr(value, name) for name in value.__slots__}
        if isinstance(value, dict):
            return [(key, dump(each)) for key, each in value.items()]
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, Enum):
            return value.value
        return {key: dump(each) for key, each in fields.items()} if fields else repr(value)

    return dump(scene.jobs)


def test_groups_beat_less_often_the_more_they_are() -> None:
    scene = Scene(config(heartbeat_timeout_s=5))
    assert scene.jobs.beat_interval_s("job") == 0.0025
    for number in range(2000):
        scene.beat(f"group-{number}")
    assert scene.jobs.beat_interval_s("job") == 5 / 2  # half of the timeout is the most
    assert scene.jobs.beat_interval_s("other") == 0.0025


def test_a_lighthouse_without_groups_sleeps() -> None:
    scene = formed("a")
    assert scene.jobs.next_deadline() == 200
    scene.leave("a")
    scene.until(1000)
    assert scene.jobs.next_deadline() is None
    assert scene.jobs.tick(1000) == ()
