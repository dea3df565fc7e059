"""Asks a lighthouse for the goodput of a job, as people do."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_COMMAND_S = 20.0


def read_goodput(address: str, job: str) -> dict[str, Any] | None:
    """What `lighthouse incidents` shows of a job's time (None: no lighthouse knows the job)."""
    command = [sys.executable, "-m", "torchft_svc.lighthouse_server", "incidents", "--json"]
    flags = ["--lighthouse", address, "--job-id", job]
    answer = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if answer.returncode:
        return None
    goodput: dict[str, Any] | None = json.loads(answer.stdout)["goodput"]
    return goodput
