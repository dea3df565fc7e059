"""Fixtures of the failure table: one fork server for all, a fleet of workers for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tools.chaos.fleet import Fleet
from tools.chaos.fork_server import worker_server
from torchft_svc.host.fork_server import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with worker_server() as fork_server:
        yield fork_server


@pytest.fixture
def make_fleet(fork_server: ForkServer, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes the fleet of a job; its workers end with the test, and so do their managers.

    Another attempt's fleet takes the place of the one before.
    """
    with ExitStack() as stack:
        num_made = itertools.count()

        def make(lighthouse: str, **settings: Any) -> Fleet:
            stack.close()
            folder = tmp_path / str(next(num_made))
            folder.mkdir()
            fleet = Fleet(fork_server, folder, lighthouse, settings)
            stack.callback(fleet.end)
            return fleet

        yield make
