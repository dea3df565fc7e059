"""Decides which groups that hang are left out: those that others wait for (rule Q18)."""

from __future__ import annotations

from collections.abc import Iterable

from torchft_svc.core.activity import HangWatch
from torchft_svc.core.membership import Membership
from torchft_svc.core.step import Phase


def to_evict(members: Membership, hangs: HangWatch, candidates: Iterable[str]) -> list[str]:
    """The groups to leave out now, if one of ``candidates`` waits for them.

    If all stand still, as on a file system that does not answer, leaving some of them out would
    help nobody. So a member of the last quorum has to be there which was not left out itself, and
    waits: one that trains for less than the hang timeout may stand still in the same place, and its
    time is up a moment later.
    """
    if not hangs.unheeded or not any(_waits(members, hangs, each) for each in candidates):
        return []
    evicted = sorted(filter(members.is_awaited, hangs.unheeded))
    hangs.unheeded.clear()
    return evicted


def _waits(members: Membership, hangs: HangWatch, replica_id: str) -> bool:
    doing = hangs.activity(replica_id)
    waits = doing is not None and doing.phase is Phase.QUORUM
    return waits and members.is_expected(replica_id)
