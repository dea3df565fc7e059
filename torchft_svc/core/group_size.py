"""Decides whether a group is as large as the others: rank for rank, their workers form one sum."""

from __future__ import annotations

from torchft_svc.core.membership import Membership
from torchft_svc.core.names import stable_name
from torchft_svc.core.types import Member
from torchft_svc.errors import RequestRefused


class GroupSize:
    """The group world size of one job, as those tell it that are alive."""

    def __init__(self) -> None:
        self._world_size = 0  # nobody has told one

    def check(self, asker: Member, members: Membership) -> None:
        """Raise `RequestRefused` if ``asker`` has another size than a group that trains or asks.

        One that has the name of ``asker`` does not count: it is about to be replaced.
        """
        if asker.world_size in (0, self._world_size):
            return
        last = members.previous.participants if members.previous else ()
        for other in (*members.asking(), *last):
            is_rival = stable_name(other.replica_id) != stable_name(asker.replica_id)
            if other.world_size in (0, asker.world_size) or not is_rival:
                continue
            if members.knows(other.replica_id):
                raise RequestRefused(
                    f"{asker.replica_id!r} has a group world size of {asker.world_size}, "
                    f"{other.replica_id!r} of {other.world_size}: all groups of a job need the "
                    "same; start this one with as many workers, or as another job"
                )
        self._world_size = asker.world_size
