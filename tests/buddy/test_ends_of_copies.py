"""Tests when a holder frees the copies of a run that is over (rule B6), with real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.held_copies import (
    EVERY,
    LONG_S,
    holder,
    lighthouse,
    status_of,
    train_until_copied,
    view_of,
)
from support.running import eventually
from support.training import Trainer

from torchft_svc.core.quorum.lighthouse import holder_plan


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as server:
        yield server.address()


def test_b6_copies_end_when_all_groups_have_ended_on_purpose(address: str) -> None:
    with holder(address) as held:
        with Trainer(address, "a", 1, buddy_every=EVERY) as trainer:
            train_until_copied(trainer, held, address)
        eventually(lambda: view_of(address).is_finished, LONG_S)
        eventually(lambda: not view_of(address).copies, LONG_S, "the copies were not freed")
        assert status_of(address).num_holders >= 1, "the holder waits for the next run"
        with Trainer(address, "a", 2, buddy_every=1) as trainer:
            trainer.step()
            assert trainer.manager.current_step() == 1, "the next run begins anew"


@pytest.mark.parametrize("patience_s", [0.3, 60.0])
def test_b6_copies_end_when_the_job_has_gone_on_from_an_earlier_step(
    address: str, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """The second lighthouse shows where somebody has taken the job back to, not for a moment."""
    monkeypatch.setattr(holder_plan, "BEHIND_S", patience_s)
    with lighthouse() as first, holder(f"{first.address()},{address}") as held:
        with Trainer(first.address(), "a", 1, buddy_every=EVERY) as trainer:
            train_until_copied(trainer, held, first.address(), above=20)
            first.shutdown()  # before the trainer: nobody sees that it ends on purpose
        with Trainer(address, "b", 2) as taken_back:
            taken_back.steps(3)
            eventually(lambda: view_of(address).members, LONG_S)
            if patience_s > LONG_S:
                eventually(lambda: held._plan._history._behind_since is not None, LONG_S)
                assert view_of(address).copies
                return
            eventually(lambda: not view_of(address).copies, LONG_S, "the copies were not freed")
            assert taken_back.manager.current_step() < 20
