"""What the clients take and return."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class QuorumMember:
    """One replica group of a quorum; ``data`` is whatever it told about itself."""

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: dict[Hashable, object] | None = None


@dataclass(frozen=True)
class Timestamp:
    """Time since 1970."""

    seconds: int
    nanos: int


@dataclass(frozen=True)
class Quorum:
    """The groups that train together, sorted by replica id."""

    quorum_id: int
    participants: list[QuorumMember]
    created: Timestamp


@dataclass(frozen=True)
class QuorumResult:
    """What one worker has to do in a quorum.

    ``max_replica_rank`` (None: the group is behind) and ``max_world_size`` count the groups at
    ``max_step``; ``recover_src_*`` say whom to heal from (None and ``""``: nothing to heal), and
    ``recover_dst_replica_ranks`` who heals from here. ``recover_extra_*``: more groups have the
    same state, so a part may come from them. ``store_prefix`` is new for every quorum id.
    ``steady``: the next steps may belong to this quorum, and ask nobody.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    recover_src_manager_address: str
    recover_src_replica_rank: int | None
    recover_dst_replica_ranks: list[int]
    recover_extra_src_manager_addresses: list[str]
    recover_extra_dst_replica_ranks: list[int]
    store_address: str
    max_step: int
    max_replica_rank: int | None
    max_world_size: int
    heal: bool
    commit_failures: int
    replica_ids: list[str]
    store_prefix: str
    steady: bool = False


@dataclass(frozen=True, slots=True)
class ManagerLocator:
    """``find`` tells the manager's present address; it raises `Unreachable` with the reason if no
    manager will be there any more.

    It may be called on any thread. ``patience_s``: after so long without an answer the manager
    counts as gone for good.
    """

    find: Callable[[], str]
    patience_s: float
