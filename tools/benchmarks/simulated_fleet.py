"""A lighthouse's production core with thousands of groups and a virtual clock: what an event costs.

No network and no messages: `Lighthouse` is called as its driver calls it, and the time of
each call is measured. What the driver would do with the orders is counted.
"""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import psutil

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.lighthouse import Lighthouse, Orders, Publish, Send
from torchft_svc.core.quorum.session_messages import Beat, Hello, Question
from torchft_svc.core.quorum.tally import StepTimes, Tally
from torchft_svc.core.quorum.types import NO_QUORUM, Member, QuorumConfig
from torchft_svc.rpc.codec import quorum_answer

JOB = "fleet"
_QUESTION_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Cost:
    """What one kind of event has taken: seconds, each."""

    kind: str
    times: list[float] = field(default_factory=list)
    num_news: int = 0  # messages that the driver has to send

    def row(self, groups: int) -> dict[str, object]:
        times = sorted(self.times)
        return {
            "groups": groups,
            "event": self.kind,
            "count": len(times),
            "median_us": 1e6 * times[len(times) // 2],
            "p99_us": 1e6 * times[len(times) * 99 // 100],
            "worst_us": 1e6 * times[-1],
            "total_ms": 1e3 * sum(times),
            "news": self.num_news / len(times),
        }


def group_member(number: int, step: int, incarnation: int = 0) -> Member:
    """Return what the manager of a group reports of it."""
    return Member(
        replica_id=f"group-{number:05}:{uuid.UUID(int=(incarnation << 32) + number)}",
        address=f"http://10.0.{number // 250}.{number % 250}:29511",
        store_address=f"10.0.{number // 250}.{number % 250}:29500",
        step=step,
        world_size=8,
        has_history=step > 0,
        steady=True,
    )


def group_tally(step: int, step_s: float) -> Tally:
    """Return what the manager of a group reports of its time, after so many steps."""
    times = StepTimes(0.7 * step_s, 0.1 * step_s, 0.05 * step_s, 0.15 * step_s, step)
    return Tally(committed_s=step * step_s, num_committed=step, step_times=times)


class SimulatedFleet:
    """Groups 0 to ``groups`` - 1, each with a session; a group's stream has its number."""

    def __init__(self, groups: int, config: QuorumConfig) -> None:
        self.now = 1000.0
        self.step = 0
        self.alive: dict[int, Member] = {n: group_member(n, 0) for n in range(groups)}
        self.costs: dict[str, Cost] = {}
        self.published: Publish | None = None
        self._config = config
        self._core = Lighthouse(config, 0, self.now)
        self._num_questions = 0

    def spend(self, seconds: float) -> None:
        """Let time pass, with the ticks that the driver's timer makes."""
        until = self.now + seconds
        while (due_at := self._core.next_deadline()) is not None and due_at <= until:
            self.now = max(self.now, due_at)
            self._feed("tick", self._core.tick)
        self.now = until

    def open(self, numbers: Iterable[int], kind: str = "session opened") -> None:
        for number in numbers:
            hello = Hello(self.alive[number].replica_id, NO_QUORUM)
            self._feed(kind, partial(self._core.opened, number, JOB, hello))

    def ask(self, numbers: Iterable[int], kind: str = "question") -> None:
        """These groups ask for the next quorum; the last question of all makes it."""
        for number in numbers:
            self._num_questions += 1
            question = Question(self._num_questions, self.alive[number], _QUESTION_TIMEOUT_S)
            before = self.published
            took_s, orders = self._timed(partial(self._core.received, number, question))
            self._record_cost(kind if self.published is before else "quorum", took_s, orders)

    def beat(self, seconds: float) -> None:
        """Everybody beats as often as allowed, each time in another step."""
        beats = self._core.jobs.beat_interval_s(JOB)
        rounds = max(1, round(seconds / beats))
        for _ in range(rounds):
            self.step += 1
            pause_s = beats / len(self.alive)
            for number in self.alive:
                self.spend(pause_s)
                tally = group_tally(self.step, beats)
                message = Beat(Phase.TRAINING, self.step, 0.02, tally=tally)
                self._feed("beat", partial(self._core.received, number, message))

    def kill(self, numbers: Iterable[int], kind: str = "group killed") -> None:
        for number in numbers:
            del self.alive[number]
            self._feed(kind, partial(self._core.closed, number))

    def join(self, number: int, incarnation: int, when: str = "") -> None:
        """Bring a killed group back as a new incarnation that asks."""
        self.alive[number] = group_member(number, 0, incarnation)
        self.open([number], f"session of a newcomer{when}")
        self.ask([number], f"question of a newcomer{when}")

    def commit(self) -> None:
        """All members go on to the next step."""
        self.step += 1
        for number, member in self.alive.items():
            self.alive[number] = group_member(
                number, self.step, uuid.UUID(member.replica_id.split(":")[1]).int >> 32
            )

    def _feed(self, kind: str, take: Callable[[float], Orders]) -> None:
        self._record_cost(kind, *self._timed(take))

    def _timed(self, take: Callable[[float], Orders]) -> tuple[float, Orders]:
        began_at = time.perf_counter()
        orders = take(self.now)
        self._core.next_deadline()  # the driver sets its timer after each input
        took_s = time.perf_counter() - began_at
        for order in orders:
            if isinstance(order, Publish):
                self.published = order
        return took_s, orders

    def _record_cost(self, kind: str, took_s: float, orders: Orders) -> None:
        cost = self.costs.setdefault(kind, Cost(kind))
        cost.times.append(took_s)
        for order in orders:
            if isinstance(order, Send):
                cost.num_news += len(order.streams)
            elif isinstance(order, Publish):
                cost.num_news += len(order.answers)


def simulate(groups: int, *, seconds: float, joins: int) -> tuple[list[dict[str, object]], str]:
    """The rows of all kinds of events, and a sentence on memory and the quorum's size.

    A cold start, ``seconds`` of heartbeats, and ``joins`` groups that are killed and come back one
    after the other; everybody asks after each of that. Then a tenth is killed while the others
    ask, and comes back.
    """
    config = QuorumConfig(min_replicas=groups, join_timeout_s=60.0, max_members_per_job=2 * groups)
    fleet = SimulatedFleet(groups, config)
    gc.collect()
    bytes_before = psutil.Process().memory_info().rss
    fleet.open(fleet.alive)
    fleet.ask(fleet.alive)
    assert fleet.published is not None
    assert len(fleet.published.answers) == groups
    gc.collect()
    num_bytes = psutil.Process().memory_info().rss - bytes_before
    fleet.beat(seconds)
    for number in range(joins):
        fleet.kill([number])
        fleet.commit()
        fleet.join(number, number + 1)
        fleet.ask([each for each in fleet.alive if each != number], "question")
        assert len(fleet.published.answers) == groups
    lost = list(fleet.alive)[: groups // 10]
    fleet.commit()
    fleet.ask([each for each in fleet.alive if each >= groups // 2])
    fleet.kill(lost, "one of many killed")
    fleet.ask([each for each in fleet.alive if each < groups // 2])
    for number in lost:
        fleet.join(number, joins + 1, " of many")
    assert len(fleet.published.answers) == groups
    began_at = time.perf_counter()
    answer = quorum_answer(fleet.published.quorum, time.time())
    encoded_ms = 1000 * (time.perf_counter() - began_at)
    memory = (
        f"{num_bytes / groups / 1024:.1f} KB of memory for each group; a quorum of {groups} groups "
        f"has {len(answer) / 1e6:.2f} MB, encoded once, in {encoded_ms:.0f} ms"
    )
    return [cost.row(groups) for cost in fleet.costs.values()], memory
