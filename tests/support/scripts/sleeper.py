"""A worker's life that only takes time."""

from __future__ import annotations

import time

from chaos.options import WorkerOptions


def warm_up() -> None:
    """There is nothing to import."""


def run(options: WorkerOptions) -> None:
    """Sleep for a step."""
    time.sleep(options.step_s)
