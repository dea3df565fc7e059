"""Why a source does not serve a state: as it is sent, and as it is shown to people."""

from __future__ import annotations

from torchft_svc.core.types import one_line

# A sentence; whatever is longer does not come from us.
MAX_REASON_BYTES = 1000


def encode_reason(reason: str) -> bytes:
    """What is sent of ``reason``."""
    return reason.encode("ascii", "replace")[:MAX_REASON_BYTES]


def decode_reason(sent: bytes | bytearray) -> str:
    """What a source said, whatever it is, fit for a line of a log."""
    return one_line(sent.decode("ascii", "replace").strip())


def why_not_offered(step: int, why: str) -> str:
    """The sentence for those that heal."""
    return f"step {step} cannot be offered: {why}"
