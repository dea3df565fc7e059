"""That states differ, as a worker reports it to its manager and the lighthouse (rule C1)."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.limits import MAX_REASON_LENGTH, check_text
from torchft_svc.core.quorum.types import check_quorum_id, check_step

# In one heartbeat: groups beat more often than they compare their states.
MAX_DIFFERENCES = 16


@dataclass(frozen=True, slots=True)
class DifferenceReport:
    """A check in ``step`` of quorum ``quorum_id`` found a difference, as ``sentence`` says."""

    quorum_id: int
    step: int
    sentence: str

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        check_quorum_id("quorum_id", self.quorum_id)
        check_step(self.step)
        check_text("sentence", self.sentence, MAX_REASON_LENGTH)
