"""`torchft._torchft`: what the public release has as compiled code."""

from __future__ import annotations

import sys

from torchft_svc.compat.coordination import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
    ManagerServer,
    Quorum,
    QuorumMember,
    QuorumResult,
    Timestamp,
)

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "Timestamp",
    "lighthouse_main",
]


def lighthouse_main() -> None:
    """Run the lighthouse; flags may have underscores (``torchft_lighthouse --min_replicas 2``)."""
    from torchft_svc.lighthouse_server.cli import main

    main(args=[_with_hyphens(each) for each in sys.argv[1:]], prog_name="torchft_lighthouse")


def _with_hyphens(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value
