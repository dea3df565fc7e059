"""Recognizes errors of a collective, which another process may have caused."""

from __future__ import annotations

import re
import sys
from typing import Any

from torchft_svc.errors import CheckpointError, PeerError

# torch has no class of its own for what gloo reports.
_COLLECTIVE = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)


def is_peers_error(error: BaseException) -> bool:
    """Whether a peer may have caused ``error``, so that the program that raises it may be sound."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, getattr(distributed, "DistError", ())):
        return True
    if isinstance(error, PeerError):
        return not isinstance(error, CheckpointError)
    message: Any = error.args[0] if error.args else ""
    return type(error) is RuntimeError and _COLLECTIVE.search(str(message)) is not None
