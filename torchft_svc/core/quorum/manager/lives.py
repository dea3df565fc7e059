"""Which life of its group each worker belongs to.

The workers of a group that is restarted as a whole come one by one, while the ends of those before
may not be noticed yet. A worker that comes after another one with its group rank begins the group's
next life, unless others have begun it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# How many workers of a rank are remembered: the present one, and those that come after it. Anybody
# may show up.
MAX_SHOWN = 4


class GroupLives:
    """The lives of the workers of one group, by group rank."""

    def __init__(self) -> None:
        self._admitted: dict[int, tuple[str, int]] = {}  # each rank's worker, and its life
        self._shown: dict[int, dict[str, int]] = {}  # the lives of the last workers of a rank

    def record_arrival(self, group_rank: int, worker_id: str) -> None:
        """A worker has shown up, admitted or not; a life may be too short for some ranks."""
        shown = self._shown.setdefault(group_rank, {})
        if worker_id in shown:
            return
        newest = max((max(each.values(), default=0) for each in self._shown.values()), default=0)
        shown[worker_id] = max(newest, max(shown.values()) + 1) if shown else newest
        if len(shown) > MAX_SHOWN:
            del shown[next(iter(shown))]

    def admit_worker(self, group_rank: int, worker_id: str) -> None:
        """The rank belongs to this worker from now on."""
        if group_rank not in self._admitted or self._admitted[group_rank][0] != worker_id:
            self.record_arrival(group_rank, worker_id)
            self._admitted[group_rank] = worker_id, self._shown[group_rank][worker_id]

    def is_known(self, group_rank: int, worker_id: str) -> bool:
        """Whether this worker was the last one admitted at its rank; the first one is if it has no
        id."""
        return self._admitted.get(group_rank, ("", 0))[0] == worker_id

    def join_workers(self, workers: Mapping[int, str]) -> None:
        """All workers of the group ask together, so they are of one life, also if a life before was
        too short for some ranks. ``workers``: their ids by group rank."""
        newest = max(life for _, life in self._admitted.values())
        self._admitted = {rank: (worker_id, newest) for rank, worker_id in workers.items()}
        self._shown = {rank: {worker_id: newest} for rank, worker_id in workers.items()}

    def is_awaited(self, group_rank: int, worker_id: str, waiting: Iterable[int]) -> bool:
        """Whether one of the ``waiting`` ranks waits for this worker, because it is not of a later
        life: the end of a worker may be noticed after the first request of the next life."""
        newest, life = self._admitted.get(group_rank, (worker_id, 0))
        life -= newest != worker_id
        return any(self._admitted[rank][1] <= life for rank in waiting)
