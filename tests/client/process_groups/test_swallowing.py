"""Tests collectives that do not raise errors: their results, and that votes see the errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bounds import check
from support.collective_calls import NAMES, Calls
from support.meeting_place import MeetingPlace, marked
from support.running import eventually
from support.training import (
    TIMEOUT,
    Trainer,
    assert_identical,
    in_step,
    lighthouse,
    together,
    trainers,
)

from torchft_svc.client import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    Manager,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
)
from torchft_svc.client.process_groups.wrappers import ProcessGroupWrapper
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.testing import FakeProcessGroupWrapper

KINDS = {"gloo": ProcessGroupGloo, "isolated": ProcessGroupBabyGloo}
SOON = timedelta(milliseconds=50)
# The first argument is an input on the member of rank 0, or of rank 1, or on both.
KEPT = {("broadcast", 0), ("send_and_recv", 0), ("reduce", 1)}


@pytest.fixture(params=marked(KINDS))
def members(request: pytest.FixtureRequest) -> Iterator[list[ErrorSwallowingProcessGroupWrapper]]:
    groups = [ErrorSwallowingProcessGroupWrapper(KINDS[request.param](TIMEOUT)) for _ in range(2)]
    MeetingPlace().configure(*groups)
    yield groups
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("name", ["allreduce", "allgather_base", "broadcast"])
def test_a_wait_that_ends_early_is_no_failure(
    members: list[ErrorSwallowingProcessGroupWrapper], name: str
) -> None:
    a, b = members

    def launch(group: ProcessGroup) -> tuple[Any, torch.Tensor]:
        own, output = torch.full((1,), group.rank() + 1.0), torch.zeros(2)
        if name == "allgather_base":
            return group._allgather_base(output, own), output
        return getattr(group, name)([own]), own

    (late, on_a) = launch(b if name == "broadcast" else a)  # not the root: it has to wait
    with pytest.raises(RuntimeError, match=r"is not over after 0\.05 s"):
        late.wait(SOON)
    assert (a.errored(), b.errored()) == (None, None)
    other, on_b = launch(a if name == "broadcast" else b)
    assert late.wait(TIMEOUT)
    assert other.wait()
    wanted = {"allreduce": [3.0], "allgather_base": [1.0, 2.0], "broadcast": [1.0]}[name]
    assert (on_a.tolist(), on_b.tolist()) == (wanted, wanted)
    assert (a.errored(), b.errored()) == (None, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_that_failed_leaves_zeros_and_so_do_all_that_follow(
    members: list[ErrorSwallowingProcessGroupWrapper], rank: int
) -> None:
    group, other = members[rank], members[1 - rank]
    first = group.allreduce([failed := torch.ones(2)])
    other.shutdown()
    assert first.wait(TIMEOUT)
    assert failed.tolist() == [0, 0]
    assert group.error() is group.errored() is group.failure() is not None
    for name in NAMES:
        for value in getattr(Calls(group), name)():
            assert value == (rank + 1 if (name, rank) in KEPT else 0), name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "barrier"])
def test_a_collective_whose_peer_is_gone(name: str, rank: int) -> None:
    groups = [ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(TIMEOUT)) for _ in range(2)]
    MeetingPlace().configure(*groups)
    group, other = groups[rank], groups[1 - rank]
    began_at = time.monotonic()
    found, _ = together(getattr(Calls(group), name), other.shutdown)
    check("a collective whose peer leaves", time.monotonic() - began_at, 3.0)
    if group.error() is not None:  # a send, or a root's, may be over
        kept = (name, rank) in KEPT
        assert found == [rank + 1.0 if kept else 0.0] * len(found)
    else:
        assert (name, rank) in KEPT | {("scatter", 0)}
    group.shutdown()


def test_the_future_of_what_has_none(members: list[ErrorSwallowingProcessGroupWrapper]) -> None:
    def scatter(group: ProcessGroup) -> list[float]:
        output = torch.zeros(1)
        group._reduce_scatter_base(output, torch.ones(2)).get_future().wait()
        return output.tolist()

    assert together(*(lambda group=group: scatter(group) for group in members)) == [[2.0]] * 2


# -- under a manager -------------------------------------------------------------------------------


def waits(manager: Manager) -> threading.Event:
    """Set when ``manager`` has waited for a sum longer than for a slice of time."""
    long_wait = threading.Event()
    send = manager._worker.on_phase

    def note(report: PhaseReport) -> None:
        if report.phase is Phase.QUORUM:
            long_wait.set()
        send(report)

    manager._worker.on_phase = note
    return long_wait


@pytest.fixture(params=marked(KINDS))
def pair(request: pytest.FixtureRequest) -> Iterator[list[Trainer]]:
    """Two groups that have trained a step; ``inner`` of each can be made to fail."""
    made: list[FakeProcessGroupWrapper] = []

    def make() -> ErrorSwallowingProcessGroupWrapper:
        made.append(FakeProcessGroupWrapper(KINDS[request.param](TIMEOUT)))
        return ErrorSwallowingProcessGroupWrapper(made[-1])

    with lighthouse(min_replicas=2) as address:
        groups = [Trainer(address, name, seed, pg=make()) for seed, name in enumerate("ab")]
        try:
            assert together(*(group.step for group in groups)) == [True, True]
            yield groups
        finally:
            for group in groups:
                group.manager.shutdown()


def group_of(trainer: Trainer) -> Any:
    return trainer.manager._runtime.deps.pg


def test_a_group_that_is_late_takes_part(pair: list[Trainer]) -> None:
    a, b = pair
    a_waits = waits(a.manager)

    def late() -> bool:
        b.optimizer.zero_grad()
        loss = b.loss()
        assert a_waits.wait(20)
        loss.backward()
        return b.optimizer.step()

    assert together(a.step, late) == [True, True]
    assert_identical(pair)
    assert a.manager.batches_committed() == 4


def test_an_average_of_one_s_own_that_is_late(pair: list[Trainer]) -> None:
    a, b = pair
    a_waits = waits(a.manager)

    def average(trainer: Trainer, value: float) -> list[float]:
        trainer.optimizer.zero_grad()
        mine, managed = torch.full((1,), value), torch.full((1,), value)
        trainer.manager.allreduce(mine).wait()
        ManagedProcessGroup(trainer.manager).allreduce([managed]).wait()
        trainer.loss().backward()
        assert trainer.optimizer.step()
        return [mine.item(), managed.item()]

    def late() -> list[float]:
        b.manager.start_quorum()
        assert a_waits.wait(20)
        return average(b, 3.0)

    assert together(lambda: average(a, 1.0), late) == [[2.0, 4.0]] * 2
    assert_identical(pair)


def test_a_swallowed_error_of_a_sum_discards_the_step(pair: list[Trainer]) -> None:
    a, b = pair

    def fails() -> bool:
        a.optimizer.zero_grad()
        loss = a.loss()
        a.manager.wait_quorum()
        group_of(a).parent.report_future_error(RuntimeError("asked for"))
        loss.backward()
        return a.optimizer.step()

    began_at = time.monotonic()
    assert together(fails, b.step)[0] is False
    check("a step with a swallowed error", time.monotonic() - began_at, 5.0)
    assert "asked for" in str(a.manager.errored())
    in_step(3, a, b)
    assert_identical(pair)


def test_a_swallowed_error_of_a_collective_of_one_s_own_discards_the_step(
    pair: list[Trainer],
) -> None:
    a, b = pair

    def gathers(trainer: Trainer, error: Exception | None) -> bool:
        trainer.backward()
        group = group_of(trainer)
        if error is not None:
            group.parent.report_future_error(error)
        gathered = torch.full((2,), 7.0)
        dist.all_gather_into_tensor(gathered, torch.ones(1), group=group)
        assert gathered.tolist() == ([1.0] * 2 if error is None else [0.0] * 2)
        return trainer.optimizer.step()

    asked_for = RuntimeError("asked for")
    assert together(lambda: gathers(a, asked_for), lambda: gathers(b, None))[0] is False
    assert a.manager.errored() is asked_for
    in_step(3, a, b)
    assert_identical(pair)


class _ErrorsOnRequest(ProcessGroupWrapper):
    """A user's own wrapper, that reports errors by `errored` alone."""

    error: Exception | None = None

    def errored(self) -> Exception | None:
        return self.error or super().errored()


def test_the_vote_asks_whatever_wraps_the_group() -> None:
    with (
        lighthouse() as address,
        trainers(address, 1, pg=_ErrorsOnRequest(ProcessGroupGloo())) as (a,),
    ):
        assert a.step()
        a.backward()
        group_of(a).error = RuntimeError("no report was sent")
        assert not a.optimizer.step()
        assert a.manager.errored() is group_of(a).error


@pytest.mark.parametrize("wrap", [lambda pg: pg, ErrorSwallowingProcessGroupWrapper])
def test_a_member_that_leaves_after_its_last_sum_costs_no_step(
    wrap: Callable[[ProcessGroup], ProcessGroup],
) -> None:
    with lighthouse() as address, trainers(address, 1, pg=wrap(ProcessGroupGloo())) as (a,):
        assert a.step()
        a.backward()
        quorum = a.manager.last_quorum()
        assert quorum is not None
        pg = group_of(a)
        pg.lose_member(quorum.quorum_id, "b:1 is out")
        eventually(pg.errored)
        assert a.optimizer.step()
