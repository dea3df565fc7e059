"""Tests a step that is begun again after the load of a copy was interrupted (rule B5)."""

from __future__ import annotations

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
from support.training import Trainer

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
