"""Whom a process group connects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Members:
    """With whom to connect: the arguments of `ProcessGroup.configure` that say so."""

    store_addr: str
    replica_id: str
    rank: int
    world_size: int
    quorum_id: int | None = None
    group_rank: int | None = None
    group_world_size: int | None = None
    global_ranks: list[int] | None = None
