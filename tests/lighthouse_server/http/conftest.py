"""One lighthouse with a token for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.dashboards import Served, served
from support.running import Line, line_to


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Served]:
    with served() as server:
        yield server


@pytest.fixture
def line(lighthouse: Served) -> Iterator[Line]:
    with line_to(lighthouse.grpc, lighthouse.security) as line:
        yield line
