"""Tests how a holder serves a copy (rule B4)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from torchft_svc.buddy.holder import HolderConfig, ServedCopy
from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.step.state import MANAGER_KEY
from torchft_svc.core.quorum.lighthouse.copies import HeldCopy
from torchft_svc.errors import ConfigError, PeerError
from torchft_svc.testing.proxy import DEADLINE_S

LONG = timedelta(seconds=DEADLINE_S)
SOON = timedelta(milliseconds=300)


def state_of(step: int) -> dict[str, Any]:
    counters = {"step": step, "quorum_id": 7, "batches_committed": step}
    return {"user": torch.full((1000,), float(step)), MANAGER_KEY: counters}


def config(**changes: Any) -> HolderConfig:
    return HolderConfig(**{"lighthouse": "127.0.0.1:1", "host": "127.0.0.1", **changes})


def fetch(copy: HeldCopy) -> Any:
    with HTTPTransport[Any](LONG, hostname="127.0.0.1") as receiver:
        return receiver.recv_checkpoint(0, copy.address, copy.step, SOON)


def test_b4_a_copy_can_be_fetched_again_and_again_until_it_is_freed() -> None:
    copy = ServedCopy(state_of(5), 0, config())
    for _ in range(3):
        assert torch.equal(fetch(copy.described)["user"], state_of(5)["user"])
    copy.close()
    with pytest.raises(PeerError):
        fetch(copy.described)


@pytest.mark.parametrize(
    "wrong", [{"group_world_size": 0}, {"ranks": ()}, {"ranks": (1,)}, {"ranks": (-1,)}]
)
def test_ranks_that_no_worker_has_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config(**wrong)
