"""Limits of names, texts, numbers and durations, and the checks of what comes from outside."""

from __future__ import annotations

from datetime import timedelta

from torchft_svc.errors import ConfigError, RequestRefused

# Replica ids and job names are shown in logs and tables and kept in maps.
MAX_NAME_LENGTH = 256
# Two addresses and a small JSON document; anything larger is not a member but a mistake.
MAX_ADDRESS_LENGTH = 512
# A reason is shown in one log line.
MAX_REASON_LENGTH = 1000
# Steps and ids travel as int64.
MAX_INT64 = 2**63 - 1

# The system's poll counts milliseconds in 31 bits, 24.8 days; a longer wait would fail.
MAX_DURATION_S = 24 * 86_400.0
MAX_DURATION_MS = int(1000 * MAX_DURATION_S)


def check_length(field: str, duration_s: float) -> None:
    """Raise `ConfigError` if the setting ``field`` exceeds the longest possible wait."""
    if duration_s > MAX_DURATION_S:
        reason = f"use {MAX_DURATION_S:.0f} s (24 days) at most, which is as good as no limit"
        raise ConfigError(field, f"{duration_s:g} s", reason)


def whole_milliseconds(limit: timedelta | None) -> int | None:
    """Return a time limit as it is sent; None: absent.

    Raises:
        ConfigError: it is no time above 0.
    """
    if limit is None:
        return None
    if limit.total_seconds() <= 0:
        raise ConfigError("within", str(limit), "use a time above 0")
    return max(1, round(1000 * limited_s(limit)))


def limited_s(timeout: timedelta) -> float:
    """The seconds of a call's ``timeout``, and no more than can be waited."""
    return min(timeout.total_seconds(), MAX_DURATION_S)


def check_not_empty(field: str, value: str | None) -> None:
    """Raise `ConfigError` if a setting is given (not None) but empty, as by an unset variable."""
    if value is not None and not value.strip():
        raise ConfigError(field, value, "it is empty: give it a value, or leave it out")


def check_name(field: str, value: str) -> None:
    """Refuse a name that is empty, too long or not printable."""
    if not value:
        raise RequestRefused(f"{field} is empty")
    check_text(field, value, MAX_NAME_LENGTH)


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def one_line(text: str, limit: int = MAX_REASON_LENGTH) -> str:
    """``text`` for one line of a log: at most ``limit`` characters, with ``?`` for each that
    cannot be printed, such as a newline or an escape code."""
    shown = text if len(text) <= limit else f"{text[: limit - 3]}..."
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else "?" for char in shown)


def check_text(field: str, value: str, limit: int) -> None:
    if len(value) > limit:
        raise RequestRefused(f"{field} has {len(value)} characters, {limit} are allowed")
    if not value.isprintable():
        raise RequestRefused(f"{field} {value[:40]!r} contains characters that cannot be printed")
