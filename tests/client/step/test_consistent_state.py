"""Tests that a checkpoint that any thread saves has the weights of the step that it names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from support.running import eventually
from support.training import DEADLINE_S, TIMEOUT, Trainer, bits, lighthouse, together

from torchft_svc.errors import DeadlineExceeded, RequestRefused

SHORT = timedelta(milliseconds=20)


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


class Saving(Trainer):
    """A group of which another thread saves checkpoints; records the weights after each step."""

    def __init__(self, address: str, name: str, seed: int, **options: Any) -> None:
        self.after: dict[int, Any] = {}
        self.saved: list[tuple[int, Any]] = []
        super().__init__(address, name, seed, **options)
        self.after[0] = bits(self.state_dict())

    def step(self) -> bool:
        committed = super().step()
        self.after[self.manager.current_step()] = bits(self.state_dict())
        return committed

    def save_until(self, over: threading.Event) -> bool:
        while not over.is_set():
            with self.manager.consistent_state():
                model = bits(self.state_dict())
                counters = self.manager.state_dict()
                again = bits(self.state_dict())
            assert model == again, "nothing changes in the block"
            self.saved.append((counters["step"], model))
        return True


@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])
def test_checkpoints_of_a_thread_are_those_of_a_step(address: str, use_async_quorum: bool) -> None:
    """Checkpoints of a group that trains, and of one that heals, belong to one step each."""
    over = threading.Event()
    options = {"use_async_quorum": use_async_quorum}
    with Saving(address, "a", 0, **options) as a:
        a.steps(2)
        with Saving(address, "b", 1, **options) as b:

            def joins() -> bool:
                try:
                    b.until(a.manager.current_step() + 20)
                finally:
                    over.set()
                    b.manager.shutdown()
                return True

            def trains() -> bool:
                while not over.is_set():
                    a.step()
                return True

            together(joins, trains, lambda: a.save_until(over), lambda: b.save_until(over))
    for group in (a, b):
        known = {step: {repr(state)} for step, state in group.after.items()}
        assert len({step for step, _ in group.saved}) > 5
        for step, state in group.saved:
            known.setdefault(step, {repr(state)}).add(repr(state))
        assert all(len(found) == 1 for found in known.values()), "one state for each step"


def test_an_update_waits_for_the_end_of_the_block(address: str) -> None:
    begun, may_end = threading.Event(), threading.Event()
    with Trainer(address, "a", 0) as a:
        a.step()

        def saves() -> bool:
            with a.manager.consistent_state():
                begun.set()
                assert may_end.wait(DEADLINE_S)
                return a.manager.current_step() == 1

        def trains() -> bool:
            assert begun.wait(DEADLINE_S)
            a.backward()
            releasing = threading.Thread(target=releases)
            releasing.start()
            committed = a.optimizer.step()
            releasing.join()
            return committed

        def releases() -> None:
            eventually(lambda: a.manager._registry.gate._shut)  # the vote waits
            may_end.set()

        assert together(saves, trains) == [True, True]
        assert a.manager.current_step() == 2


def test_a_block_that_does_not_end_costs_a_step(address: str) -> None:
    begun, may_end = threading.Event(), threading.Event()
    short = timedelta(milliseconds=300)
    with Trainer(address, "a", 0, timeout=short) as a:

        def saves() -> bool:
            with a.manager.consistent_state(timeout=TIMEOUT):
                begun.set()
                return may_end.wait(DEADLINE_S)

        def trains() -> bool:
            assert begun.wait(DEADLINE_S)
            assert not a.step()
            assert isinstance(a.manager.errored(), DeadlineExceeded)
            may_end.set()
            return True

        assert together(saves, trains) == [True, True]
        assert a.step()


def test_another_thread_waits_for_the_end_of_an_update(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.backward()
        with a.manager.commit() as committed:
            assert committed

            def reads() -> bool:
                with (
                    pytest.raises(DeadlineExceeded, match="being changed"),
                    a.manager.consistent_state(SHORT),
                ):
                    pass
                return True

            assert together(reads) == [True]


def test_on_the_training_thread_it_is_entered_between_steps(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        with a.manager.consistent_state():
            assert a.manager.state_dict()["step"] == 0
        a.step()
        with a.manager.consistent_state(), a.manager.consistent_state(SHORT):
            assert a.manager.state_dict()["step"] == 1
        a.backward()
        with a.manager.consistent_state():
            assert a.manager.state_dict()["step"] == 1
            with pytest.raises(RequestRefused, match=r"leave the block of consistent_state\(\)"):
                a.optimizer.step()
            with pytest.raises(RequestRefused, match=r"leave the block"):
                a.manager.start_quorum()
        assert a.optimizer.step(), "nothing was lost"


def test_after_an_update_of_a_loop_of_its_own_it_may_be_entered(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        for num in range(1, 4):
            a.manager.start_quorum()
            a.inner.zero_grad()
            a.loss().backward()
            assert a.manager.should_commit()
            a.inner.step()
            with a.manager.consistent_state(SHORT):
                assert a.manager.state_dict()["step"] == num
                assert together(lambda: a.manager.state_dict()["step"]) == [num]


def test_during_an_update_the_training_thread_is_refused(address: str) -> None:
    refused = []

    def reads(*_: object) -> None:
        with (
            pytest.raises(RequestRefused, match="is changing the state"),
            manager.consistent_state(),
        ):
            pass
        refused.append(1)

    with Trainer(address, "a", 0) as a:
        manager = a.manager
        a.inner.register_step_post_hook(reads)
        a.step()
        a.manager.start_quorum()
        a.inner.zero_grad()
        a.loss().backward()
        assert a.manager.should_commit()
        a.inner.step()
        a.backward()
        with a.manager.commit():
            reads()
        assert len(refused) == 3


def test_weights_that_belong_to_no_step_cannot_be_saved(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.backward()
        with pytest.raises(ZeroDivisionError), a.manager.commit():
            _ = 1 / 0

        def reads() -> bool:
            with (
                pytest.raises(RequestRefused, match="step 1 was not applied completely"),
                a.manager.consistent_state(),
            ):
                pass
            return True

        reads()
        assert together(reads) == [True]
