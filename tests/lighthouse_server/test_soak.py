"""The short version of the soak over rounds; `make soak-rounds` is the long one."""

from __future__ import annotations

import pytest
from support.soak_rounds import soak


@pytest.mark.processes
def test_i7_two_thousand_rounds_leave_nothing_behind() -> None:
    assert "2000 rounds" in soak(2000)
