"""What the tests of the failure table share: one nursery, and a crew of workers for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chaos.crew import Crew
from chaos.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def make_crew(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    """Makes the crew of a job; its workers end with the test, and so do their managers.

    Another attempt's crew takes the place of the one before.
    """
    with ExitStack() as stack:
        num_made = itertools.count()

        def make(lighthouse: str, **settings: Any) -> Crew:
            stack.close()
            folder = tmp_path / str(next(num_made))
            folder.mkdir()
            crew = Crew(nursery, folder, lighthouse, settings)
            stack.callback(crew.end)
            return crew

        yield make
