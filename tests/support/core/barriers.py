"""Short ways to name what workers ask and vote, and a group in the middle of a round."""

from __future__ import annotations

from typing import Any

from support.core.scenes import member, quorum
from torchft_svc.core.quorum.assignment import assign
from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.manager.group_orders import AnswerWorker, AskLighthouse
from torchft_svc.core.quorum.types import Vote, WorkerRequest

QUORUM = quorum(3, member("a", 5), member("b", 7))


def request(group_rank: int, step: int = 5, **fields: Any) -> WorkerRequest:
    return WorkerRequest(group_rank=group_rank, step=step, **fields)


def vote(group_rank: int, yes: bool = True, step: int = 5, **fields: Any) -> Vote:
    return Vote(group_rank=group_rank, step=step, should_commit=yes, **fields)


def told(caller: int, asked: WorkerRequest, round_: int) -> AnswerWorker:
    """The part of this worker of group "a" in QUORUM."""
    return AnswerWorker(caller, asked, assign(QUORUM, "a", asked.group_rank), round_)


def asks(round_: int = 1, step: int = 5, **fields: Any) -> AskLighthouse:
    fields = {"shrink_only": False, "commit_failures": 0, "new_incarnation": False, **fields}
    return AskLighthouse(round=round_, step=step, **fields)


def in_round(world_size: int, round_: int = 1) -> Group:
    """A group whose workers (callers 10, 11, ...) have just been told QUORUM in ``round_``."""
    group = Group(world_size, first_round=round_)
    for rank in range(world_size):
        group.quorum_requested(request(rank), 10 + rank)
    group.quorum_formed(round_, QUORUM, "a")
    return group
