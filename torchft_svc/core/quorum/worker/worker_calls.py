"""What a worker repeats in its calls and reports, so that another manager of its group knows it."""

from __future__ import annotations

from dataclasses import replace

from torchft_svc.core.quorum.activity import PhaseReport
from torchft_svc.core.quorum.types import Vote, WorkerRequest


class WorkerCalls:
    """What a worker adds to its calls, so that a restarted manager knows it.

    ``worker_id`` is new at every start of its process.
    """

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self._round = self._round_before = 0  # of the last quorum, and of the one before
        self._asked = 0  # the number of the last question
        self._num_asked = 0  # how many since the last quorum
        self._last_quorum_id = 0  # the highest, and the number of its groups
        self._last_num_groups = 0

    def question(self, request: WorkerRequest) -> WorkerRequest:
        self._num_asked += request.question != self._asked
        self._asked = request.question
        return replace(
            request,
            worker_id=self.worker_id,
            last_quorum_id=self._last_quorum_id,
            last_num_groups=self._last_num_groups,
            last_round=self.last_round if request.question else 0,
        )

    @property
    def last_round(self) -> int:
        """Of the last quorum (0: none, or a question was given up since)."""
        return self._round if self._num_asked <= 1 else 0

    def answered(self, quorum_id: int, num_groups: int, round_: int) -> None:
        """A question has brought this quorum of ``num_groups``, to vote on in ``round_``."""
        self._round_before, self._round, self._num_asked = self._round, round_, 0
        if quorum_id >= self._last_quorum_id:
            self._last_quorum_id, self._last_num_groups = quorum_id, num_groups

    def report(self, report: PhaseReport) -> PhaseReport:
        return replace(report, round_before=self._round_before)

    def ballot(self, vote: Vote) -> Vote:
        return replace(vote, worker_id=self.worker_id, round=self._round)
