"""Opens the export of logs and traces, if the environment asks for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torchft_svc.env import Environment

if TYPE_CHECKING:
    from torchft_svc.telemetry.otel import Telemetry

log = logging.getLogger(__name__)
_PACKAGE = "torchft_svc"


def open_telemetry(
    environment: Environment, program: str, fields: Mapping[str, object]
) -> Telemetry | None:
    """The exporters of ``program``, which export the package's log from now on (None: the
    environment names no collector, or the extra ``otel`` is not installed, which is logged)."""
    if not environment.exports_telemetry:
        return None
    try:
        from torchft_svc.telemetry.otel import Telemetry
    except ImportError as error:
        log.warning("OTEL_* is set, but nothing is exported: %s: install torchft-svc[otel]", error)
        return None
    telemetry = Telemetry(program, fields)
    telemetry.export_logs([logging.getLogger(_PACKAGE)])
    return telemetry


@contextlib.contextmanager
def exporting(program: str, fields: Mapping[str, object]) -> Iterator[Telemetry | None]:
    """Export as `open_telemetry` does while the block runs."""
    telemetry = open_telemetry(Environment(), program, fields)
    try:
        yield telemetry
    finally:
        if telemetry is not None:
            telemetry.close()
