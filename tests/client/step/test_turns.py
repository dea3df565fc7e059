"""Tests groups that join at another place of their loop, such as at the other of two alternating
steps."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.bounds import check
from support.running import eventually
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
from torch import nn

from torchft_svc.client import DistributedDataParallel, Manager, Optimizer
from torchft_svc.core.quorum.worker.step import MAX_MISFITS
from torchft_svc.errors import RequestRefused

# What such a step may cost; without a comparison it lasts for the timeout of a collective.
DISCARD_S = 5.0


class Adversaries:
    """A group that trains a judge in one step, and a generator in the next."""

    def __init__(self, address: str, name: str, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.models = nn.ModuleDict({"generator": nn.Linear(2, 4), "judge": nn.Linear(4, 1)})
        self.adams = {
            each: torch.optim.Adam(model.parameters()) for each, model in self.models.items()
        }
        states = {"load_state_dict": self.load_state_dict, "state_dict": self.state_dict}
        self.manager = make_manager(address, name, **states, **options)
        self.generator = DistributedDataParallel(self.manager, self.models["generator"])
        self.judge = DistributedDataParallel(self.manager, self.models["judge"])
        self.optimizers = {each: Optimizer(self.manager, adam) for each, adam in self.adams.items()}
        self.trains_judge = True

    def state_dict(self) -> dict[str, Any]:
        adams = {each: adam.state_dict() for each, adam in self.adams.items()}
        return {"models": self.models.state_dict(), "adams": adams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.models.load_state_dict(state["models"])
        for each, adam in self.adams.items():
            adam.load_state_dict(state["adams"][each])

    def step(self) -> bool:
        """The next turn; the generator's sums begin with those of the judge."""
        turn = self.optimizers["judge" if self.trains_judge else "generator"]
        turn.zero_grad()
        made = self.generator(torch.randn(3, 2))
        self.judge(made.detach() if self.trains_judge else made).square().mean().backward()
        self.trains_judge = not self.trains_judge
        return turn.step()

    def joins(self, *others: Adversaries) -> list[bool]:
        """Run the first step with ``others``, which begin theirs when this one waits for them."""

        def step(other: Adversaries) -> bool:
            eventually(lambda: other.manager.num_replicas_waiting() == 1, what="one waits to join")
            return other.step()

        steps = [lambda other=other: step(other) for other in others]
        return together(self.step, *steps)


@contextlib.contextmanager
def adversaries(address: str, names: str, **options: Any) -> Iterator[list[Adversaries]]:
    with contextlib.ExitStack() as stack:
        groups = together(
            *(
                lambda name=name, seed=seed: Adversaries(address, name, seed, **options)
                for seed, name in enumerate(names)
            )
        )
        for group in groups:
            stack.enter_context(group.manager)
        yield groups


def ending(step: Callable[[], bool]) -> str:
    with pytest.raises(RequestRefused) as caught:
        step()
    return str(caught.value)


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_group_that_joins_at_the_other_turn_ends_and_the_others_go_on(
    use_async_quorum: bool,
) -> None:
    options = {"use_async_quorum": use_async_quorum, "min_replica_size": 2, "steady_steps": False}
    with lighthouse() as address, adversaries(address, "ab", **options) as (a, b):
        while not all(together(a.step, b.step)):
            pass
        assert together(a.step, b.step) == [True, True]
        with adversaries(address, "c", **options) as (c,):
            c.trains_judge = not a.trains_judge
            before = bits(a.state_dict())
            began_at = time.monotonic()
            assert c.joins(a, b) == [False, False, False]
            check("a step with a group that is elsewhere", time.monotonic() - began_at, DISCARD_S)
            ends, goes_on = (c, a) if a.trains_judge else (a, c)
            end = "number 2, the end of the step, after 1 operation"
            assert f"Here: {end}. In another group: number 2, the backward pass" in str(
                ends.manager.errored()
            )
            assert f"In another group: {end}" in str(goes_on.manager.errored())
            assert together(c.step, a.step, b.step) == [False, False, False]
            last = together(lambda: ending(c.step), a.step, b.step)
            assert last[1:] == [False, False]
            assert "does not match the others" in str(last[0])
            assert "3 steps in a row: the groups are at different operations" in str(last[0])
            assert "Optimizer(manager, [first, second])" in str(last[0])
            assert "does not match the others" in ending(c.step)
            for group in (a, b, c):
                assert bits(group.state_dict()) == before, "I6"
        step = a.manager.current_step()
        while not all(together(a.step, b.step)):
            pass
        assert a.manager.current_step() == step + 1
        assert bits(a.state_dict()) == bits(b.state_dict())


def test_a_group_that_joins_at_the_same_turn_trains_with_the_others() -> None:
    with lighthouse() as address, adversaries(address, "ab", min_replica_size=2) as (a, b):
        while not all(together(a.step, b.step)):
            pass
        with adversaries(address, "c", min_replica_size=2) as (c,):
            c.trains_judge = a.trains_judge
            assert c.joins(a, b) == [True, True, True]
            assert together(a.step, b.step, c.step) == [True, True, True]
            assert bits(a.state_dict()) == bits(b.state_dict()) == bits(c.state_dict())


def test_a_group_that_sums_less_is_found_at_the_end_of_the_step() -> None:
    with lighthouse(min_replicas=2) as address, contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(make_manager(address, name, init_sync=False)) for name in "ab")

        def sums(manager: Manager, num: int) -> bool:
            manager.start_quorum()
            for _ in range(num):
                manager.allreduce(torch.ones(4)).wait()
            return manager.should_commit()

        began_at = time.monotonic()
        assert together(lambda: sums(a, 2), lambda: sums(b, 1)) == [False, False]
        check("a step in which one group sums less", time.monotonic() - began_at, DISCARD_S)
        assert "Here: number 2, Manager.allreduce" in str(a.errored())
        assert "Here: number 2, the end of the step, after 1 operation" in str(b.errored())
        assert together(lambda: sums(a, 2), lambda: sums(b, 2)) == [True, True]


EXTRA = "number {}, Manager.allreduce: average of 7 elements of float32"


@pytest.mark.parametrize(
    ("extra_first", "num_others"), [(True, 2), (False, 2), (False, 1)], ids=["first", "last", "two"]
)
def test_a_group_whose_calls_differ_now_and_then_ends_and_the_others_go_on(
    extra_first: bool, num_others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One group counts its own passes and reduces more in each fifth: all wait for one another."""
    options = {"timeout": timedelta(seconds=1)}
    is_over = threading.Event()

    def train(trainer: Trainer, extra_every: int = 0) -> None:
        for num in itertools.count(1):
            if is_over.is_set():
                return
            time.sleep(0.01)
            has_extra = extra_every > 0 and num % extra_every == 0
            trainer.optimizer.zero_grad()
            loss = trainer.loss()
            if has_extra and extra_first:
                trainer.manager.allreduce(torch.ones(7)).wait()
            loss.backward()
            if has_extra and not extra_first:
                trainer.manager.allreduce(torch.ones(7)).wait()
            trainer.optimizer.step()

    def joins(trainer: Trainer) -> str:
        try:
            with pytest.raises(RequestRefused) as caught:
                train(trainer, extra_every=5)
            trainer.manager.shutdown()
            return str(caught.value)
        finally:
            is_over.set()

    with lighthouse() as address, trainers(address, num_others, **options) as others:
        in_step(3, *others)
        together(*(lambda each=each: each.steps(7) for each in others))
        with Trainer(address, "late", 9, **options) as late:
            ends = [lambda each=each: train(each) for each in others]
            reason, *_ = together(lambda: joins(late), *ends)
    assert "does not match the others" in reason
    assert f"{MAX_MISFITS} steps" in reason
    place = 1 if extra_first else 3
    own = "gradients: sum of" if extra_first else "the end of the step, after 2 operations"
    here, _, there = reason.partition("In group ")
    assert EXTRA.format(place) in here
    assert there.startswith("a: ")
    assert f"number {place}, {own}" in there
    assert late.manager._worker.state.num_commits > 0
    assert any("groups were at different operations" in each.message for each in caplog.records)


class Launches:
    """Counts what a trainer's process group is given: sums, and comparisons."""

    def __init__(self, manager: Manager) -> None:
        self.found = {"allreduce": 0, "allgather": 0}
        pg = manager._runtime.deps.pg
        for name in self.found:
            setattr(pg, name, self._counting(name, getattr(pg, name)))

    def _counting(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            self.found[name] += 1
            return run(*args)

        return count

    def pop_counts(self) -> tuple[int, int]:
        """Sums and comparisons since the last time."""
        counts = self.found["allreduce"], self.found["allgather"]
        self.found.update(allreduce=0, allgather=0)
        return counts


def test_only_what_is_not_known_is_compared() -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 3, check_every=0) as (a, b, c):
        counts = Launches(a.manager)
        num_sums = len(a.parallel._reducer._buckets)
        together(a.step, b.step, c.step)
        assert counts.pop_counts() == (num_sums, num_sums + 1), "the end of the step, too"
        together(a.step, b.step, c.step)
        assert counts.pop_counts() == (num_sums, 0)
        c.manager.shutdown()
        while not all(together(a.step, b.step)):
            pass
        counts.pop_counts()
        together(a.step, b.step)
        assert counts.pop_counts() == (num_sums, 0)


def test_survivors_compare_the_first_operation_alone() -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 3, check_every=0) as (a, b, c):
        for _ in range(2):
            together(a.step, b.step, c.step)
        c.manager.shutdown()
        counts = Launches(a.manager)
        committed = together(a.step, b.step)
        while not all(committed):
            counts.pop_counts()
            committed = together(a.step, b.step)
        assert counts.pop_counts() == (len(a.parallel._reducer._buckets), 1)


def test_steps_that_take_turns_are_compared_once_each() -> None:
    with lighthouse() as address, adversaries(address, "ab", min_replica_size=2) as (a, b):
        while not all(together(a.step, b.step)):
            pass
        for _ in range(3):
            together(a.step, b.step)
        counts = Launches(a.manager)
        for _ in range(2):
            # Both turns begin with the judge's pass, and the begin of a pass is sent in any case.
            # Then one goes on and the other ends.
            assert together(a.step, b.step) == [True, True]
            assert counts.pop_counts() in ((1, 2), (2, 2))


def test_what_is_logged_now_and_then_is_compared_each_time() -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 2, check_every=0) as (a, b):

        def logs(trainer: Trainer) -> float:
            assert trainer.step()
            loss = torch.full((1,), float(trainer is a))
            trainer.manager.allreduce(loss).wait()
            return loss.item()

        counts = Launches(a.manager)
        for _ in range(2):
            together(a.step, b.step)
        counts.pop_counts()
        assert together(lambda: logs(a), lambda: logs(b)) == [0.5, 0.5]
        assert counts.pop_counts()[1] == 1
        together(a.step, b.step)
        assert counts.pop_counts()[1] == 0, "the sums of a step are what they were"
        assert together(lambda: logs(a), lambda: logs(b)) == [0.5, 0.5]
        assert counts.pop_counts()[1] == 1
        assert together(lambda: logs(a), lambda: logs(b)) == [0.5, 0.5]
        assert counts.pop_counts()[1] == 1, (
            "a group may leave it out where it goes on without a question"
        )
        assert_identical([a, b])


def refuses(state: Any) -> None:
    raise RuntimeError("another layer")


def end_of_loading(trainer: Trainer) -> str:
    """Train until that ends with an error, and leave; the reason."""
    reason = ending(lambda: trainer.steps(4) == [])
    trainer.manager.shutdown()
    assert "could not be loaded 3 times in a row" in reason
    assert "'default' cannot be loaded: RuntimeError('another layer')" in reason
    assert "Fix load_state_dict" in reason
    return reason


def test_a_group_that_cannot_load_the_first_state_ends_and_the_others_go_on() -> None:
    with (
        lighthouse(min_replicas=2) as address,
        Trainer(address, "a", 0) as a,
        Trainer(address, "b", 1) as b,
        Trainer(address, "c", 2, load_state_dict=refuses) as c,
    ):

        def num_discarded(trainer: Trainer) -> int:
            return next(num for num in itertools.count() if trainer.step())

        outcomes = together(
            lambda: num_discarded(a), lambda: num_discarded(b), lambda: end_of_loading(c)
        )
        # One for each load; one more when it leaves, and before each load at most one more, if it
        # asks for a state that its source has replaced.
        assert set(outcomes[:2]) <= set(range(3, 8))
        assert together(a.step, b.step) == [True, True]
        assert_identical([a, b])


def test_a_group_that_joins_and_cannot_load_ends_and_nobody_waits_for_it() -> None:
    with lighthouse() as address, Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "c", 2, load_state_dict=refuses) as c:

            def trains() -> str:
                while not c.manager._runtime.closed:
                    assert a.step()
                return ""

            together(lambda: end_of_loading(c), trains)
        assert a.step()
