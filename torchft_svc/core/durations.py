"""How long anything may be waited for."""

from __future__ import annotations

from datetime import timedelta

from torchft_svc.errors import ConfigError

# The system's poll counts milliseconds in 31 bits, which ends after 24.8 days; beyond, a wait would
# not be long but fail.
MAX_DURATION_S = 24 * 86_400.0
MAX_DURATION_MS = int(1000 * MAX_DURATION_S)


def check_length(field: str, duration_s: float) -> None:
    """Raise `ConfigError` if the setting ``field`` is longer than the longest wait."""
    if duration_s > MAX_DURATION_S:
        reason = f"use {MAX_DURATION_S:.0f} s (24 days) at most, which is as good as forever"
        raise ConfigError(field, f"{duration_s:g} s", reason)


def limited_s(timeout: timedelta) -> float:
    """The seconds of a call's ``timeout``, and no more than can be waited."""
    return min(timeout.total_seconds(), MAX_DURATION_S)
