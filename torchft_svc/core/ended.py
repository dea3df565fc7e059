"""What a group remembers of barriers that are over, for a worker that comes late or asks again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torchft_svc.core.types import WorkerRequest
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
    reason: str

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

    def is_repeated_by(self, request: WorkerRequest) -> bool:
        """Whether ``request`` is this question once more; questions without a number never are."""
        return 0 < request.question == self.question and request.worker_id == self.worker_id


@dataclass(frozen=True, slots=True)
class Missed:
    """Barriers that failed before ``worker_id`` came to them, the oldest first: the number of the
    question that others asked there, and the error.

    Workers that begin together, and need one another in each step, have asked as many questions.
    """

    worker_id: str
    failed: deque[tuple[int, TorchFTError]] = field(
        default_factory=lambda: deque(maxlen=MAX_MISSED)
    )

    def next_error(self, question: int) -> TorchFTError | None:
        """Of the first barrier that this question comes too late for; None if it does for none."""
        while self.failed:
            number, error = self.failed.popleft()
            if number >= question:
                return error
        return None


class EndedBarriers:
    """The quorum barriers of one group that are over, by group rank."""

    def __init__(self) -> None:
        self._questions: dict[int, EndedQuestion] = {}  # the last one of each worker
        self._missed: dict[int, Missed] = {}  # of workers that have still to learn of them

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
            if missed is None or missed.worker_id != worker_id:
                missed = self._missed[rank] = Missed(worker_id)
            missed.failed.append((number, error))

    def repeated(self, request: WorkerRequest) -> EndedQuestion | None:
        """The question that ``request`` is once more, if it is."""
        ended = self._questions.get(request.group_rank)
        return ended if ended is not None and ended.is_repeated_by(request) else None

    def missed(self, request: WorkerRequest) -> TorchFTError | None:
        """Why the barrier failed that ``request`` comes too late for; None: it does not come too
        late."""
        rank = request.group_rank
        missed = self._missed.get(rank)
        if missed is None or not request.question:
            return None
        if missed.worker_id != request.worker_id:
            del self._missed[rank]
            return None
        error = missed.next_error(request.question)
        if not missed.failed:
            del self._missed[rank]
        if error is not None:
            self.note([request], error)
        return error
