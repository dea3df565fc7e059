"""What a worker asks of its group: a quorum, and later a decision."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.types import MAX_ADDRESS_LENGTH, MAX_INT64, check_text
from torchft_svc.errors import RequestRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """A worker asks for a quorum; ``worker_id`` is new at every start of its process.

    ``unhealed``: the last quorum wanted it to heal, which has failed.
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

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        for field in ("step", "commit_failures"):
            if not 0 <= getattr(self, field) <= MAX_INT64:
                raise RequestRefused(f"{field} is {getattr(self, field)}, must be 0 or more")
        check_text("checkpoint address", self.checkpoint_address, MAX_ADDRESS_LENGTH)
        check_text("worker id", self.worker_id, MAX_ADDRESS_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A worker's vote; ``round`` is 0 if the worker does not know rounds."""

    group_rank: int
    step: int
    should_commit: bool
    round: int = 0
    worker_id: str = ""
