"""Decides who of several living groups with one name has it: the first one (rule Q20)."""

from __future__ import annotations


class Names:
    """Of the living groups of a job. The cost of a sign of life does not depend on their number."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, None]] = {}  # by stable name, the oldest first
        self._vacated: dict[str, None] = {}  # whose bearer may have gone since `take_heirs`

    def came(self, replica_id: str) -> None:
        self._groups.setdefault(stable_name(replica_id), {})[replica_id] = None

    def went(self, replica_id: str) -> None:
        name = stable_name(replica_id)
        del self._groups[name][replica_id]
        if self._groups[name]:
            self._vacated[name] = None
        else:
            del self._groups[name]
            self._vacated.pop(name, None)

    def earlier(self, replica_id: str) -> list[str]:
        """The groups that had the same name before this one."""
        same = self.of(stable_name(replica_id))
        return same[: same.index(replica_id)] if replica_id in same else same

    def later(self, replica_id: str) -> list[str]:
        """The groups that took the name of this one after it; none if it is dead."""
        same = self.of(stable_name(replica_id))
        return same[same.index(replica_id) + 1 :] if replica_id in same else []

    def is_free_for(self, replica_id: str) -> bool:
        """Whether no other living group had the name before this one."""
        same = self._groups.get(stable_name(replica_id), ())
        return next(iter(same), replica_id) == replica_id

    def take_heirs(self) -> list[str]:
        """The present owners of names that lost a group since the last call."""
        vacated, self._vacated = self._vacated, {}
        return [next(iter(self._groups[name])) for name in vacated]

    def of(self, name: str) -> list[str]:
        """The groups with this stable name, the oldest first."""
        return list(self._groups.get(name, ()))


def stable_name(replica_id: str) -> str:
    """The part of a replica id that survives a restart of its group."""
    return replica_id.rpartition(":")[0] or replica_id
