"""Adds --rewrite-transcripts: `pytest tests/core --rewrite-transcripts`, then review the diff."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-transcripts",
        action="store_true",
        help="write the lighthouse's present orders into tests/core/quorum/lighthouse/transcripts",
    )
