"""Rules G5 and G6: who is started again, and as what, when a group of a launcher ends."""

from __future__ import annotations

import math

import pytest

from torchft_svc.core.launch.replica_groups import (
    ALONE_S,
    MAX_LOCAL_GROUPS,
    SETTLE_S,
    STATUS_INTERVAL_S,
    EndLaunch,
    EndReplicaGroups,
    GiveUpReplicaGroup,
    GroupsRules,
    GroupsView,
    ReplicaGroups,
    RequestJobStatus,
    SeenGroup,
    StartReplicaGroup,
)
from torchft_svc.errors import ConfigError

KILLED = -9
NOBODY = GroupsView(num_places=2)
FINISHED = GroupsView(is_finished=True)


def seen(*replica_ids: str, num_places: int = 2) -> GroupsView:
    """A job in whose quorum are groups of this launcher, such as ``0:a``."""
    own = {int(each.split(":")[0]): SeenGroup(each, in_quorum=True) for each in replica_ids}
    return GroupsView(num_places=num_places, own_groups=own)


TRAINS = seen("0:a", "1:a")


def begun(num_groups: int = 2, num_spares: int = 1, max_restarts: int = 3) -> ReplicaGroups:
    rules = GroupsRules(num_groups=num_groups, num_spares=num_spares, max_restarts=max_restarts)
    launch = ReplicaGroups(rules)
    orders = launch.start_all(0.0)
    roles = [index >= num_groups for index in range(num_groups + num_spares)]
    assert orders == tuple(StartReplicaGroup(index, role) for index, role in enumerate(roles))
    return launch


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_groups": 0}, "--replica-groups=0 cannot work: use 1 or more"),
        ({"num_spares": -1}, "--spares=-1 cannot work: use 0 or more"),
        ({"num_spares": MAX_LOCAL_GROUPS}, "use 256 or less"),
        ({"num_spares": 1, "max_restarts": 0}, "give --max-restarts, too"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, int], sentence: str) -> None:
    values = {"num_groups": 2, "num_spares": 1, "max_restarts": 3, **given}
    with pytest.raises(ConfigError, match=sentence):
        GroupsRules(**values)


def test_g5_a_lost_group_is_started_again_as_a_spare() -> None:
    launch = begun()
    assert launch.group_ended(1, KILLED, 10.0) == (RequestJobStatus(),)
    assert launch.status_received(TRAINS, 10.1) == (StartReplicaGroup(1, is_spare=True),)
    assert launch.next_deadline() == math.inf  # a group of this launcher trains


def test_g5_a_lost_spare_stands_by_again() -> None:
    launch = begun()
    launch.group_ended(2, KILLED, 10.0)
    assert launch.status_received(TRAINS, 10.1) == (StartReplicaGroup(2, is_spare=True),)


@pytest.mark.parametrize("num_places", [0, 1])
def test_g6_before_the_job_was_whole_a_group_is_started_as_one(num_places: int) -> None:
    launch = begun()
    launch.group_ended(1, KILLED, 1.0)
    view = GroupsView(others_train=bool(num_places), num_places=num_places)
    assert launch.status_received(view, 1.1) == (StartReplicaGroup(1, is_spare=False),)


def test_without_spares_a_group_is_started_again_at_once() -> None:
    launch = begun(num_spares=0)
    assert launch.group_ended(1, KILLED, 10.0) == (StartReplicaGroup(1, is_spare=False),)
    assert launch.next_deadline() == math.inf


def test_g6_groups_that_are_lost_together_are_started_as_groups() -> None:
    launch = begun()
    assert launch.group_ended(0, KILLED, 10.0) == (RequestJobStatus(),)
    assert launch.group_ended(1, KILLED, 10.0) == ()  # the same status answers for both
    assert launch.status_received(NOBODY, 10.1) == (
        StartReplicaGroup(0, is_spare=False),
        StartReplicaGroup(1, is_spare=False),
    )


def test_g6_a_spare_becomes_a_group_if_nobody_trains() -> None:
    launch = begun()
    launch.group_ended(0, KILLED, 10.0)
    launch.status_received(TRAINS, 10.1)  # the lighthouse did not know yet that both are lost
    launch.group_ended(2, KILLED, 10.2)
    launch.status_received(TRAINS, 10.3)
    launch.group_ended(1, KILLED, 10.4)
    assert launch.status_received(TRAINS, 10.4) == (StartReplicaGroup(1, is_spare=False),)
    launch.group_ended(1, 0, 10.4)
    at, orders = 10.4, launch.status_received(NOBODY, 10.4)
    assert orders == ()
    while not orders and at < 60.0:
        assert launch.next_deadline() == pytest.approx(at + STATUS_INTERVAL_S)
        at += STATUS_INTERVAL_S
        assert launch.tick(at) == (RequestJobStatus(),)
        orders = launch.status_received(NOBODY, at)
    assert at >= 10.4 + ALONE_S
    assert [type(each) for each in orders] == [EndReplicaGroups]
    assert orders[0].indices == (0,)  # type: ignore[union-attr]
    # Its end is no failure, and it needs no status.
    assert launch.group_ended(0, 0, at + 1) == (StartReplicaGroup(0, is_spare=False),)


def test_g6_a_spare_that_is_lost_before_the_job_is_whole_is_a_spare_again() -> None:
    launch = begun()
    launch.group_ended(2, KILLED, 1.0)
    assert launch.status_received(GroupsView(), 1.1) == (StartReplicaGroup(2, is_spare=True),)


def test_g6_no_more_groups_come_back_than_were_asked_for() -> None:
    launch = begun()
    for index in range(3):
        launch.group_ended(index, KILLED, 10.0)
    assert launch.status_received(NOBODY, 10.1) == (
        StartReplicaGroup(0, is_spare=False),
        StartReplicaGroup(1, is_spare=False),
        StartReplicaGroup(2, is_spare=True),
    )


def test_g6_groups_that_the_lighthouse_still_counts_do_not_train() -> None:
    launch = begun(num_groups=3)
    all_of_them = seen("0:a", "1:a", "2:a", num_places=3)
    for index in range(3):
        assert launch.group_ended(index, KILLED, 10.0) == (RequestJobStatus(),)
        # The last one is known to have been the last, though all are in the view.
        orders = launch.status_received(all_of_them, 10.1)
        assert orders == (StartReplicaGroup(index, is_spare=index < 2),)
        assert (launch.next_deadline() < math.inf) == (index == 2)


def test_g6_a_group_that_is_given_up_leaves_no_spare_waiting() -> None:
    launch = begun(num_groups=1, max_restarts=1)
    one = {"num_places": 1}
    launch.group_ended(0, KILLED, 1.0)
    launch.status_received(NOBODY, 1.1)
    launch.status_received(seen("0:b", **one), 5.0)
    assert launch.next_deadline() == math.inf
    assert launch.group_ended(0, KILLED, 10.0) == (
        GiveUpReplicaGroup(0, KILLED),
        RequestJobStatus(),
    )
    launch.status_received(seen("0:b", **one), 10.0)
    (order,) = launch.status_received(NOBODY, 10.0 + ALONE_S)
    assert isinstance(order, EndReplicaGroups)
    assert order.indices == (1,)


def test_g6_a_spare_that_has_taken_a_place_is_a_group() -> None:
    launch = begun()
    launch.group_ended(0, KILLED, 10.0)
    launch.status_received(TRAINS, 10.1)
    # Another lighthouse: it knows both groups, and has no quorum yet.
    own = {index: SeenGroup(f"{index}:a", in_quorum=False) for index in (1, 2)}
    for at in (20.0, 20.0 + ALONE_S, 200.0):
        assert launch.status_received(GroupsView(own_groups=own), at) == ()


def test_g4_a_spare_that_stands_by_after_the_end_of_its_job_is_ended() -> None:
    launch = begun()
    launch.group_ended(1, KILLED, 10.0)
    launch.status_received(TRAINS, 10.1)
    assert launch.group_ended(2, 0, 11.0) == (RequestJobStatus(),)
    launch.status_received(seen("0:a"), 11.0)
    assert launch.group_ended(0, 0, 12.0) == (RequestJobStatus(),)
    assert launch.status_received(FINISHED, 12.0) == ()  # the lighthouse drains those that it knows
    orders = launch.status_received(FINISHED, 12.0 + ALONE_S)
    assert orders == (EndReplicaGroups((1,), "the job has finished"),)
    assert launch.group_ended(1, 1, 23.0) == (EndLaunch(0),)


def test_g4_a_group_that_is_killed_as_its_job_ends_does_not_train_alone() -> None:
    launch = begun(num_groups=1)
    launch.status_received(seen("0:a", num_places=1), 2.0)
    launch.group_ended(0, KILLED, 10.0)
    assert launch.status_received(FINISHED, 10.1) == ()
    assert launch.group_ended(1, 0, 10.2) == (RequestJobStatus(),)
    assert launch.status_received(FINISHED, 10.2 + ALONE_S) == (EndLaunch(0),)


def test_the_end_of_a_former_run_ends_nothing() -> None:
    launch = begun()
    launch.group_ended(1, KILLED, 1.0)
    assert launch.status_received(FINISHED, 1.1) == (StartReplicaGroup(1, is_spare=False),)


def test_no_spare_is_ended_while_all_groups_start() -> None:
    launch = begun()
    for at in (2.0, 20.0, 200.0):
        launch.tick(at)
        assert launch.status_received(GroupsView(), at) == ()


def test_a_lighthouse_that_is_away_is_asked_again() -> None:
    launch = begun()
    launch.group_ended(1, KILLED, 10.0)
    assert launch.status_received(None, 10.1) == ()
    assert launch.next_deadline() == pytest.approx(10.1 + STATUS_INTERVAL_S)
    assert launch.tick(10.1 + STATUS_INTERVAL_S) == (RequestJobStatus(),)
    assert launch.status_received(TRAINS, 12.2) == (StartReplicaGroup(1, is_spare=True),)


@pytest.mark.parametrize("is_seen_away", [True, False])
def test_g5_a_restarted_lighthouse_is_believed_when_it_knows_who_trains(
    *, is_seen_away: bool
) -> None:
    """The group that is lost meanwhile stands by: a spare takes its place, as ever."""
    launch = begun()
    launch.status_received(TRAINS, 2.0)
    launch.group_ended(0, KILLED, 10.0)
    if is_seen_away:
        assert launch.status_received(None, 10.1) == ()
    assert launch.status_received(GroupsView(), 12.2) == ()
    assert launch.next_deadline() == pytest.approx(12.2 + STATUS_INTERVAL_S)
    assert launch.status_received(seen("1:a"), 14.2) == (StartReplicaGroup(0, is_spare=True),)
    assert launch.next_deadline() == math.inf


def test_g6_a_restarted_lighthouse_to_which_nobody_returns_is_believed_later() -> None:
    launch = begun()
    launch.status_received(TRAINS, 2.0)
    for index in range(3):
        launch.group_ended(index, KILLED, 10.0)
    for waited_s in (0.0, 2.0, 0.9 * SETTLE_S):
        assert launch.status_received(GroupsView(), 12.0 + waited_s) == ()
    assert launch.status_received(GroupsView(), 12.0 + SETTLE_S) == (
        StartReplicaGroup(0, is_spare=False),
        StartReplicaGroup(1, is_spare=False),
        StartReplicaGroup(2, is_spare=True),
    )


def test_g6_the_last_of_several_groups_is_started_again_at_once() -> None:
    launch = begun()
    launch.status_received(TRAINS, 2.0)
    assert launch.group_ended(0, 0, 10.0) == (RequestJobStatus(),)
    launch.status_received(seen("1:a", num_places=1), 10.1)
    launch.group_ended(1, KILLED, 11.0)
    orders = launch.status_received(seen("1:a", num_places=1), 11.1)
    assert orders == (StartReplicaGroup(1, is_spare=False),)


def test_a_launcher_looks_until_the_job_has_all_of_its_groups() -> None:
    launch = begun()
    launch.tick(2.0)
    launch.status_received(seen("0:a", num_places=1), 2.0)
    assert launch.next_deadline() == pytest.approx(2.0 + STATUS_INTERVAL_S)
    launch.status_received(TRAINS, 4.0)
    assert launch.next_deadline() == math.inf


def test_a_group_without_restarts_is_given_up() -> None:
    launch = begun(max_restarts=1)
    launch.group_ended(1, KILLED, 10.0)
    launch.status_received(TRAINS, 10.1)
    assert launch.group_ended(1, KILLED, 20.0) == (
        GiveUpReplicaGroup(1, KILLED),
        RequestJobStatus(),
    )
    launch.status_received(TRAINS, 20.1)
    assert launch.group_ended(0, 0, 30.0) == (RequestJobStatus(),)
    assert launch.group_ended(2, 0, 30.0) == (EndLaunch(0),)  # two groups have finished


def test_too_few_groups_that_finish_are_a_failure() -> None:
    launch = begun(num_spares=0, max_restarts=0)
    assert launch.group_ended(0, 1, 1.0) == (GiveUpReplicaGroup(0, 1),)
    assert launch.group_ended(1, 0, 1.0) == (EndLaunch(1),)


def test_a_final_error_ends_all_groups() -> None:
    launch = begun()
    orders = launch.group_ended(1, 93, 1.0)
    reason = "group 1 has an error that no restart mends"
    assert orders == (EndReplicaGroups((0, 2), reason),)
    assert launch.group_ended(0, -15, 2.0) == ()
    assert launch.group_ended(2, 0, 2.0) == (EndLaunch(93),)


def test_an_interrupt_ends_all_groups_and_starts_none() -> None:
    launch = begun()
    launch.group_ended(1, KILLED, 1.0)  # it waits for the status
    assert launch.interrupt("SIGTERM") == (EndReplicaGroups((0, 2), "SIGTERM"),)
    assert launch.status_received(TRAINS, 1.1) == ()
    assert launch.interrupt("SIGTERM") == ()
    launch.group_ended(0, 0, 2.0)
    assert launch.group_ended(2, 0, 2.0) == (EndLaunch(1),)
