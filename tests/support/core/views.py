"""What a decision looks at, made of the facts that the slow twins use."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torchft_svc.core.quorum.lighthouse.membership import (
    STATES,
    Conduct,
    GroupState,
    Heal,
    JobView,
    Tenure,
    Waiter,
)


def job_view(
    waiting: Mapping[str, Waiter],
    living: Set[str],
    veterans: Set[str] = frozenset(),
    straggling: Set[str] = frozenset(),
    previous: Set[str] = frozenset(),
    heals: Mapping[str, Heal] | None = None,
    **facts: Any,
) -> JobView:
    """Each of ``living`` in its state; ``straggling`` were waited for in vain."""
    heals = heals or {}
    groups: dict[GroupState, set[str]] = {state: set() for state in GroupState}
    for key in living:
        tenure = Tenure.VETERAN if key in veterans else Tenure.NEW
        tenure = Tenure.MEMBER if key in previous else tenure
        conduct = Conduct.SILENT
        if key in waiting:
            conduct = Conduct.ASKS
        elif key in straggling:
            conduct = Conduct.LATE
        elif key in heals:
            conduct = Conduct.HEALS if heals[key].ended_at is None else Conduct.HAS_HEALED
        groups[STATES[conduct][tenure]].add(key)
    first: dict[GroupState, float] = {}
    for state, keys in groups.items():
        if state in (GroupState.ASKING, GroupState.JOINING) and keys:
            first[state] = min(waiting[key].asked_at for key in keys)
        elif state is GroupState.HEALED and keys:
            first[state] = min(float(heals[key].ended_at or 0.0) for key in keys)
    return JobView(
        waiting=waiting,
        groups=groups,
        living=living,
        previous=previous,
        first=first,
        heals=heals,
        num_veterans=len(veterans),
        **facts,
    )
