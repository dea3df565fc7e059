"""Tests reductions between two steps, such as for a logged loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.bounds import check
from support.training import Trainer, assert_identical, lighthouse, together, trainers

from torchft_svc.client import ManagedProcessGroup, Manager
from torchft_svc.client.reduce.reduction import Reduction
from torchft_svc.errors import RequestRefused


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as address:
        yield address


def by_the_manager(manager: Manager, tensor: torch.Tensor) -> None:
    manager.allreduce(tensor).wait()


def by_a_managed_group(manager: Manager, tensor: torch.Tensor) -> None:
    group = ManagedProcessGroup(manager)
    assert group.size() == 2
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)


Reduce = Callable[[Manager, torch.Tensor], None]
reductions = pytest.mark.parametrize(
    "reduce", [by_the_manager, by_a_managed_group], ids=["manager", "managed group"]
)


def logged(trainer: Trainer, value: float, reduce: Reduce) -> float:
    """One step, and then the average of ``value``, as torchtitan logs its loss."""
    assert trainer.step()
    trainer.manager.wait_quorum()
    loss = torch.tensor([value])
    reduce(trainer.manager, loss)
    return loss.item()


@reductions
def test_a_loss_is_averaged_after_the_step(address: str, reduce: Reduce) -> None:
    with trainers(address, 2) as (a, b):
        for step in range(1, 4):
            together(a.step, b.step) if step == 1 else None
            losses = together(lambda: logged(a, 1.0, reduce), lambda: logged(b, 5.0, reduce))
            assert losses == [3.0, 3.0]
        assert a.manager.current_step() == 4, "no step was lost"
        assert a.manager.errored() is None
        assert_identical([a, b])


def test_a_loss_that_nobody_waits_for_is_there_when_the_next_step_begins(address: str) -> None:
    with trainers(address, 2) as (a, b):

        def program(trainer: Trainer, value: float) -> float:
            trainer.step()
            loss = torch.tensor([value])
            trainer.manager.allreduce(loss)
            assert trainer.step()
            return loss.item()

        assert together(lambda: program(a, 1.0), lambda: program(b, 5.0)) == [3.0, 3.0]


@reductions
def test_a_group_that_goes_on_without_it_costs_no_step(
    address: str, reduce: Reduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_svc.client.step.sums._BETWEEN_STEPS_S", 0.5)
    with trainers(address, 2) as (a, b):
        together(a.step, b.step)

        def logs_alone() -> bool:
            began_at = time.monotonic()
            loss = torch.tensor([1.0])
            reduce(a.manager, loss)
            check("a reduction that nobody else joins", time.monotonic() - began_at, 2.0)
            assert loss.item() == 1.0
            assert "does not take part" in str(a.manager.errored())
            return a.step()

        assert together(logs_alone, b.step) == [True, True]
        assert a.manager.errored() is None
        assert together(lambda: logged(a, 1.0, reduce), lambda: logged(b, 5.0, reduce)) == [3.0] * 2
        assert a.manager.current_step() == 3
        assert_identical([a, b])


def test_a_report_never_meets_a_sum_of_the_next_step(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report and a sum of another size, if they met, would end the processes.

    In a term, a group that skips the report begins the next step at once. If the sizes are equal,
    gloo would add both up.
    """
    monkeypatch.setattr("torchft_svc.client.step.sums._BETWEEN_STEPS_S", 0.5)
    with trainers(address, 2) as (a, b):

        def logs_each_step(trainer: Trainer) -> None:
            trainer.meets(2)
            while trainer.manager.current_step() < 5:
                logged(trainer, 1.0, by_the_manager)

        together(lambda: logs_each_step(a), lambda: logs_each_step(b))
        assert a.manager._worker.round.keeps_quorum

        def logs_alone() -> None:
            a.step()
            loss = torch.tensor([1.0])
            a.manager.allreduce(loss).wait()
            assert loss.item() == 1.0
            assert "does not take part" in str(a.manager.errored())
            a.until(8)

        together(logs_alone, lambda: b.until(8))
        assert_identical([a, b])


def test_a_group_that_ends_is_not_waited_for() -> None:
    with lighthouse() as address, trainers(address, 2) as (a, b):
        together(lambda: a.meets(2), lambda: b.meets(2))
        b.manager.shutdown()
        began_at = time.monotonic()
        loss = torch.tensor([1.0])
        a.manager.allreduce(loss).wait()
        check("a reduction with one that is gone", time.monotonic() - began_at, 2.0)
        assert loss.item() == 1.0
        assert a.step()


def test_after_a_discarded_step_the_value_stays(address: str) -> None:
    with trainers(address, 2) as (a, b):
        together(a.step, b.step)

        def fails(trainer: Trainer) -> float:
            trainer.backward()
            trainer.manager.report_error(RuntimeError("a bad batch"))
            assert not trainer.optimizer.step()
            loss = torch.tensor([7.0])
            trainer.manager.allreduce(loss).wait()
            return loss.item()

        assert together(lambda: fails(a), lambda: fails(b)) == [7.0, 7.0]


def test_before_the_first_step_there_is_nobody(address: str) -> None:
    with Trainer(address, "a", 0, quorum_timeout=timedelta(seconds=60)) as a:
        for call in (lambda: a.manager.allreduce(torch.ones(1)), a.manager.wait_quorum):
            with pytest.raises(RequestRefused, match="zero_grad or start_quorum"):
                call()


def test_a_wait_that_is_interrupted_discards_the_step(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainers(address, 2) as (a, b):
        together(a.step, b.step)

        def is_interrupted() -> bool:
            a.backward()
            extra = torch.ones(1)
            work = a.manager.allreduce(extra)
            thread, wait = threading.get_ident(), Reduction._wait_in_slices

            def interrupt(reduction: Reduction) -> None:
                if threading.get_ident() == thread:  # the other group waits here, too
                    raise KeyboardInterrupt
                wait(reduction)

            with monkeypatch.context() as patch:
                patch.setattr(Reduction, "_wait_in_slices", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    work.wait()
            committed = a.optimizer.step()
            a.step()  # it goes on, and lets go of the sum that it left
            return committed

        def goes_on() -> bool:
            b.backward()
            b.manager.allreduce(torch.ones(1))
            committed = b.optimizer.step()
            b.step()
            return committed

        assert not together(is_interrupted, goes_on)[0]
