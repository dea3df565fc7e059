"""Known traps of earlier services of this kind, one test each: those that the core decides.

The others (the timeouts of calls, of heartbeats and of healing) are tested beside the services and
the client.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Any

from support.core.barriers import TimelessGroup
from support.core.recorded_jobs import RecordedJobs
from support.core.scenes import JOB, Refused, Scene, config, formed, loss, member, plain, quorum

from torchft_svc.core.quorum.types import GroupRequest, WorkerRequest
from torchft_svc.errors import Unreachable


def test_trap_a_caller_that_gave_up_still_gets_into_the_next_quorum() -> None:
    scene = Scene(config(min_replicas=3))
    scene.ask("a")
    gone = scene.ask("b")
    scene.withdraw(gone)
    scene.ask_all("c", "d")
    scene.leave("b")
    assert scene.pop_quorums() == [(1, ["a", "c", "d"])]


def test_trap_the_id_restarts_with_the_lighthouse() -> None:
    scene = formed("a", "b")
    for _ in range(5):
        scene.ask("a", commit_failures=1)
        scene.ask("b")
    last = scene.pop_quorums()[-1][0]
    assert last == 6
    scene.jobs = RecordedJobs(config(min_replicas=2))
    scene.ask("a", seen_quorum_id=last)
    scene.ask("b", seen_quorum_id=last)
    assert scene.pop_quorums() == [(7, ["a", "b"])]
    scene.jobs = RecordedJobs(config(min_replicas=2), first_id=1_000)  # the clients report nothing
    scene.ask_all("a", "b")
    assert scene.pop_quorums() == [(1_001, ["a", "b"])]


def test_trap_the_map_of_heartbeats_grows_for_ever() -> None:
    """I7: after any number of groups and jobs have come and gone, nothing is left of them."""
    scene = Scene(config(heartbeat_timeout_s=2, max_jobs=8))
    for number in range(2000):
        job = f"job-{number % 20}" if number % 20 < 7 else JOB
        replica_id = f"group-{number % 40}:{number}"
        scene.beat(replica_id, job=job)
        if number % 3 == 0:
            caller = scene.ask(replica_id, step=number, job=job)
            if number % 2:
                scene.withdraw(caller, job=job)
        if number % 5 == 0:
            scene.leave(replica_id, job=job)
        scene.until(scene.now + 0.1)
        if number % 100 == 99:
            forget_records(scene.jobs)
            assert size(scene.jobs) < 2000
    scene.until(scene.now + 10)
    assert scene.jobs._jobs == {}
    assert len(scene.jobs._ended) <= 8
    assert scene.jobs.next_deadline() is None


def forget_records(jobs: Any) -> None:
    """Leave out the ledgers, which have limits of their own."""
    for ledger in jobs.ledgers.all():
        while len(ledger):
            ledger.drop_oldest()


def size(value: object) -> int:
    """How many things a value holds, however deep."""
    if isinstance(value, dict):
        return sum(1 + size(each) for each in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return sum(1 + size(each) for each in value)
    if isinstance(value, Enum):
        return 1
    fields = getattr(value, "__dict__", None)
    if fields is None:
        fields = {name: getattr(value, name) for name in getattr(value, "__slots__", ())}
    return sum(1 + size(each) for each in fields.values())


def test_trap_hung_groups_that_still_heartbeat_block_all_others() -> None:
    scene = formed("a", "b", "hung", settings=config(heartbeat_timeout_s=5))
    waits = []
    for step in range(1, 6):
        asked_at = scene.now
        scene.ask("a", step)
        scene.ask("b", step)
        for _ in range(40):
            if scene.pop_quorums():
                break
            scene.until(scene.now + 0.5)
            scene.beat("a", "b", "hung")
        waits.append(scene.now - asked_at)
    assert waits == [10, 0, 0, 0, 0]


def test_trap_a_failed_quorum_is_informed_to_nobody() -> None:
    scene = formed("a", settings=config(heartbeat_timeout_s=5, min_replicas=1))
    scene.beat("b")
    lonely = scene.ask("b")  # waits for a, and falls silent
    scene.until(104)
    scene.beat("a")
    scene.until(105)
    silent = "no sign of life for 5 s"
    sentence = f"no quorum: 'b' is out: {silent}"
    assert scene.pop_orders() == [loss("b", silent), Refused(lonely, "QuorumFailed", sentence)]
    group = TimelessGroup(3)
    for rank in range(3):
        group.quorum_requested(WorkerRequest(group_rank=rank, step=1), rank)
    reported = plain(group.lighthouse_answered(1, Unreachable("lighthouse", "host:1", "refused")))
    assert [order.caller for order in reported] == [0, 1, 2]
    assert {order.reason for order in reported} == {
        "lighthouse at host:1 cannot be reached: refused"
    }


def test_trap_the_join_timer_counts_from_the_earliest_waiter() -> None:
    """A newcomer that has waited for long does not throw out members that come 10 ms later."""
    scene = formed("a", "b")
    scene.ask("newcomer")
    scene.until(150)
    scene.ask("a", step=1)
    scene.until(150.01)
    scene.ask("b", step=1)
    assert scene.pop_quorums() == [(2, ["a", "b", "newcomer"])]


def test_trap_a_quorum_made_of_newcomers_only_forks_the_state() -> None:
    """Deviation b: they wait as long as a member of the previous quorum lives."""
    scene = formed("a", "b", step=7, settings=config(heartbeat_timeout_s=5))
    scene.ask("x")
    scene.ask("y")
    for _ in range(100):  # a and b are in a long step
        scene.until(scene.now + 1)
        scene.beat("a", "b", "x", "y")
    assert scene.pop_orders() == []
    assert scene.why() == "waiting for a, b: alive, but has not asked"
    scene.ask_all("a", "b", step=8)
    assert scene.pop_quorums() == [(2, ["a", "b", "x", "y"])]


def test_trap_newcomers_that_only_heartbeat_hold_up_a_running_job() -> None:
    """Deviation a: survivors go on in 250 ms, also while others start up beside them."""
    scene = formed("a", "b", "c")
    scene.beat("x", "y", "c:2")
    scene.ask_all("a", "b", step=1)
    assert scene.pop_orders() == []
    scene.leave("c")
    assert scene.pop_quorums() == [(2, ["a", "b"])]


def test_trap_only_the_last_rank_s_step_and_failures_are_forwarded() -> None:
    group = TimelessGroup(2)
    first = WorkerRequest(group_rank=0, step=4, commit_failures=2, shrink_only=True, unhealed=True)
    group.quorum_requested(first, 1)
    (asked,) = group.quorum_requested(WorkerRequest(group_rank=1, step=4), 2)
    assert isinstance(asked, GroupRequest)
    assert (asked.commit_failures, asked.shrink_only, asked.unhealed) == (2, True, True)
    group = TimelessGroup(2)
    group.quorum_requested(WorkerRequest(group_rank=0, step=4), 1)
    group.quorum_requested(WorkerRequest(group_rank=1, step=5), 2)
    reported = plain(group.lighthouse_answered(1, quorum(1, member("a", 4)), "a"))
    assert [(order.caller, order.error) for order in reported] == [
        (1, "RequestRefused"),
        (2, "RequestRefused"),
    ]


def test_ten_thousand_groups_cost_no_more_each_than_ten() -> None:
    """Arrivals are cheap while somebody is missing: looking at everyone each time would not end."""
    names = [f"group-{number:05}" for number in range(10_000)]
    scene = Scene()
    scene.beat(*names)
    started = time.process_time()
    for step in range(2):
        scene.ask_all(*names, step=step)
        assert len(scene.pop_quorums()) == 1
    scene.ask_all(*(f"newcomer-{number:05}" for number in range(2000)))
    assert len(scene.pop_newcomers()) == 1
    assert time.process_time() - started < 5  # it takes 0.7 s; looking at everyone takes 100 s


def test_newcomers_cost_no_more_each_while_thousands_wait_for_others() -> None:
    """Rows of groups that ask must not be gone through for each group that comes."""
    names = [f"group-{number:04}" for number in range(4000)]
    scene = Scene(config(min_replicas=4000))
    scene.beat(*names)
    scene.ask_all(*names)
    assert len(scene.pop_quorums()) == 1
    scene.leave(names[0])
    scene.ask_all(*names[1:], step=1)
    started = time.process_time()
    for number in range(2000):
        scene.opened(f"newcomer-{number:04}")
        scene.leave(f"newcomer-{number:04}")
    assert time.process_time() - started < 2  # it takes 0.2 s; looking at those that ask took 6 s
