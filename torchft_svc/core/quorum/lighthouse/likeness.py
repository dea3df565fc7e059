"""Decides whether a group is like the others of its job (rule Q21).

The workers of one rank reduce together, so all groups need as many workers, and equal layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchft_svc.core.quorum.layout import layouts_differ, why_unlike
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.types import Member
from torchft_svc.errors import RequestRefused

if TYPE_CHECKING:
    from torchft_svc.core.quorum.lighthouse.membership import Membership


class Likeness:
    """What all groups of one job must have in common, as the living ones report it.

    A group that reports nothing (an older version, the public release) is not compared. A group
    that trains may change its layout, as all do in the same step of their program; so it is
    compared only with groups that ask for the same step, and a newcomer with all.
    """

    def __init__(self) -> None:
        self._accepted = (0, "")  # what the last one reported; most report the same

    def check(self, asker: Member, members: Membership) -> list[Member]:
        """The waiting newcomers that must not continue, because ``asker``, which trains, differs
        from them.

        A group with the name of ``asker`` does not count: it is about to be replaced.

        Raises: RequestRefused: ``asker`` differs from a group that trains; or from any that asks,
        and is a newcomer itself.
        """
        told = (asker.world_size, asker.layout)
        if told == self._accepted:
            return []
        trains = members.is_member(asker.replica_id)
        asking = {other.replica_id for other in members.asking()}
        misfits = []
        for other in _others(asker, members):
            _check_size(asker, other)
            if not layouts_differ(asker, other):
                continue
            if trains and not members.is_member(other.replica_id):
                misfits.append(other)
            elif not trains or other.replica_id in asking:
                raise RequestRefused(why_unlike(asker, other))
        self._accepted = told
        return misfits


def _others(asker: Member, members: Membership) -> Iterator[Member]:
    """The living groups that ask or train, without those that have the name of ``asker``."""
    last = members.previous.participants if members.previous else ()
    asking = members.asking()
    newer = {other.replica_id for other in asking}
    for other in (*asking, *(each for each in last if each.replica_id not in newer)):
        is_rival = stable_name(other.replica_id) != stable_name(asker.replica_id)
        if is_rival and members.knows(other.replica_id):
            yield other


def _check_size(asker: Member, other: Member) -> None:
    if 0 not in (asker.world_size, other.world_size) and asker.world_size != other.world_size:
        raise RequestRefused(
            f"{asker.replica_id!r} has a group world size of {asker.world_size}, "
            f"{other.replica_id!r} of {other.world_size}: all groups of a job need the "
            "same; start this one with as many workers, or as another job"
        )
