"""Sizes and rates as people write them: ``14GB``, ``200 MiB``, ``10Gbit/s``."""

from __future__ import annotations

import math
import re

_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_BYTES = re.compile(r"([0-9.]+)\s*([kmgt]?i?)b?", re.IGNORECASE)
_RATE = re.compile(r"([0-9.]+)\s*([kKmMgGtT]?i?)(b|B|bit|bits|bps)(?:/s|ps)?")
_STEPS = (1, 2, 3, 5, 6, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1200, 1800, 3600)


def parse_bytes(text: str) -> float:
    """Return the number of bytes of a size such as ``14GB`` or ``200MiB``.

    Raises:
        ValueError: it is no size above 0.
    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number with kB, MB, GB or GiB")
    return _scaled(text, found[1], found[2])


def parse_rate(text: str) -> float:
    """Return the bytes per second of a rate such as ``1.2GB/s`` or ``10Gbit/s``.

    Raises:
        ValueError: it is no rate above 0.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is not a rate: write a number with MB/s, GB/s, Mbit/s or Gbit/s"
        )
    rate = _scaled(text, found[1], found[2])
    return rate if found[3] == "B" else rate / 8


def _scaled(text: str, digits: str, prefix: str) -> float:
    factor = (_FACTORS | _BINARY)[prefix.lower()]
    try:
        value = float(digits) * factor
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{text!r} is not a number above 0")
    return value


def show_bytes(count: float) -> str:
    """Return ``count`` bytes for people, as ``1.3 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def show_rate(bytes_per_s: float) -> str:
    """Return a rate in both units that people use: ``1.25 GB/s (10 Gbit/s)``."""
    bits, unit = bytes_per_s * 8 / 1e6, "Mbit/s"
    if bits >= 1000:
        bits, unit = bits / 1000, "Gbit/s"
    return f"{show_bytes(bytes_per_s)}/s ({bits:.3g} {unit})"


def show_seconds(seconds: float) -> str:
    """Return a duration for people: ``0.25 s``, ``4.2 s``, ``95 s``, ``12 min``."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def round_up(seconds: float) -> float:
    """Return the next duration that people would choose as a setting."""
    for step in _STEPS:
        if seconds <= step:
            return float(step)
    return math.ceil(seconds / 3600) * 3600.0
