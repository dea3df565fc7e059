"""What a worker asks of its group: a quorum, and later a decision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """A worker asks for a quorum; ``worker_id`` is new at every start of its process."""

    group_rank: int
    step: int
    checkpoint_address: str = ""
    shrink_only: bool = False
    commit_failures: int = 0
    init_sync: bool = True
    worker_id: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A worker's vote; ``round`` is 0 if the worker does not know rounds."""

    group_rank: int
    step: int
    should_commit: bool
    round: int = 0
    worker_id: str = ""
