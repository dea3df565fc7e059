"""Decides who of several living groups with one name has it: the first one (rule Q20)."""

from __future__ import annotations


class Names:
    """Indexes the living groups of a job by stable name. A sign of life costs O(1)."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, None]] = {}  # by stable name, the oldest first
        self._vacated: dict[str, None] = {}  # which have lost a group since `pop_newly_unique`

    def add(self, replica_id: str) -> None:
        """Add a group that is new."""
        self._groups.setdefault(stable_name(replica_id), {})[replica_id] = None

    def remove(self, replica_id: str) -> None:
        """Remove a group that is gone."""
        name = stable_name(replica_id)
        del self._groups[name][replica_id]
        if self._groups[name]:
            self._vacated[name] = None
        else:
            del self._groups[name]
            self._vacated.pop(name, None)

    def earlier(self, replica_id: str) -> list[str]:
        """The groups that had the same name before this one."""
        same = self.owners(stable_name(replica_id))
        return same[: same.index(replica_id)] if replica_id in same else same

    def later(self, replica_id: str) -> list[str]:
        """The groups that took the name of this one after it; none if it is dead."""
        same = self.owners(stable_name(replica_id))
        return same[same.index(replica_id) + 1 :] if replica_id in same else []

    def is_free_for(self, replica_id: str) -> bool:
        """Whether no other living group had the name before this one."""
        same = self._groups.get(stable_name(replica_id), ())
        return next(iter(same), replica_id) == replica_id

    def pop_newly_unique(self) -> list[str]:
        """The present owners of names that lost a group since the last call."""
        vacated, self._vacated = self._vacated, {}
        return [next(iter(self._groups[name])) for name in vacated]

    def owners(self, name: str) -> list[str]:
        """The groups with this stable name, the oldest first."""
        return list(self._groups.get(name, ()))


def stable_name(replica_id: str) -> str:
    """The part of a replica id that survives a restart of its group."""
    return replica_id.rpartition(":")[0] or replica_id
