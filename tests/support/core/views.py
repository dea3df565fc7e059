"""What a decision looks at, made of the facts that the slow twins use."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torchft_svc.core.membership import STATES, Conduct, Heal, JobView, Part, State, Waiter


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
    groups: dict[State, set[str]] = {state: set() for state in State}
    for key in living:
        part = Part.VETERAN if key in veterans else Part.NEW
        part = Part.MEMBER if key in previous else part
        conduct = Conduct.SILENT
        if key in waiting:
            conduct = Conduct.ASKS
        elif key in straggling:
            conduct = Conduct.LATE
        elif key in heals:
            conduct = Conduct.HEALS if heals[key].ended_at is None else Conduct.HAS_HEALED
        groups[STATES[conduct][part]].add(key)
    first: dict[State, float] = {}
    for state, keys in groups.items():
        if state in (State.ASKING, State.JOINING) and keys:
            first[state] = min(waiting[key].asked_at for key in keys)
        elif state is State.HEALED and keys:
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
