"""What a group remembers of barriers that are over, for a worker that comes late or asks again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torchft_svc.core.quorum.term import Fate
from torchft_svc.core.quorum.types import WorkerRequest
from torchft_svc.errors import TorchFTError

# A worker that missed more barriers than this is told of the newest ones only.
MAX_MISSED = 16


@dataclass(frozen=True, slots=True)
class EndedBarrier:
    """The commit barrier of ``round``, about one of ``steps``.

    ``decision`` is None if there was none, because of ``reason``; then nobody received a yes.
    """

    round: int
    steps: frozenset[int]
    decision: bool | None
    reason: str = ""
    fate: Fate = Fate.BREAKS_OFF

    def concerns(self, round_: int, step: int) -> bool:
        """Whether a vote belongs here; ``round_`` is 0 if the voter does not know rounds."""
        return round_ in (0, self.round) and step in self.steps


@dataclass(frozen=True, slots=True)
class EndedQuestion:
    """The last question of a worker that was answered: with the quorum (``error`` is None), or not.

    Its answer may have been lost on the way, then the worker repeats the question.
    """

    worker_id: str
    question: int
    error: TorchFTError | None


class EndedBarriers:
    """The quorum barriers of one group that are over, by group rank."""

    def __init__(self) -> None:
        self._questions: dict[int, EndedQuestion] = {}  # the last one of each worker
        # Barriers that failed before this worker came to them, the oldest first: the number of the
        # question that others asked there, and the error. Workers that start together, and need one
        # another in each step, have asked as many questions.
        self._missed: dict[int, tuple[str, deque[tuple[int, TorchFTError]]]] = {}

    def note(self, requests: Collection[WorkerRequest], error: TorchFTError | None) -> None:
        """These requests were answered: with the quorum (``error`` is None), or not."""
        for each in requests:
            self._questions[each.group_rank] = EndedQuestion(each.worker_id, each.question, error)

    def failed(
        self, requests: Collection[WorkerRequest], absent: Mapping[int, str], error: TorchFTError
    ) -> None:
        """The barrier of ``requests`` has failed, also for the ``absent`` workers."""
        self.note(requests, error)
        number = max(request.question for request in requests)
        for rank, worker_id in absent.items():
            missed = self._missed.get(rank)
            if missed is None or missed[0] != worker_id:
                missed = self._missed[rank] = worker_id, deque(maxlen=MAX_MISSED)
            missed[1].append((number, error))

    def repeated(self, request: WorkerRequest) -> EndedQuestion | None:
        """The question that ``request`` repeats, if it does; without a number it never does."""
        ended = self._questions.get(request.group_rank)
        is_repeated = (
            ended is not None
            and 0 < request.question == ended.question
            and request.worker_id == ended.worker_id
        )
        return ended if is_repeated else None

    def missed(self, request: WorkerRequest) -> TorchFTError | None:
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
            self.note([request], error)
        return error
