"""Orders of every service that holds streams: quorums' sessions and launched runs alike."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.errors import TorchFTError


@dataclass(frozen=True, slots=True)
class EndStream:
    """End ``stream`` with ``error``, or in good order (None) after what was sent."""

    stream: int
    error: TorchFTError | None = None


@dataclass(frozen=True, slots=True)
class ReportStandstill:
    """Report that this process was stopped for ``for_s`` seconds."""

    for_s: float
