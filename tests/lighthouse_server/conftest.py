"""One lighthouse as a process for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.running import Line, Process, lighthouse_process, line_to


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Process]:
    # A group that only beats has to live while slow commands are started.
    with lighthouse_process("--heartbeat-timeout-ms=600000") as process:
        yield process


@pytest.fixture
def line(lighthouse: Process) -> Iterator[Line]:
    with line_to(lighthouse.address) as line:
        yield line
