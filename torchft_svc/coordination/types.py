"""The values that the clients accept and return."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class QuorumMember:
    """One replica group of a quorum; ``data`` is what it reports about itself."""

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


@dataclass(frozen=True, slots=True)
class ManagerLocator:
    """``find`` returns the manager's present address; it raises `Unreachable` with the reason if no
    manager will be there any more.

    It may be called on any thread. ``patience_s``: after how long without an answer the
    manager counts as gone for good.
    """

    find: Callable[[], str]
    patience_s: float
