"""Tests that one stall of the machine fails no test, and that what is always late does."""

from __future__ import annotations

import pytest
from support.bounds import MAX_ATTEMPTS, Late, again_if_late, check

HOUR_S = 3600.0


def test_a_stall_is_forgiven() -> None:
    took_s = iter([HOUR_S, 0.0])
    again_if_late(lambda: check("a stall", next(took_s), 1.0))()
    assert list(took_s) == []


def test_what_is_late_each_time_fails() -> None:
    took_s = iter([HOUR_S] * (MAX_ATTEMPTS + 1))
    with pytest.raises(Late, match=r"too slow: 3600\.000 s, allowed are "):
        again_if_late(lambda: check("too slow", next(took_s), 1.0))()
    assert list(took_s) == [HOUR_S]


def test_another_failure_is_not_tried_again() -> None:
    outcomes = iter([AssertionError("wrong"), Late("not asked for")])

    def test() -> None:
        raise next(outcomes)

    with pytest.raises(AssertionError, match="wrong"):
        again_if_late(test)()
