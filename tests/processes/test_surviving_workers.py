"""A group of several workers loses one of them, and the others keep their process: the launcher
replaces the lost worker, the group forms again, heals from another group, and trains on."""

from __future__ import annotations

import pytest
from support.surviving_workers import REPLACED_S, survive_each_loss

pytestmark = pytest.mark.processes


@pytest.mark.timeout(4 * REPLACED_S)
def test_survivors_of_a_group_keep_their_process_and_heal() -> None:
    survive_each_loss()
