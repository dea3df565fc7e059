"""Checks a measured time against its bound, and shows both."""

from __future__ import annotations

from chaos.bounds import allowance_s


def check(what: str, took_s: float, bound_s: float) -> None:
    """Fail if ``took_s`` is above the bound and what this machine may add now; print both."""
    allowed_s = bound_s + allowance_s()
    print(f"{what}: {took_s * 1000:.0f} ms (bound {bound_s * 1000:.0f} ms)")
    assert took_s < allowed_s, f"{what}: {took_s:.3f} s, allowed are {allowed_s:.3f} s"
