"""Tests that no worker continues with weights that a heal has replaced only in part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.running import eventually
from support.training import TIMEOUT, Trainer, in_step, lighthouse, together

from torchft_svc.coordination import LighthouseClient
from torchft_svc.errors import RequestRefused


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


def torn(address: str, healthy: Trainer) -> Trainer:
    """A group that heals from ``healthy``, as far as its model."""
    healthy.steps(2)
    group = Trainer(address, "torn", 1)
    load = group.inner.load_state_dict

    def loads_once_half(state: dict[str, Any]) -> None:
        group.inner.load_state_dict = load  # type: ignore[method-assign]
        raise RuntimeError("no room")

    group.inner.load_state_dict = loads_once_half  # type: ignore[assignment,method-assign]
    assert together(group.step, lambda: healthy.meets(2)) == [False, True]
    assert "'default' cannot be loaded: RuntimeError('no room')" in str(group.manager.errored())
    return group


def test_i4_a_group_that_is_left_alone_with_them_ends(address: str) -> None:
    with (
        Trainer(address, "healthy", 0) as healthy,
        LighthouseClient(address, connect_timeout=TIMEOUT) as client,
        torn(address, healthy) as group,
    ):
        healthy.manager.shutdown()

        def accepts_loss() -> bool:
            """Accept the loss: the lighthouse would wait for somebody with the newer state."""
            eventually(lambda: "committed" in client.status()[0].waiting_for)
            client.accept_loss()
            return True

        def commits() -> None:
            while not group.step():
                pass

        def ends() -> bool:
            with pytest.raises(RequestRefused, match=r"not applied completely.*restart this"):
                commits()
            return True

        assert together(ends, accepts_loss) == [True, True]


def test_i3_a_group_that_heals_again_goes_on(address: str) -> None:
    with Trainer(address, "healthy", 0) as healthy, torn(address, healthy) as group:
        in_step(healthy.manager.current_step() + 3, healthy, group)
        healthy.manager.shutdown()
        group.until(group.manager.current_step() + 2)
