"""Whom a simulated worker trains with: its seat in the quorum's process group, and who is gone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torchft_svc.core.assignment import Assignment
from torchft_svc.errors import PeerError, QuorumFailed
from torchft_svc.sim.sums import Seat, Sums
from torchft_svc.sim.world import Process

MAX_LOSSES = 256


@dataclass(frozen=True, slots=True)
class _Loss:
    """``replica_id`` is gone, which was in quorum ``quorum_id`` and may be back in a later one."""

    replica_id: str
    quorum_id: int

    def concerns(self, part: Assignment) -> bool:
        return part.quorum_id <= self.quorum_id and self.replica_id in part.replica_ids


class Peers:
    """As `QuorumMembership` in `client/step/membership.py`, with a seat for a process group."""

    def __init__(self, process: Process, sums: Sums, job: str, group_rank: int) -> None:
        self.seat: Seat | None = None
        self._process = process
        self._sums = sums
        self._job = job
        self._group_rank = group_rank
        self._part: Assignment | None = None
        self._losses: deque[_Loss] = deque(maxlen=MAX_LOSSES)

    @property
    def must_reconnect(self) -> bool:
        """Whether only a new quorum id brings connections."""
        return self.seat is not None and self.seat.error is not None

    @property
    def last_quorum_id(self) -> int:
        """Of the quorum that it was told last (0: none)."""
        return self._part.quorum_id if self._part is not None else 0

    def ask(self) -> None:
        """The next quorum is asked for."""
        self._losses.clear()

    def meet(self, part: Assignment) -> PeerError | None:
        """Sit down with the members of a quorum, if it is another one; the reason why not."""
        if self.seat is not None:
            if self.seat.quorum_id == part.quorum_id and self.seat.error is None:
                return None
            self.seat.leave()
        self._part = part
        me = part.replica_ids[part.replica_rank]
        key = (self._job, part.store_address, part.quorum_id, self._group_rank)
        self.seat = self._sums.join(key, part.replica_ids, me, self._process)
        for loss in self._losses:
            if loss.concerns(part):
                return QuorumFailed(f"{loss.replica_id} is gone")
        return self.seat.error

    def lose(self, replica_id: str, quorum_id: int) -> None:
        """A member of quorum ``quorum_id`` is gone."""
        loss = _Loss(replica_id, quorum_id)
        self._losses.append(loss)
        if self._part is not None and loss.concerns(self._part):
            self.abort()

    def cut(self) -> None:
        """This group is out of its last quorum."""
        if self._part is not None and len(self._part.replica_ids) > 1:
            self.abort()

    def abort(self) -> None:
        """Leave at once: nobody's sum is finished any more."""
        if self.seat is not None:
            self.seat.abort()

    def depart(self) -> None:
        """End in good order: what the others still wait for has been sent."""
        if self.seat is not None:
            self.seat.depart()
