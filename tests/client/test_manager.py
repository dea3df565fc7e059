"""Tests whole steps of several groups: identity, discards, errors, spares, sums."""

from __future__ import annotations

import copy
import gc
import os
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.bounds import check
from support.training import (
    Trainer,
    assert_identical,
    bits,
    in_step,
    lighthouse,
    make_manager,
    together,
    trainers,
)
from torch.distributed import ReduceOp

from torchft_svc.client import Manager, WorldSizeMode
from torchft_svc.errors import CommitFailed, ConfigError, RequestRefused


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=1) as address:
        yield address


@pytest.fixture
def pair_address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as address:
        yield address


def test_i3_groups_that_committed_the_same_step_are_identical(pair_address: str) -> None:
    with trainers(pair_address, 2) as (a, b):
        assert bits(a.state_dict()) != bits(b.state_dict())
        for num in range(1, 6):
            together(a.step, b.step)
            assert_identical([a, b])
            quorum = a.manager.last_quorum()
            assert quorum is not None
            assert a.manager.state_dict() == {
                "step": num,
                "batches_committed": 2 * num,
                "quorum_id": quorum.quorum_id,
            }


def test_an_average_is_that_of_the_groups(pair_address: str) -> None:
    with trainers(pair_address, 2) as (a, b):
        together(a.step, b.step)
        together(a.manager.start_quorum, b.manager.start_quorum)
        ours, theirs = torch.full((3,), 1.0), torch.full((3,), 5.0)
        works = together(lambda: a.manager.allreduce(ours), lambda: b.manager.allreduce(theirs))
        together(works[0].wait, lambda: works[1].get_future().wait())
        assert ours.tolist() == theirs.tolist() == [3.0, 3.0, 3.0]
        assert works[0].get_future().value() is ours
        assert together(a.manager.should_commit, b.manager.should_commit) == [True, True]


@pytest.mark.parametrize(
    ("op", "expected"),
    [(ReduceOp.SUM, 6), (ReduceOp.MAX, 5), (ReduceOp.MIN, 1), (ReduceOp.PRODUCT, 5)],
    ids=["sum", "max", "min", "product"],
)
def test_other_reductions_are_passed_through(
    pair_address: str, op: ReduceOp.RedOpType, expected: int
) -> None:
    with trainers(pair_address, 2) as (a, b):
        together(a.manager.start_quorum, b.manager.start_quorum)
        tensors = [torch.tensor([1]), torch.tensor([5])]
        works = together(
            lambda: a.manager.allreduce(tensors[0], reduce_op=op),
            lambda: b.manager.allreduce(tensors[1], reduce_op=op),
        )
        together(works[0].wait, works[1].wait)
        assert [tensor.item() for tensor in tensors] == [expected, expected]


def test_an_allreduce_nobody_waited_for_is_finished_by_the_vote(pair_address: str) -> None:
    with trainers(pair_address, 2) as (a, b):
        together(a.manager.start_quorum, b.manager.start_quorum)
        tensors = [torch.tensor([1.0]), torch.tensor([5.0])]
        together(lambda: a.manager.allreduce(tensors[0]), lambda: b.manager.allreduce(tensors[1]))
        assert together(a.manager.should_commit, b.manager.should_commit) == [True, True]
        assert [tensor.item() for tensor in tensors] == [3.0, 3.0]


@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.SUM], ids=["average", "sum"])
@pytest.mark.parametrize("kind", ["a parameter", "a loss"])
def test_what_autograd_knows_is_reduced_like_any_tensor(
    pair_address: str, op: ReduceOp.RedOpType, kind: str
) -> None:
    with trainers(pair_address, 2) as (a, b):
        together(a.manager.start_quorum, b.manager.start_quorum)
        parameters = [torch.ones(1, requires_grad=True), torch.full((1,), 3.0, requires_grad=True)]
        tensors = parameters if kind == "a parameter" else [1.0 * each for each in parameters]
        made_by = [each.grad_fn for each in tensors]
        works = together(
            lambda: a.manager.allreduce(tensors[0], reduce_op=op),
            lambda: b.manager.allreduce(tensors[1], reduce_op=op),
        )
        together(works[0].wait, works[1].wait)
        expected = 2.0 if op == ReduceOp.AVG else 4.0
        assert [tensor.item() for tensor in tensors] == [expected, expected]
        assert [each.grad_fn for each in tensors] == made_by
        assert together(a.manager.should_commit, b.manager.should_commit) == [True, True]


def test_whole_numbers_cannot_be_averaged(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.manager.start_quorum()
        with pytest.raises(ValueError, match="whole numbers cannot be averaged"):
            a.manager.allreduce(torch.tensor([1, 2]))


def test_i6_a_discarded_step_changes_nothing(pair_address: str) -> None:
    with trainers(pair_address, 2) as (a, b):
        in_step(2, a, b)
        before = bits(a.state_dict()), a.manager.state_dict()

        def fails() -> bool:
            a.backward()
            a.manager.report_error(RuntimeError("a bad batch"))
            return a.optimizer.step()

        together(fails, b.step)
        assert (bits(a.state_dict()), a.manager.state_dict()) == before
        in_step(4, a, b)
        assert_identical([a, b])


def test_an_error_in_one_group_does_not_keep_the_others_waiting(pair_address: str) -> None:
    with trainers(pair_address, 2) as (a, b):
        in_step(1, a, b)

        def fails_before_its_gradients() -> bool:
            a.optimizer.zero_grad()
            a.manager.wait_quorum()
            a.manager.report_error(RuntimeError("a bad batch"))
            a.loss().backward()
            return a.optimizer.step()

        began_at = time.monotonic()
        assert together(fails_before_its_gradients, b.step) == [False, False]
        check("an error elsewhere", time.monotonic() - began_at, 2.0)
        assert b.manager.errored() is not None
        in_step(3, a, b)
        assert_identical([a, b])


def test_a_backward_pass_that_raises_does_not_keep_the_others_waiting(pair_address: str) -> None:
    with trainers(pair_address, 2) as (a, b):
        together(lambda: a.until(1), lambda: b.until(1))

        def runs_out_of_memory() -> bool:
            a.optimizer.zero_grad()
            loss = a.loss()
            weights = a.model.get_submodule("0").get_parameter("weight")
            hook = weights.register_hook(lambda _: 1 / 0)  # the last layer's sum is under way
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            hook.remove()
            return a.step()

        def waits() -> bool:
            assert not b.step()
            return b.step()

        # The other group's wait would last as long as a collective or a quorum may, and fail both.
        assert together(runs_out_of_memory, waits) == [True, True]
        assert_identical([a, b])


def test_errors_are_latched_until_the_next_step(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.step()
        a.backward()
        first = RuntimeError("first")
        a.manager.report_error(first)
        a.manager.report_error(RuntimeError("second"))
        assert a.manager.errored() is first
        tensor = torch.tensor([4.0])
        assert a.manager.allreduce(tensor).wait()
        assert tensor.item() == 4.0
        assert not a.optimizer.step()
        a.optimizer.zero_grad()
        assert a.manager.errored() is None


def test_more_discards_than_max_retries_raise(address: str) -> None:
    with Trainer(address, "a", 0, max_retries=1) as a:
        a.step()
        a.backward()
        a.manager.report_error(RuntimeError("first"))
        assert not a.optimizer.step()
        a.backward()
        a.manager.report_error(RuntimeError("second"))
        with pytest.raises(CommitFailed, match=r"2 steps in a row.*second"):
            a.optimizer.step()


def test_too_few_groups_discard_the_step(address: str) -> None:
    with Trainer(address, "a", 0, min_replica_size=2) as a:
        assert not a.step()
        assert a.manager.current_step() == 0


def test_spares_contribute_nothing_and_stay_identical() -> None:
    options = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2}
    with lighthouse(min_replicas=3) as address, trainers(address, 3, **options) as groups:
        for _ in range(3):
            together(*(group.step for group in groups))
            assert_identical(groups)
        assert [group.manager.participating_rank() for group in groups] == [0, 1, None]
        assert [group.manager.num_participants() for group in groups] == [2, 2, 2]
        assert groups[2].manager.batches_committed() == 6


def test_a_synchronous_quorum_lets_everyone_participate(pair_address: str) -> None:
    with trainers(pair_address, 2, use_async_quorum=False) as (a, b):
        in_step(3, a, b)
        assert_identical([a, b])
        assert a.manager.is_participating()
        assert b.manager.is_participating()


def test_a_periodic_checkpoint_is_gone_on_from(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(3)
        saved = a.manager.state_dict(), bits(a.state_dict())
        state = a.state_dict()
        with Trainer(address, "b", 1, job_id="later") as b:
            b.load_state_dict(state)
            b.manager.load_state_dict(saved[0])
            assert b.manager.current_step() == 3
            b.step()
            assert b.manager.current_step() == b.manager.batches_committed() == 4


def test_i3_groups_from_checkpoints_of_one_step_and_of_different_runs_become_equal(
    address: str, pair_address: str
) -> None:
    """The job went back once, and one of them has kept what was given up."""
    saved = []
    for seed in range(2):
        with Trainer(address, "a", seed) as first:
            first.steps(3)
            saved.append((copy.deepcopy(first.state_dict()), first.manager.state_dict()))
    with trainers(pair_address, 2) as (a, b):
        for trainer, (state, counters) in zip((a, b), saved, strict=True):
            trainer.load_state_dict(state)
            trainer.manager.load_state_dict(counters)
        newer = bits(b.model.state_dict())
        together(a.manager.start_quorum, b.manager.start_quorum)
        together(a.manager.wait_quorum, b.manager.wait_quorum)
        assert [each.manager.is_participating() for each in (a, b)] == [False, True], "a heals"
        assert bits(b.model.state_dict()) == newer
        in_step(5, a, b)
        assert_identical([a, b])


def test_the_state_of_a_checkpoint_cannot_be_loaded_in_a_step(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.backward()
        with pytest.raises(RequestRefused, match="cannot happen in phase 'training'"):
            a.manager.load_state_dict({"step": 1, "batches_committed": 1})


def test_what_needs_a_step_says_so(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        for call in (
            a.manager.should_commit,
            a.manager.wait_quorum,
            lambda: a.manager.allreduce(torch.ones(1)),
        ):
            with pytest.raises(RequestRefused, match="zero_grad or start_quorum"):
                call()
        assert a.manager.participating_rank() is None
        assert a.manager.num_participants() == 0
        a.step()
        with pytest.raises(RequestRefused, match="zero_grad or start_quorum"):
            a.manager.should_commit()


def test_a_step_that_was_given_up_is_begun_anew(pair_address: str) -> None:
    with trainers(pair_address, 2) as (a, b):
        in_step(1, a, b)

        def gives_up_once() -> bool:
            a.backward()  # and no step: such as for a loss that is not finite
            return a.step()

        def goes_on() -> bool:
            b.step()
            # One that goes on without a question is in vain: the other group asks.
            return b.step() or b.step()

        together(gives_up_once, goes_on)
        in_step(5, a, b)
        assert_identical([a, b])


def test_the_name_gets_an_incarnation(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        assert a.manager.replica_id() == "a"
        a.step()
        assert a.manager.replica_id().startswith("a:")


def test_the_random_numbers_of_the_program_are_left_alone(address: str) -> None:
    """Samples are seeded by them, also while the threads of a manager draw their pauses."""

    def states() -> tuple[object, ...]:
        _, key, place, *_ = np.random.get_state()
        return random.getstate(), bytes(key), place, torch.get_rng_state().tolist()

    before = states()
    with make_manager(address, "a", state_dict=dict, load_state_dict=lambda _: None) as manager:
        for _ in range(2):
            manager.start_quorum()
            assert manager.should_commit()
        assert states() == before


def test_futures_never_fail(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.backward()
        good: torch.futures.Future[int] = torch.futures.Future()
        bad: torch.futures.Future[int] = torch.futures.Future()
        late: torch.futures.Future[int] = torch.futures.Future()
        wrapped = [
            a.manager.wrap_future(good, 0),
            a.manager.wrap_future(bad, 8),
            a.manager.wrap_future(late, 9, timedelta(milliseconds=20)),
        ]
        good.set_result(7)
        bad.set_exception(RuntimeError("broken"))
        assert [future.wait() for future in wrapped] == [7, 8, 9]
        assert "broken" in str(a.manager.errored())
        assert not a.optimizer.step()


def test_shutdown_may_be_called_twice_and_ends_the_step(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.step()
        a.manager.shutdown()
        a.manager.shutdown()


def test_bad_arguments_start_nothing(address: str) -> None:
    with pytest.raises(ConfigError, match=r"load_state_dict=None.*a function is needed"):
        Manager(state_dict=dict, lighthouse_addr=address)
    with pytest.raises(ConfigError, match=r"rank=2.*world_size=2"):
        Manager(rank=2, world_size=2, lighthouse_addr=address)
    with pytest.raises(ConfigError, match=r"timeout='60 s'.*quorum_timeout=10 s"):
        Manager(
            timeout=timedelta(seconds=60),
            quorum_timeout=timedelta(seconds=10),
            lighthouse_addr=address,
        )


def test_i7_managers_that_were_shut_down_leave_nothing_behind(pair_address: str) -> None:
    def held() -> tuple[int, int]:
        gc.collect()  # a model and its manager refer to each other
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def train() -> None:
        with trainers(pair_address, 2) as (a, b):
            in_step(2, a, b)

    counts = []
    for _ in range(4):
        train()
        counts.append(held())
    # What a manager leaves behind is there after each; what a library starts late, after one.
    for kind in zip(*counts, strict=True):
        assert any(after <= before for before, after in pairwise(kind)), counts
