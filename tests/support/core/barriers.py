"""Short ways to name what workers ask and vote, and a group in the middle of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.core.scenes import member, quorum
from torchft_svc.core.quorum.activity import PhaseReport
from torchft_svc.core.quorum.assignment import assign
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, RefuseWorker
from torchft_svc.core.quorum.manager.group import (
    AnswerWorker,
    AskLighthouse,
    EndGroup,
    Group,
    NotifyWorkers,
    Orders,
    StopAsking,
)
from torchft_svc.core.quorum.session_messages import Drain, Leave
from torchft_svc.core.quorum.types import GroupRequest, Quorum, Vote, WorkerRequest
from torchft_svc.errors import RequestRefused, TorchFTError

QUORUM = quorum(3, member("a", 5), member("b", 7))
AT = 100.0
PATIENCE_S = 3600.0


def request(group_rank: int, step: int = 5, **fields: Any) -> WorkerRequest:
    return WorkerRequest(group_rank=group_rank, step=step, **fields)


def vote(group_rank: int, yes: bool = True, step: int = 5, **fields: Any) -> Vote:
    return Vote(group_rank=group_rank, step=step, should_commit=yes, **fields)


def answered(caller: int, asked: WorkerRequest, round_: int) -> AnswerWorker:
    """The part of this worker of group "a" in QUORUM."""
    return AnswerWorker(caller, asked, assign(QUORUM, "a", asked.group_rank), round_)


def asks(round_: int = 1, step: int = 5, **fields: Any) -> GroupRequest:
    fields = {"shrink_only": False, "commit_failures": 0, "new_incarnation": False, **fields}
    return GroupRequest(round=round_, step=step, **fields)


@dataclass(frozen=True)
class AwaitOwner:
    """The group awaits a sign of life of the owner of this rank, since the call ``number``."""

    group_rank: int
    number: int


BarrierOrder = (
    GroupRequest | StopAsking | Leave | AnswerWorker | AnswerVote | RefuseWorker | AwaitOwner
)


class _Group(Group):
    """Lets the test decide when the silence of an owner ends."""

    def __init__(self, world_size: int, first_round: int) -> None:
        super().__init__(world_size, first_round, AT)
        self.awaited: list[AwaitOwner] = []

    def await_owner(self, group_rank: int, caller: int, now: float) -> None:
        self.awaited.append(AwaitOwner(group_rank, caller))


class TimelessGroup:
    """The barriers of a group whose time stands still: without deadlines, and without news.

    A refusal of what has just come in is raised.
    """

    def __init__(self, world_size: int, first_round: int = 1) -> None:
        self.group = _Group(world_size, first_round)
        self.world_size = world_size

    def quorum_requested(self, asked: WorkerRequest, caller: int) -> tuple[BarrierOrder, ...]:
        return self._accepted(self.group.quorum_requested(asked, caller, PATIENCE_S, AT), caller)

    def vote_received(self, cast: Vote, caller: int) -> tuple[BarrierOrder, ...]:
        return self._accepted(self.group.vote_received(cast, caller, PATIENCE_S, AT), caller)

    def call_withdrawn(self, caller: int) -> tuple[BarrierOrder, ...]:
        return self._barrier_orders(self.group.call_withdrawn(caller))

    def lighthouse_answered(
        self, round_: int, outcome: Quorum | TorchFTError, replica_id: str = "a"
    ) -> tuple[BarrierOrder, ...]:
        return self._barrier_orders(self.group.lighthouse_answered(round_, outcome, replica_id, AT))

    def worker_attached(self, group_rank: int, worker_id: str) -> None:
        assert self._barrier_orders(self.group.worker_attached(group_rank, worker_id)) == ()

    def worker_detached(
        self, group_rank: int, worker_id: str, reason: str
    ) -> tuple[BarrierOrder, ...]:
        orders = self.group.worker_detached(group_rank, worker_id, reason, AT)
        return self._barrier_orders(orders)

    def owner_was_silent(self, group_rank: int, number: int) -> tuple[BarrierOrder, ...]:
        self.group.end_silence(group_rank, number, AT)
        return self._barrier_orders(self.group.tick(AT))

    def phase_reported(self, group_rank: int, report: PhaseReport) -> tuple[BarrierOrder, ...]:
        return self._barrier_orders(self.group.phase_reported(group_rank, report, AT))

    def drain(self, reason: str) -> tuple[BarrierOrder, ...]:
        return self._barrier_orders(self.group.news_received(Drain(reason), "a", 0))

    def belongs_to(self, group_rank: int, worker_id: str) -> bool:
        return self.group.belongs_to(group_rank, worker_id)

    def checkpoint_address(self, group_rank: int) -> str:
        return self.group.checkpoint_address(group_rank)

    def callers_in_barrier(self) -> list[int]:
        return self.group.callers_in_barrier()

    def why(self, caller: int | None = None) -> str:
        return self.group.why(caller)

    def _accepted(self, orders: Orders, caller: int) -> tuple[BarrierOrder, ...]:
        if len(orders) == 1 and isinstance(orders[0], RefuseWorker):
            refused = orders[0]
            if refused.caller == caller and isinstance(refused.error, RequestRefused):
                raise refused.error
        return self._barrier_orders(orders)

    def _barrier_orders(self, orders: Orders) -> tuple[BarrierOrder, ...]:
        found: list[BarrierOrder] = []
        for order in orders:
            match order:
                case AskLighthouse():
                    found.append(order.request)
                case NotifyWorkers() | EndGroup():
                    pass
                case _:
                    found.append(order)
        awaited, self.group.awaited = self.group.awaited, []
        return (*found, *awaited)


def in_round(world_size: int, round_: int = 1) -> TimelessGroup:
    """A group whose workers (callers 10, 11, ...) have just received QUORUM in ``round_``."""
    group = TimelessGroup(world_size, first_round=round_)
    for rank in range(world_size):
        group.quorum_requested(request(rank), 10 + rank)
    group.lighthouse_answered(round_, QUORUM)
    return group
