"""The members that a process group connects, and the report that one of them is gone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torchft_svc.errors import MemberLost

# A member that left regularly has sent all its data, which arrives within this time.
LOSS_GRACE_S = 0.1


@dataclass(frozen=True, slots=True)
class Members:
    """The arguments of `ProcessGroup.configure` that name the members."""

    store_addr: str
    replica_id: str
    rank: int
    world_size: int
    quorum_id: int | None = None
    group_rank: int | None = None
    group_world_size: int | None = None
    global_ranks: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A member of quorum ``quorum_id`` is gone; collectives are aborted at ``final_at``."""

    quorum_id: int
    final_at: float
    error: MemberLost

    @classmethod
    def now(cls, quorum_id: int, reason: str) -> Loss:
        return cls(quorum_id, time.monotonic() + LOSS_GRACE_S, MemberLost(reason))

    def is_final(self) -> bool:
        return time.monotonic() >= self.final_at
