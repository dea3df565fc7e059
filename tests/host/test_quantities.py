"""Tests how sizes and rates are read and shown."""

from __future__ import annotations

import pytest

from torchft_svc.host.quantities import (
    parse_bytes,
    parse_rate,
    round_up,
    show_bytes,
    show_rate,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("14GB", 14e9),
        ("2 GiB", 2 * 2**30),
        ("0.5k", 500),
        ("7tb", 7e12),
        ("3MiB", 3 << 20),
    ],
)
def test_sizes(text: str, count: float) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1.2GB/s", 1.2e9), ("10Gbit/s", 1.25e9), ("100 Mbps", 12.5e6), ("8kb/s", 1e3), ("5B/s", 5)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "nanGB", "1.2.3GB", "1 mile", "1e400"])
def test_what_is_none(text: str) -> None:
    for parse in (parse_bytes, parse_rate):
        with pytest.raises(ValueError, match="is not a"):
            parse(text)


def test_how_they_are_shown() -> None:
    assert show_bytes(1) == "1 B"
    assert show_bytes(1.3e9) == "1.3 GB"
    assert show_bytes(2e15) == "2000 TB"
    assert show_rate(1.25e9) == "1.25 GB/s (10 Gbit/s)"
    assert show_rate(12.5e6) == "12.5 MB/s (100 Mbit/s)"
    assert [show_seconds(each) for each in (0.25, 4.24, 95.4, 720)] == [
        "0.25 s",
        "4.2 s",
        "95 s",
        "12 min",
    ]
    assert [round_up(each) for each in (0.2, 61, 3601)] == [1, 90, 7200]
