"""A group is SIGKILLed with its manager, and a prepared spare takes its place: real processes."""

from __future__ import annotations

import pytest
from support.bounds import check
from support.warm import Warm

from tools.benchmarks.prepared_spares import FOLLOWS, measure

pytestmark = pytest.mark.processes

# Of 200 MB, most of which is at hand. On a busy machine it takes 0.6 to 2.7 s, and 18 s with a new
# process.
WHOLE_S = 4.0


@pytest.mark.timeout(240)
def test_g2_a_spare_replaces_a_killed_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.benchmarks.processes.Popen", Warm)  # these have imported torch
    found = measure(3, 0.05, FOLLOWS, refresh_s=1.0)
    assert found["is_equal"] == "yes"
    check("a killed group is replaced", found["whole_s"], WHOLE_S)
