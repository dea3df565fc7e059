"""Whom a worker trains with, and who of them is gone, this group itself included."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.coordination import QuorumResult
from torchft_svc.errors import QuorumFailed

# Only losses that are newer than the quorum matter, and these are few.
_MAX_LOSSES = 256


@dataclass(frozen=True, slots=True)
class _Loss:
    """``replica_id`` is gone, which was in quorum ``quorum_id`` and may be back in a later one."""

    replica_id: str
    reason: str
    quorum_id: int

    def concerns(self, quorum: QuorumResult) -> bool:
        """Whether a group of ``quorum`` is gone; news may come before the quorum itself.

        It may be this very group: it stood still for too long, and the others go on without it.
        """
        return quorum.quorum_id <= self.quorum_id and self.replica_id in quorum.replica_ids

    def __str__(self) -> str:
        return f"{self.replica_id} is out: {self.reason}"


class Membership:
    """The quorum that ``pg`` was last built for, and who of it is gone since."""

    def __init__(self, pg: ProcessGroup) -> None:
        self.quorum: QuorumResult | None = None
        self._pg = pg
        self._losses: deque[_Loss] = deque(maxlen=_MAX_LOSSES)
        self._newcomers: frozenset[str] = frozenset()  # replaced as a whole, for other threads

    @property
    def num_waiting(self) -> int:
        """How many groups wait to join, as far as is known since the last quorum was asked for."""
        return len(self._newcomers)

    def hear_newcomer(self, replica_id: str) -> None:
        """A group waits to join; to be called on any thread."""
        self._newcomers |= {replica_id}

    def ask(self) -> None:
        """The next quorum is asked for: who waits is in it, or is announced again. Who was lost
        before is not in it, whatever its id: a lighthouse's clock may have been set back."""
        self._newcomers = frozenset()
        self._losses.clear()

    def answer(self, quorum: QuorumResult) -> None:
        """This is the next quorum."""
        self._newcomers = self._newcomers.difference(quorum.replica_ids)

    def lose(self, replica_id: str, reason: str, quorum_id: int) -> None:
        """A member of quorum ``quorum_id`` is gone; to be called on any thread."""
        loss = _Loss(replica_id, reason, quorum_id)
        self._losses.append(loss)
        quorum = self.quorum
        if quorum is not None and loss.concerns(quorum):
            self._pg.lose_member(quorum.quorum_id, str(loss))

    def leave(self) -> None:
        """This group is out of its last quorum; to be called on any thread.

        What it waits for will not come, and not every backend notices that its peers have left.
        """
        quorum = self.quorum
        if quorum is not None and quorum.replica_world_size > 1:
            reason = "the line to the manager ended: this group is out"
            self._pg.lose_member(quorum.quorum_id, reason)

    def check_losses(self, quorum: QuorumResult) -> None:
        """Raise `QuorumFailed` if the news of a loss came before the quorum itself."""
        for loss in list(self._losses):
            if loss.concerns(quorum):
                raise QuorumFailed(str(loss))

    def fits(self, quorum: QuorumResult) -> bool:
        """Whether the process group has the members of ``quorum`` already."""
        return self.quorum is not None and self.quorum.quorum_id == quorum.quorum_id
