"""A group joins two others over a slow link, and they train on meanwhile: real processes."""

from __future__ import annotations

import pytest
from support.warm import Warm

from tools.benchmarks.catch_up import measure
from tools.benchmarks.children.healing_ends import MATRIX_BYTES

pytestmark = pytest.mark.processes

MB_PER_S = 8.0
TRANSFER_S = MATRIX_BYTES / 1e6 / MB_PER_S


@pytest.mark.timeout(240)
def test_k1_members_do_not_wait_for_what_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.benchmarks.processes.Popen", Warm)
    found = measure(1, MB_PER_S, step_s=0.1, catch_up=True)
    assert found["is_equal"] == "yes"
    assert found["joined_s"] > TRANSFER_S, "the state came over the link"
    # Without catch-up they wait for the whole transfer in one step.
    assert max(found["steps"]) / 1000 < TRANSFER_S / 2
    assert found["num_steps"] > TRANSFER_S / 2 / 0.1, "they trained on meanwhile"
