"""What a group remembers of quorum barriers that are over, for a worker that comes late or asks
again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torchft_svc.core.quorum.types import WorkerRequest
from torchft_svc.errors import TorchFTError

# A worker that was absent from more barriers than this receives the errors of the newest ones only.
MAX_MISSED = 16


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The last request of a worker that was answered: with the quorum (``error`` is None), or not.

    Its answer may have been lost on the way, then the worker repeats the request.
    """

    worker_id: str
    question: int
    error: TorchFTError | None


class EndedQuorumBarriers:
    """The quorum barriers of one group that are over, by group rank."""

    def __init__(self) -> None:
        self._answered: dict[int, EndedRequest] = {}  # the last one of each worker
        # Barriers that failed before this worker came to them, the oldest first: the number of the
        # request that others sent there, and the error. Workers that start together, and need one
        # another in each step, have asked as often.
        self._missed: dict[int, tuple[str, deque[tuple[int, TorchFTError]]]] = {}

    def record_answers(
        self, requests: Collection[WorkerRequest], error: TorchFTError | None
    ) -> None:
        """These requests were answered: with the quorum (``error`` is None), or not."""
        for each in requests:
            self._answered[each.group_rank] = EndedRequest(each.worker_id, each.question, error)

    def record_failure(
        self, requests: Collection[WorkerRequest], absent: Mapping[int, str], error: TorchFTError
    ) -> None:
        """The barrier of ``requests`` has failed, also for the ``absent`` workers."""
        self.record_answers(requests, error)
        number = max(request.question for request in requests)
        for rank, worker_id in absent.items():
            missed = self._missed.get(rank)
            if missed is None or missed[0] != worker_id:
                missed = self._missed[rank] = worker_id, deque(maxlen=MAX_MISSED)
            missed[1].append((number, error))

    def find_repeated(self, request: WorkerRequest) -> EndedRequest | None:
        """The request that ``request`` repeats, if it does; without a number it never does."""
        ended = self._answered.get(request.group_rank)
        is_repeated = (
            ended is not None
            and 0 < request.question == ended.question
            and request.worker_id == ended.worker_id
        )
        return ended if is_repeated else None

    def pop_missed(self, request: WorkerRequest) -> TorchFTError | None:
        """Why the barrier failed that ``request`` comes too late for; None: it does not come too
        late."""
        rank = request.group_rank
        if rank not in self._missed or not request.question:
            return None
        worker_id, failed = self._missed[rank]
        if worker_id != request.worker_id:
            failed.clear()
        error = None
        while failed and error is None:
            number, reason = failed.popleft()
            error = reason if number >= request.question else None
        if not failed:
            del self._missed[rank]
        if error is not None:
            self.record_answers([request], error)
        return error
