"""What a replica group's decisions order the shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.assignment import Assignment
from torchft_svc.core.session_messages import Leave
from torchft_svc.core.types import WorkerRequest
from torchft_svc.errors import TorchFTError


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLighthouse:
    """Ask for a quorum on behalf of the whole group, and tell the outcome of ``round``.

    ``new_incarnation``: a worker was restarted, so to the others this is another group now.
    ``unhealed``: a worker of it should have healed, and has not. ``seen_quorum_id``: the highest
    that a worker of it has been told. ``has_history``: all of them have been told one.
    ``layout``: what its workers sum (empty: not told). ``step_quorum_id``: in which
    its step was committed, the oldest that a worker of it tells.
    """

    round: int
    step: int
    shrink_only: bool
    commit_failures: int
    new_incarnation: bool
    unhealed: bool = False
    seen_quorum_id: int = 0
    has_history: bool = False
    layout: str = ""
    step_quorum_id: int = 0


@dataclass(frozen=True, slots=True)
class StopAsking:
    """Nobody waits for the outcome of ``round`` any more."""

    round: int


@dataclass(frozen=True, slots=True)
class AnswerWorker:
    """Tell the worker its part in a quorum, and the round to vote in."""

    caller: int
    request: WorkerRequest
    assignment: Assignment
    round: int


@dataclass(frozen=True, slots=True)
class AnswerVote:
    """Send the group's decision."""

    caller: int
    should_commit: bool


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    """Tell ``caller`` that its request or vote failed."""

    caller: int
    error: TorchFTError


# Of a worker without a line nobody hears when it dies: another one with its rank waits for so long.
# With a line its end tells, at once or, if its machine is gone, about as late.
OWNER_SILENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class AwaitOwner:
    """Ask `Group.owner_was_silent` with these after `OWNER_SILENCE_S`: another worker asks as the
    one with this rank, and the one before has no line whose end would tell that it is dead.

    Not if that has no worker id: such workers are one and the same, also after a restart.
    """

    group_rank: int
    number: int


Order = AskLighthouse | StopAsking | Leave | AnswerWorker | AnswerVote | RefuseWorker | AwaitOwner
