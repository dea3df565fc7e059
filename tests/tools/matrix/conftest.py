"""One lighthouse and one fork server for all programs of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.matrix.runner import ProgramRunner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProgramRunner]:
    with ProgramRunner(tmp_path_factory.mktemp("programs")) as runner:
        yield runner
