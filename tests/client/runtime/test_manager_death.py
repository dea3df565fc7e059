"""Tests that the death of a manager costs at most one step: rank 0 restarts it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
from support.bounds import check
from support.running import eventually, lives, sidecar_of
from support.training import DEADLINE_S, Trainer, assert_identical, lighthouse, together, trainers

from tools.chaos.bounds import MANAGER_BACK_S
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.core.route import MANAGER_PATIENCE_S
from torchft_svc.errors import GivenUp, QuorumFailed, TorchFTError, Unreachable
from torchft_svc.manager_server import liveness_pipe, supervisor
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.commands import ask
from torchft_svc.rpc.security import PLAIN

from .test_workers import workers

pytestmark = pytest.mark.processes

# How far two derivations of the wall clock from the monotonic one are apart.
CLOCKS_S = 0.02
# A group of one worker goes on in its term meanwhile.
NO_MANAGER_S = MANAGER_PATIENCE_S + 2.0


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=1) as address:
        yield address


def kill_manager(name: str) -> float:
    """SIGKILL; when that was."""
    process = sidecar_of(name)
    process.send_signal(signal.SIGKILL)
    return time.monotonic()


def goes_on(workers: list[Trainer], until: int) -> float:
    """Train until all have committed step ``until``; when the first one has committed again."""
    again_at: list[float] = []

    def trains(worker: Trainer) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while worker.manager.current_step() < until:
            assert time.monotonic() < deadline
            if worker.step():
                again_at.append(time.monotonic())

    together(*(lambda worker=worker: trains(worker) for worker in workers))
    return min(again_at)


def test_the_manager_of_one_group_dies_in_the_forward_pass() -> None:
    with (
        lighthouse(min_replicas=2) as address,
        trainers(address, 2, in_process=False) as groups,
    ):
        a, _ = groups
        together(*(lambda group=group: group.steps(2) for group in groups))
        together(*(group.optimizer.zero_grad for group in groups))
        a.manager.wait_quorum()
        killed_at = kill_manager("a")
        together(*(lambda group=group: finishes(group) for group in groups))
        again_at = goes_on(groups, until=6)
        check("a manager dies", again_at - killed_at, MANAGER_BACK_S)
        assert_identical(groups)
        assert a.manager.num_participants() == 2


def test_i5_a_manager_s_death_ends_a_wait_for_a_group_that_hangs() -> None:
    """Some backends do not notice that a peer has left; the one here cannot leave.

    In a term the group has not left.
    """
    with (
        lighthouse(min_replicas=2) as address,
        trainers(address, 2, in_process=False, steady_steps=False) as groups,
    ):
        a, _ = groups
        together(*(group.step for group in groups))
        together(*(group.optimizer.zero_grad for group in groups))
        together(*(group.manager.wait_quorum for group in groups))  # and b does no more
        began_at = time.monotonic()
        committed, _ = together(lambda: finishes(a), lambda: kill_manager("a"))
        check("a manager dies, with 30 s left,", time.monotonic() - began_at, 3.0)
        assert not committed


def finishes(group: Trainer) -> bool:
    group.loss().backward()
    return group.optimizer.step()


def test_the_manager_of_the_only_group_dies_and_no_state_is_lost(address: str) -> None:
    with Trainer(address, "a", 0, in_process=False) as a:
        a.steps(3)
        for _ in range(2):
            killed_at = kill_manager("a")
            again_at = goes_on([a], a.manager.current_step() + 2)
            check("the only manager dies", again_at - killed_at, MANAGER_BACK_S)
        assert a.manager.current_step() == 7


def test_a_manager_that_does_not_move_is_replaced(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with workers(address, "a", 2, in_process=False) as group:
        together(*(worker.step for worker in group))
        stuck = sidecar_of("a")
        stuck.suspend()
        stuck_at = time.monotonic()
        monkeypatch.setattr(liveness_pipe, "SILENCE_S", 2 * liveness_pipe.SIGN_INTERVAL_S)
        again_at = goes_on(group, until=4)
        bound_s = 3 * liveness_pipe.SIGN_INTERVAL_S + MANAGER_BACK_S  # it looks once in an interval
        check("a manager is stuck", again_at - stuck_at, bound_s)
        assert not lives(stuck)


def test_workers_that_vote_outlive_a_manager_that_does_not_move(address: str) -> None:
    """The manager is replaced before they give up the decision on their votes, and end."""
    with workers(address, "a", 2, in_process=False) as group:
        together(*(worker.step for worker in group))
        together(*(worker.backward for worker in group))
        stuck = sidecar_of("a")
        stuck.suspend()
        together(*(lambda worker=worker: finishes(worker) for worker in group))
        goes_on(group, until=4)
        assert not lives(stuck)


def test_the_manager_dies_while_the_quorum_is_asked_for() -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 2, in_process=False) as groups:
        a, b = groups
        together(*(lambda group=group: group.steps(2) for group in groups))
        a.optimizer.zero_grad()  # asks, and b does not
        killed_at = kill_manager("a")

        def a_goes_on() -> float:
            finishes(a)
            return goes_on([a], until=5)

        again_at = min(together(a_goes_on, lambda: goes_on([b], until=5)))
        check("a manager dies", again_at - killed_at, MANAGER_BACK_S)
        assert_identical(groups)


def test_all_workers_of_a_group_follow_its_manager(address: str) -> None:
    with workers(address, "a", 2, in_process=False) as group:
        together(*(worker.step for worker in group))
        killed_at = kill_manager("a")
        again_at = goes_on(group, until=4)
        check("a manager of two workers dies", again_at - killed_at, MANAGER_BACK_S)
        assert [worker.manager.current_step() for worker in group] == [4, 4]


def records(address: str) -> list[pb.Incident]:
    """The records of the job, without its beginning."""
    request, answer = pb.LighthouseIncidentsRequest(), pb.LighthouseIncidentsResponse
    found = ask("lighthouse", address, PLAIN, DEFAULT_JOB, request, answer).incidents
    return [each for each in found if each.kind != "joined"]


def troubles(address: str) -> list[str]:
    return [each.kind for each in records(address)]


def test_n1_each_death_of_a_manager_of_two_workers_is_one_record(address: str) -> None:
    with workers(address, "a", 2, in_process=False) as group:
        together(*(worker.step for worker in group))
        for num in (1, 2):
            kill_manager("a")
            eventually(lambda num=num: troubles(address) == num * ["manager_died"])
            goes_on(group, until=group[0].manager.current_step() + 2)
        assert troubles(address) == ["manager_died", "manager_died"]


def test_n1_the_record_of_a_death_begins_before_the_next_manager_starts(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_at = []
    start = supervisor.ManagerProcess.start

    def note_start(*args: Any) -> supervisor.ManagerProcess:
        started_at.append(time.time())
        return start(*args)

    monkeypatch.setattr(supervisor.ManagerProcess, "start", note_start)
    with workers(address, "a", 1, in_process=False) as group:
        group[0].steps(3)  # in its term, it is not lost meanwhile
        kill_manager("a")
        eventually(lambda: troubles(address) == ["manager_died"])
        (died,) = records(address)
        assert died.at <= started_at[0] + CLOCKS_S


@pytest.mark.parametrize("votes", [(True, True), (True, False)], ids=["commits", "discards"])
def test_the_manager_dies_while_the_workers_vote(address: str, votes: tuple[bool, bool]) -> None:
    with workers(address, "a", 2, in_process=False) as group:
        together(*(worker.step for worker in group))
        together(*(worker.backward for worker in group))
        killed = threading.Event()
        waits = threading.Event()

        def first() -> bool:
            waits.set()
            return group[0].optimizer.step()

        def second() -> bool:
            assert killed.wait(DEADLINE_S)
            if not votes[1]:
                group[1].manager.report_error(RuntimeError("only here"))
            return group[1].optimizer.step()

        def kill() -> bool:
            assert waits.wait(DEADLINE_S)
            kill_manager("a")
            killed.set()
            return True

        decisions = together(first, second, kill)[:2]
        assert decisions == [all(votes)] * 2, "all get one decision"
        goes_on(group, until=4)


def lose_answers(losers: list[Trainer]) -> list[float]:
    """The manager of group a dies when all workers have their next answer but ``losers``; when."""
    killed_at: list[float] = []
    arrived = threading.Barrier(len(losers), lambda: killed_at.append(kill_manager("a")))

    def lose_answer(loser: Trainer) -> None:
        client = loser.manager._runtime.deps.client
        ask = client._ask_quorum

        def loses_answer(*args: Any) -> Any:
            ask(*args)
            client._ask_quorum = ask
            arrived.wait(DEADLINE_S)
            raise Unreachable("manager", client._addr, "its answer was lost")

        client._ask_quorum = loses_answer

    for loser in losers:
        lose_answer(loser)
    return killed_at


@pytest.mark.parametrize("meets_in_step", [True, False])
@pytest.mark.parametrize(("num", "losers"), [(2, [0]), (2, [1]), (3, [0, 2]), (3, [1])])
def test_the_manager_dies_when_only_some_workers_have_their_answer(
    address: str, num: int, losers: list[int], meets_in_step: bool
) -> None:
    """The others learn it from the next manager, and do not wait for what their peers would ask
    next: they wait for each other in the step, or after it."""
    with workers(address, "a", num, in_process=False, steady_steps=False) as group:
        together(*(worker.step for worker in group))
        killed_at = lose_answers([group[rank] for rank in losers])
        meeting = threading.Barrier(num)

        def steps(worker: Trainer) -> bool:
            worker.optimizer.zero_grad()
            with contextlib.suppress(QuorumFailed):
                worker.manager.wait_quorum()
            if meets_in_step:
                meeting.wait(DEADLINE_S)
            committed = finishes(worker)
            if not meets_in_step:
                meeting.wait(DEADLINE_S)
            return committed

        assert together(*(lambda worker=worker: steps(worker) for worker in group)) == [False] * num
        waited_s = time.monotonic() - killed_at[0]
        check("a manager has answered some workers", waited_s, MANAGER_BACK_S)
        goes_on(group, until=4)


def test_m7_where_the_first_answer_is_lost_the_group_stands_until_its_quorum_timeout(
    address: str,
) -> None:
    """The workers share no round that distinguishes them for the next manager. All go on."""
    limit_s = 6.0
    limit = timedelta(seconds=limit_s)
    options = {"timeout": limit, "quorum_timeout": limit, "init_sync": False}
    with workers(address, "a", 2, in_process=False, **options) as group:
        killed_at = lose_answers(group[1:])
        meeting = threading.Barrier(2)

        def trains(worker: Trainer) -> float:
            """The time when the first step is over; the next question of a worker frees a voter."""
            worker.optimizer.zero_grad()
            with contextlib.suppress(TorchFTError):
                worker.manager.wait_quorum()
            meeting.wait(DEADLINE_S)
            assert not finishes(worker)
            over_at = time.monotonic()
            worker.until(step=2)
            return over_at

        over_at = together(*(lambda worker=worker: trains(worker) for worker in group))
        check("the first answer is lost", max(over_at) - killed_at[0], limit_s + MANAGER_BACK_S)


def test_a_worker_without_rank_0_is_informed_at_once(address: str) -> None:
    """Rank 0 stops for good, and with it the manager; no other is started."""
    with workers(address, "a", 2, in_process=False) as group:
        together(*(worker.step for worker in group))
        group[0].manager.shutdown()
        group[1].manager.start_quorum()
        with pytest.raises(TorchFTError):
            group[1].manager.wait_quorum()


@pytest.mark.parametrize("size", [1, 2])
def test_all_workers_end_when_their_managers_die_one_after_the_other(
    address: str, size: int
) -> None:
    """A further manager would not help, so rank 0 starts no more, and nobody waits for one."""
    with workers(address, "a", size, in_process=False) as group:
        together(*(worker.step for worker in group))
        for _ in range(supervisor.MAX_STARTS):
            killed = sidecar_of("a")
            killed.kill()
            eventually(lambda killed=killed: others_than(killed))
            goes_on(group, until=group[0].manager.current_step() + 2)
        kill_manager("a")
        began_at = time.monotonic()
        errors = together(*(lambda worker=worker: ends_with(worker) for worker in group))
        check("no other manager", time.monotonic() - began_at, NO_MANAGER_S)
    for error in errors:
        assert isinstance(error, GivenUp)
        assert (error.peer, error.reason) == ("manager", supervisor.TOO_MANY_STARTS)


def others_than(manager: psutil.Process) -> bool:
    """Whether the group has another one."""
    with contextlib.suppress(ValueError):  # there is none
        return sidecar_of("a") != manager
    return False


def ends_with(worker: Trainer) -> BaseException:
    """The error that ends the worker's loop."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            worker.step()
        except TorchFTError as error:
            return error
    raise AssertionError("it does not end")
