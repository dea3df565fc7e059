"""Tests what a service does with Python's collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from torchft_svc.rpc.upkeep import Upkeep


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    gc.enable()


@pytest.mark.usefixtures("collector")
def test_a_service_that_imported_without_the_collector_runs_with_it() -> None:
    gc.disable()
    Upkeep().switch_on()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000  # what was imported
