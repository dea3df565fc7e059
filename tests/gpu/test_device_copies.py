"""Tests what a heal does so that large copies between a device and the host are fast."""

from __future__ import annotations

import pytest
import torch
from support.gpu.ranks import needs_gpu

from torchft_svc.client.checkpointing.encoding.device_copies import DeviceCopies, pinned
from torchft_svc.client.checkpointing.encoding.memory import allocate

pytestmark = [pytest.mark.gpu, needs_gpu]

LARGE = 64 << 20  # bytes; less is not pinned


def test_memory_that_cannot_be_pinned_is_copied_nevertheless() -> None:
    """CUDA keeps the error of a failed call, and torch raises it where the next kernel starts."""
    state = {"weight": torch.ones(LARGE, dtype=torch.uint8)}
    target = torch.zeros(LARGE, dtype=torch.uint8, device="cuda")
    with pinned(state):
        assert state["weight"].is_pinned()
        with pinned(state):  # memory is pinned once only
            target.copy_(state["weight"])
            assert bool((target == 1).all())
        assert state["weight"].is_pinned()
    assert not state["weight"].is_pinned()


def test_memory_is_unpinned_after_a_load_that_raises() -> None:
    state = {"weight": torch.ones(LARGE, dtype=torch.uint8)}
    was_pinned = []

    def load() -> None:
        with pinned(state):
            was_pinned.append(state["weight"].is_pinned())
            raise ValueError("on purpose")

    torch.cuda.init()
    with pytest.raises(ValueError, match="on purpose"):
        load()
    assert was_pinned == [True]
    assert not state["weight"].is_pinned()


def test_a_default_device_changes_nothing() -> None:
    """A program may have called `torch.set_default_device`."""
    part = torch.arange(256, device="cuda").to(torch.uint8)
    copied = allocate(part.numel())
    with torch.device("cuda"):
        DeviceCopies([(0, part)], copied).run()
    assert bytes(copied) == bytes(range(256))
