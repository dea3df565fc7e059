"""Checks a measured time against its bound. A machine may stall for a moment, but not three times:
who misses a bound in each of three attempts is too slow."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from tools.chaos.bounds import allowance_s

MAX_ATTEMPTS = 3
E = TypeVar("E", bound=BaseException)


class Late(AssertionError):
    """What was measured is above its bound: the test is done once more, see `tests/conftest.py`."""


def check(what: str, took_s: float, bound_s: float) -> None:
    """Fail if ``took_s`` is above the bound and what this machine may add now; print both."""
    allowed_s = bound_s + allowance_s()
    print(f"{what}: {took_s * 1000:.0f} ms (bound {bound_s * 1000:.0f} ms)")
    if took_s >= allowed_s:
        raise Late(f"{what}: {took_s:.3f} s, allowed are {allowed_s:.3f} s")


@contextlib.contextmanager
def raises_in_time(kind: type[E], match: str) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error as `pytest.raises` does, whose reason must come just before a deadline."""
    with pytest.raises(kind) as caught:
        yield caught
    if not re.search(match, str(caught.value)):
        raise Late(f"no {match!r} in {caught.value}")


def again_if_late(test: Callable[..., Any]) -> Callable[..., Any]:
    """``test``, done again if it was late; all else fails at once."""

    @functools.wraps(test)
    def attempts(*args: Any, **named: Any) -> Any:
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return test(*args, **named)
            except Late as late:
                print(f"once more, the machine may have stalled: {late}")
        return test(*args, **named)

    return attempts
