"""Sets a scene for the lighthouse: short ways to name members and to compare orders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from support.core.recorded_jobs import Announce, AnswerQuorum, Record, RecordedJobs, RefuseRequest
from torchft_svc.core.quorum.activity import Activity, Phase
from torchft_svc.core.quorum.lighthouse.jobs import ReportLoss
from torchft_svc.core.quorum.lighthouse.overview import GroupStatus
from torchft_svc.core.quorum.manager.commit_barrier import RefuseWorker
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.types import LastQuorum, Member, Quorum, QuorumConfig

JOB = "job"
# Every duration is a power of two or a small whole number, so sums are exact.
SECONDS = QuorumConfig(
    min_replicas=1, join_timeout_s=10, startup_timeout_s=20, heartbeat_timeout_s=100
)


def config(**changes: Any) -> QuorumConfig:
    """The config of most scenes, with ``changes``."""
    fields = {
        "min_replicas": 1,
        "join_timeout_s": 10.0,
        "startup_timeout_s": 20.0,
        "heartbeat_timeout_s": 100.0,
    }
    return QuorumConfig(**{**fields, **changes})


def member(replica_id: str, step: int = 0, **fields: Any) -> Member:
    """Group ``replica_id`` with addresses made from its name."""
    name = replica_id.split(":")[0]
    fields = {"address": f"{name}:1", "store_address": f"{name}:2", **fields}
    return Member(replica_id=replica_id, step=step, **fields)


def quorum(quorum_id: int, *members: Member) -> Quorum:
    return Quorum(quorum_id=quorum_id, participants=members)


def answer(
    quorum_id: int,
    *members: Member,
    callers: tuple[int, ...],
    lost_from: int | None = None,
    begins_anew: bool = False,
) -> AnswerQuorum:
    return AnswerQuorum(JOB, callers, quorum(quorum_id, *members), lost_from, begins_anew)


@dataclass(frozen=True)
class Refused:
    """`RefuseRequest` or `RefuseWorker`, to be compared by what the error says."""

    caller: int
    error: str
    reason: str


def plain(orders: Iterable[Any]) -> list[Any]:
    """The orders with every error written out."""
    return [
        Refused(order.caller, type(order.error).__name__, str(order.error))
        if isinstance(order, RefuseRequest | RefuseWorker)
        else order
        for order in orders
    ]


class Scene:
    """One lighthouse and a clock that the test moves; every input appends its orders to ``orders``.

    The clock stops at each deadline on the way, as the shell does.
    """

    def __init__(
        self, config: QuorumConfig = SECONDS, first_id: int = 0, id_stride: int = 1
    ) -> None:
        self.jobs = RecordedJobs(config, first_id, id_stride)
        self.now = 0.0
        self.orders: list[Any] = []
        self.newcomers: list[str] = []
        self._caller = 0

    def ask(self, replica_id: str, step: int = 0, *, job: str = JOB, **fields: Any) -> int:
        """Ask for a quorum; returns the number of the caller, counted from 1."""
        self._caller += 1
        asker = member(replica_id, step, **fields)
        self._record(self.jobs.request(job, asker, self._caller, self.now))
        return self._caller

    def ask_all(self, *replica_ids: str, step: int = 0) -> None:
        for replica_id in replica_ids:
            self.ask(replica_id, step)

    def beat(self, *replica_ids: str, job: str = JOB) -> None:
        for replica_id in replica_ids:
            self._record(self.jobs.heartbeat(job, replica_id, self.now))

    def opened(
        self, replica_id: str, quorum_id: int = 0, max_step: int = 0, num_groups: int = 0
    ) -> None:
        """Begin a session; its group was in this quorum, maybe of another lighthouse."""
        last = LastQuorum(quorum_id, max_step)
        opened = self.jobs.opened(JOB, replica_id, last, self.now, num_groups=num_groups)
        self._record(opened)

    def report(self, replica_id: str, phase: Phase, step: int = 0, for_s: float = 0.0) -> None:
        """Send a beat with what the group does, and for how long already."""
        doing = Activity(phase, step, self.now - for_s)
        self._record(self.jobs.heartbeat(JOB, replica_id, self.now, doing))

    def group(self, replica_id: str) -> GroupStatus:
        """The status of a living group."""
        (job,) = self.jobs.status(JOB, self.now)
        return next(group for group in job.groups if group.replica_id == replica_id)

    def withdraw(self, caller: int, job: str = JOB) -> None:
        self._record(self.jobs.withdraw(job, caller, self.now))

    def leave(
        self, replica_id: str, reason: str = "bye", job: str = JOB, *, ends: bool = False
    ) -> None:
        self._record(self.jobs.leave(job, replica_id, Leave(reason, ends=ends), self.now))

    def session_ends(self, replica_id: str) -> None:
        """End the only session of a group without a `Leave`."""
        self._record(self.jobs.went_silent(JOB, replica_id, self.now))

    def accept_loss(self, job: str = JOB) -> None:
        self._record(self.jobs.accept_loss(job, self.now))

    def until(self, now: float) -> None:
        """Move the clock, waking the lighthouse whenever it asked for that."""
        for _ in range(10_000):
            at = self.jobs.next_deadline()
            if at is None or at > now:
                self.now = now
                return
            self.now = max(self.now, at)
            self._record(self.jobs.tick(self.now))
        raise AssertionError(f"the lighthouse keeps asking to be woken at {self.now}")

    def before(self, now: float) -> None:
        """Move the clock to the last instant before ``now``, and look again although not asked."""
        self.until(now - 1e-6)
        self._record(self.jobs.tick(self.now))

    def why(self, job: str = JOB) -> str:
        return self.jobs.why(job, self.now)

    def pop_orders(self) -> list[Any]:
        """The orders since the last call."""
        orders, self.orders = self.orders, []
        return orders

    def pop_quorums(self) -> list[tuple[int, list[str]]]:
        """The quorums among the orders since the last call: id and members."""
        return [
            (order.quorum.quorum_id, [each.replica_id for each in order.quorum.participants])
            for order in self.pop_orders()
            if isinstance(order, AnswerQuorum)
        ]

    def pop_newcomers(self) -> list[str]:
        """The groups that were announced to the last quorum since the last call."""
        newcomers, self.newcomers = self.newcomers, []
        return newcomers

    def _record(self, orders: Iterable[Record]) -> None:
        """Announcements, which most stories are not about, are kept apart."""
        records = list(orders)
        self.newcomers += [each.replica_id for each in records if isinstance(each, Announce)]
        self.orders += plain(each for each in records if not isinstance(each, Announce))


def formed(*replica_ids: str, step: int = 0, settings: QuorumConfig = SECONDS) -> Scene:
    """A scene at time 100 whose groups have just become quorum 1."""
    scene = Scene(settings)
    scene.now = 100.0
    scene.beat(*replica_ids)
    scene.ask_all(*replica_ids, step=step)
    assert scene.pop_quorums() == [(1, sorted(replica_ids))]
    return scene


def loss(replica_id: str, reason: str = "bye") -> ReportLoss:
    return ReportLoss(JOB, replica_id, reason)
