"""One lighthouse and one nursery for all programs of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from matrix.play import Theatre


@pytest.fixture(scope="session")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    with Theatre(tmp_path_factory.mktemp("programs")) as theatre:
        yield theatre
