"""How long anything may be waited for: longer settings are refused, longer calls are cut."""

from __future__ import annotations

import select
from datetime import timedelta

import pytest

from torchft_svc.core.durations import MAX_DURATION_MS, MAX_DURATION_S, check_length, limited_s
from torchft_svc.errors import ConfigError


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 60.0, MAX_DURATION_S])
def test_what_can_be_waited_is_accepted(seconds: float) -> None:
    check_length("timeout", seconds)


def test_a_setting_beyond_is_named_with_the_limit() -> None:
    with pytest.raises(ConfigError) as refused:
        check_length("timeout", 1e300)
    assert str(refused.value) == (
        "timeout='1e+300 s' cannot work: use 2073600 s (24 days) at most, which is as good as "
        "forever"
    )


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        (timedelta(seconds=-5), -5.0),
        (timedelta(), 0.0),
        (timedelta(microseconds=1), 1e-6),
        (timedelta(days=24), MAX_DURATION_S),
        (timedelta(days=25), MAX_DURATION_S),
        (timedelta.max, MAX_DURATION_S),
    ],
)
def test_a_call_waits_no_longer_than_can_be_waited(timeout: timedelta, seconds: float) -> None:
    assert limited_s(timeout) == seconds


def test_the_limit_is_what_the_system_can_wait() -> None:
    assert MAX_DURATION_MS == 1000 * MAX_DURATION_S
    poll = select.poll()
    poll.register(1, 0)
    with pytest.raises(OverflowError):
        poll.poll(MAX_DURATION_MS + 86_400_000)
