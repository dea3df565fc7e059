"""Tests that training continues when lighthouses are killed and restarted."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from support.bounds import Late, check
from support.running import Process, lighthouse_process, steady_address
from support.training import DEADLINE_S, Trainer, assert_identical, together, trainers

from tools.chaos.bounds import LIGHTHOUSE_BACK_S
from torchft_svc.errors import Unreachable

FLAGS = ("--min-replicas=2", "--join-timeout-ms=2000")


class Course:
    """One group's steps, with what each of them showed."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.quorum_ids: list[int] = []
        self.members: dict[int, list[str]] = {}  # by quorum id
        self.committed: list[bool] = []
        self.committed_at: list[float] = []

    def until(self, step: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.trainer.manager.current_step() < step:
            assert time.monotonic() < deadline, f"{self.trainer.name} does not get to step {step}"
            self.committed.append(self.trainer.step())
            if self.committed[-1]:
                self.committed_at.append(time.monotonic())
            quorum = self.trainer.manager.last_quorum()
            self.quorum_ids.append(0 if quorum is None else quorum.quorum_id)
            if quorum is not None:
                self.members[quorum.quorum_id] = quorum.replica_ids

    def check(self, max_discarded: int) -> None:
        assert self.quorum_ids == sorted(self.quorum_ids), "I1"
        assert self.committed.count(False) <= max_discarded, self.committed


def train_through(
    addresses: str, trouble: Callable[[], None], max_discarded: int = 1
) -> tuple[float, list[int]]:
    """Train to step 5, make trouble, train to 15; the ids, and how many seconds after the trouble
    all have committed again."""
    with trainers(addresses, 2) as (a, b):
        courses = [Course(a), Course(b)]
        together(*(lambda each=each: each.until(5) for each in courses))
        trouble()
        began_at = time.monotonic()
        together(*(lambda each=each: each.until(15) for each in courses))
        assert_identical([a, b])
    for course in courses:
        course.check(max_discarded)
    a_members, b_members = (course.members for course in courses)
    for quorum_id in a_members.keys() & b_members.keys():
        assert a_members[quorum_id] == b_members[quorum_id], "I1"
    again_at = [min(at for at in course.committed_at if at > began_at) for course in courses]
    return max(again_at) - began_at, courses[0].quorum_ids


@pytest.mark.processes
def test_the_first_lighthouse_of_a_list_is_killed() -> None:
    with lighthouse_process(*FLAGS) as first, lighthouse_process(*FLAGS) as second:
        took_s, ids = train_through(f"{first.address},{second.address}", first.kill)
    check("training goes on", took_s, 1.0)
    assert ids[-1] == ids[0], "its quorum stays in force"


@pytest.mark.processes
def test_the_only_lighthouse_is_killed_and_comes_back() -> None:
    address = steady_address()
    back: list[Process] = []

    def restart() -> None:
        first.kill()
        back.append(lighthouse_process(*FLAGS, bind=address))

    try:
        with lighthouse_process(*FLAGS, bind=address) as first:
            took_s, ids = train_through(address, restart)
    finally:
        for process in back:
            with process:
                pass
    check("training goes on", took_s, LIGHTHOUSE_BACK_S)
    assert ids[-1] == ids[0], "its quorum stays in force"


@pytest.mark.processes
def test_without_a_quorum_nothing_is_summed() -> None:
    """The other group waits as well, or would take the zeros that come for gradients."""
    with (
        lighthouse_process(*FLAGS) as lighthouse,
        trainers(
            lighthouse.address, 2, connect_timeout=timedelta(seconds=0.3), steady_steps=False
        ) as (a, b),
    ):
        try:
            together(lambda: a.until(3), lambda: b.until(3))
        except Unreachable as error:
            raise Late("a stall was longer than the connect timeout") from error
        lighthouse.kill()
        began_at = time.monotonic()
        assert not a.step()
        check("no quorum, with 10 s left,", time.monotonic() - began_at, 2.0)
        assert a.manager._runtime.deps.pg.errored() is not None, "the other notices it at once"


@pytest.mark.processes
def test_all_groups_go_back_to_the_first_when_it_is_back() -> None:
    """Whoever starts now asks the first one: staying away would leave him alone there."""
    address = steady_address()
    with lighthouse_process(*FLAGS) as second:
        both = f"{address},{second.address}"
        with (
            trainers(both, 2) as (a, b),
            lighthouse_process(*FLAGS, bind=address),
            Trainer(both, "c", 2) as c,
        ):
            together(*(lambda each=each: each.meets(3) for each in (a, b, c)))
