"""Tests a step that is begun again after the load of a copy was interrupted (rule B5)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.held_copies import (
    EVERY,
    LONG_S,
    KnownCopy,
    holder,
    lighthouse,
    reported,
    train_until_copied,
    view_of,
)
from support.running import eventually
from support.training import Trainer, together

from torchft_svc.errors import RequestRefused, TornState
from torchft_svc.testing.transport_contract import bits


class Interrupted(BaseException):
    """What the handler of a signal raises in the middle of a load function."""


class LoadedInPart(Trainer):
    """A trainer whose first load ends between the model and the optimizer."""

    error: BaseException | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.inner.load_state_dict(state["optimizer"])


@pytest.fixture(scope="module")
def held() -> Iterator[KnownCopy]:
    with (
        lighthouse() as server,
        holder(server.address()) as holding,
        Trainer(server.address(), "a", 1, buddy_every=EVERY) as trainer,
    ):
        yield train_until_copied(trainer, holding, server.address())


ENDED_BY = pytest.mark.parametrize(
    ("error", "raised"), [(Interrupted(), Interrupted), (ValueError("a bad file"), TornState)]
)


@ENDED_BY
def test_b5_a_step_that_is_begun_again_loads_the_copy_again(
    held: KnownCopy, error: BaseException, raised: type[BaseException]
) -> None:
    with (
        lighthouse() as server,
        reported(server.address(), held.copy),
        LoadedInPart(server.address(), "b", 2, buddy_every=1) as trainer,
    ):
        trainer.error = error
        with pytest.raises(raised):
            trainer.optimizer.zero_grad()
        assert trainer.manager.current_step() == 0
        trainer.optimizer.zero_grad()
        assert trainer.manager.current_step() == held.copy.step
        assert bits(trainer.state_dict()) == held.bits
        trainer.loss().backward()
        assert trainer.optimizer.step()
        assert trainer.manager.current_step() == held.copy.step + 1


def test_b5_a_copy_that_was_loaded_in_part_is_healed_by_a_living_group(held: KnownCopy) -> None:
    with (
        lighthouse() as server,
        Trainer(server.address(), "c", 3) as living,
        LoadedInPart(server.address(), "b", 2, buddy_every=1) as trainer,
    ):
        with reported(server.address(), held.copy):
            trainer.error = Interrupted()
            with pytest.raises(Interrupted):
                trainer.optimizer.zero_grad()
        assert living.step()
        assert together(lambda: living.meets(2), lambda: trainer.meets(2)) == [True, True]
        assert trainer.manager.current_step() == living.manager.current_step() > 1
        assert bits(trainer.state_dict()) == bits(living.state_dict())


def test_b5_what_raises_after_the_load_of_a_copy_leaves_it_whole(held: KnownCopy) -> None:
    def interrupt(record: logging.LogRecord) -> bool:
        if "beginning from a copy" in record.msg:
            raise Interrupted
        return True

    log = logging.getLogger("torchft_svc.client.step.weights")
    with (
        lighthouse() as server,
        reported(server.address(), held.copy),
        Trainer(server.address(), "b", 2, buddy_every=1) as trainer,
    ):
        log.addFilter(interrupt)
        try:
            with pytest.raises(Interrupted):
                trainer.optimizer.zero_grad()
        finally:
            log.removeFilter(interrupt)
        assert trainer.manager.current_step() == held.copy.step
        assert bits(trainer.state_dict()) == held.bits
        assert trainer.step()


@ENDED_BY
def test_b5_no_step_begins_with_a_copy_that_was_loaded_in_part(
    held: KnownCopy, error: BaseException, raised: type[BaseException]
) -> None:
    """The copy is gone when the step is begun again: no job begins anew with such weights."""
    with (
        lighthouse() as server,
        LoadedInPart(server.address(), "b", 2, buddy_every=1) as trainer,
    ):
        with reported(server.address(), held.copy):
            trainer.error = error
            with pytest.raises(raised):
                trainer.optimizer.zero_grad()
        eventually(lambda: not view_of(server.address()).copies, LONG_S, "a copy is still reported")
        for _ in range(2):
            with pytest.raises(RequestRefused, match="a copy was not loaded completely"):
                trainer.step()
        assert trainer.manager.current_step() == 0
