"""What a worker asks of its group: a quorum, and later a decision."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.types import (
    MAX_ADDRESS_LENGTH,
    MAX_INT64,
    MAX_LAYOUT_LENGTH,
    check_quorum_id,
    check_text,
)
from torchft_svc.errors import RequestRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """A worker asks for a quorum; ``worker_id`` is new at every start of its process.

    ``unhealed``: the last quorum wanted it to heal, which has failed. ``last_quorum_id``: the
    highest that it has been told (0: none), maybe by the manager before this one. ``question``
    counts the questions of this worker, and stays the same when one is repeated because its answer
    was lost (0: the worker does not count). ``layout``: what it sums (empty: not told).
    ``step_quorum_id``: in which its step was committed (0: not known).
    """

    group_rank: int
    step: int
    checkpoint_address: str = ""
    shrink_only: bool = False
    commit_failures: int = 0
    init_sync: bool = True
    worker_id: str = ""
    draining: bool = False
    unhealed: bool = False
    last_quorum_id: int = 0
    layout: str = ""
    step_quorum_id: int = 0
    question: int = 0

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        for field in ("step", "commit_failures", "question"):
            if not 0 <= getattr(self, field) <= MAX_INT64:
                raise RequestRefused(f"{field} is {getattr(self, field)}, must be 0 or more")
        check_quorum_id("last_quorum_id", self.last_quorum_id)
        check_quorum_id("step_quorum_id", self.step_quorum_id)
        check_text("checkpoint address", self.checkpoint_address, MAX_ADDRESS_LENGTH)
        check_text("layout", self.layout, MAX_LAYOUT_LENGTH)
        check_text("worker id", self.worker_id, MAX_ADDRESS_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A worker's vote; ``round`` is 0 if the worker does not know rounds."""

    group_rank: int
    step: int
    should_commit: bool
    round: int = 0
    worker_id: str = ""
