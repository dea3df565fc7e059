"""What a replica group's decisions order the shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.term import Fate
from torchft_svc.core.quorum.types import WorkerRequest
from torchft_svc.errors import TorchFTError


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLighthouse:
    """Ask for a quorum on behalf of the whole group, for ``round``.

    ``new_incarnation``: a worker was restarted, so to the others this is another group now.
    ``has_history``: all workers have received a quorum. ``steady``: all can begin steps without a
    question; ``agreed``: all say so. ``seen_num_groups``: of quorum ``seen_quorum_id`` (0: not
    known). The other fields combine those of the `WorkerRequest` s.
    """

    round: int
    step: int
    shrink_only: bool
    commit_failures: int
    new_incarnation: bool
    unhealed: bool = False
    seen_quorum_id: int = 0
    seen_num_groups: int = 0
    has_history: bool = False
    layout: str = ""
    step_quorum_id: int = 0
    steady: bool = False
    agreed: bool = False


@dataclass(frozen=True, slots=True)
class StopAsking:
    round: int


@dataclass(frozen=True, slots=True)
class AnswerWorker:
    """Tell the worker its part in a quorum, and the round to vote in."""

    caller: int
    request: WorkerRequest
    assignment: QuorumResult
    round: int


@dataclass(frozen=True, slots=True)
class AnswerVote:
    caller: int
    should_commit: bool
    fate: Fate = Fate.BREAKS_OFF


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    caller: int
    error: TorchFTError


# The death of a worker without a stream goes unnoticed: another one with its rank waits for so
# long. With a stream its end shows it, at once or, if its machine is gone, after about the same
# time.
OWNER_SILENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class AwaitOwner:
    """Call `Group.owner_was_silent` with these after `OWNER_SILENCE_S`: another worker asks with
    this rank, and its owner has no stream whose end would show that it is dead.

    Not if the owner has no worker id: such workers are one and the same, also after a restart.
    """

    group_rank: int
    number: int


Order = AskLighthouse | StopAsking | Leave | AnswerWorker | AnswerVote | RefuseWorker | AwaitOwner
