"""`torchft.otel`: the loggers of quorums, commits and errors."""

from __future__ import annotations

import logging


def setup_logger(name: str) -> None:
    """Let the logger ``name`` produce records, for the handlers that a program adds.

    Exports over OpenTelemetry are configured by its own variables; see docs/observability.md.
    """
    logging.getLogger(name).setLevel(logging.INFO)
