"""Decides how late is too late: the bounds of the failure table, and what the machine may add."""

from __future__ import annotations

import os

from tools.chaos.options import is_isolated, uses_device

# See "When something fails" in ARCHITECTURE.md: from the fault until the others commit again.
NEWS_S = 0.25
# The same after the join timeout: others say that they wait 50 ms after they have begun to, and
# leave the step 100 ms after the news.
LEFT_OUT_S = 0.4
# The same where one joins in that step, too: the groups meet twice, and it heals.
JOIN_S = 1.0
MANAGER_BACK_S = 2.0
LIGHTHOUSE_BACK_S = 1.0
# The connections of NCCL, which are made anew with each change of the members.
NCCL_CONNECT_S = 1.0
# An isolated group starts a process with each change of the members, which has to initialise CUDA.
ISOLATED_CUDA_START_S = 1.5

# A bound counts from an event to the next commit, which holds a whole step of several processes.
# On a machine with more runnable processes than cores each of them waits for its turn, several
# times in a step; a quarter of a second is what that takes with as many as there are cores.
_MACHINE_S = 0.25


def change_of_members_s(process_group: str) -> float:
    """What a change of the members takes with this process group, beyond what it does with Gloo."""
    if not uses_device(process_group):
        return 0.0
    return NCCL_CONNECT_S + (ISOLATED_CUDA_START_S if is_isolated(process_group) else 0.0)


def allowance_s() -> float:
    """What a machine that is as busy as this one is now may add to any bound."""
    return _MACHINE_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
