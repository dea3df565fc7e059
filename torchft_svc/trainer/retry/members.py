"""The workers of a trainer's run: who lives, who is missing, and when to look for resources."""

from __future__ import annotations

import math
from collections.abc import Collection

from torchft_svc.core.pausable_clock import PausableClock, usual_look_s
from torchft_svc.trainer.retry.orders import (
    IncidentCause,
    KillWorker,
    LookForResources,
    Remedy,
    ReportBroken,
    ReportLeftAlone,
    RequestWorkers,
    RetryOrder,
    RetryRules,
    StartWorker,
)
from torchft_svc.trainer.retry.states import (
    RUN_TRANSITIONS,
    KnownWorker,
    RunChange,
    RunPhase,
    WorkerStage,
)

RetryOrders = tuple[RetryOrder, ...]

# The jitter takes up to this part of a pause away.
JITTER = 0.5
# So many starts in a row may fail before there is a pause.
MAX_QUICK_STARTS = 2


class RunMembers:
    """What `RetryMachine` knows of its workers; collects the orders of an input."""

    def __init__(self, rules: RetryRules, now: float) -> None:
        self.rules = rules
        self.phase = RunPhase.IDLE
        self._clock = PausableClock(usual_look_s(rules.heartbeat_timeout_s), now)
        self._at = now
        self._orders: list[RetryOrder] = []
        self._workers: dict[int, KnownWorker] = {}
        self._num_started = 0
        self._num_failed_starts = 0  # in a row
        self._look_at = math.inf  # for resources
        self._num_pauses = 0

    def ranks(self) -> dict[int, int]:
        """The rank of each worker that has not ended, by its number."""
        return {number: each.rank for number, each in self._workers.items()}

    def num_ready(self) -> int:
        """How many workers have joined."""
        return sum(each.stage is WorkerStage.JOINED for each in self._workers.values())

    def _start(self, rank: int) -> None:
        number = self._num_started
        self._num_started += 1
        self._workers[number] = KnownWorker(rank, WorkerStage.STARTING, self._at, self._at)
        self._orders.append(StartWorker(number, rank))

    def _pause(self, jitter: float) -> float:
        """Look for resources again after a time that becomes longer."""
        longest_s = self.rules.first_pause_s * 2.0 ** min(self._num_pauses, 32)
        pause_s = min(longest_s, self.rules.max_pause_s) * (1 - JITTER * jitter)
        self._num_pauses += 1
        self._look_at = self._at + pause_s
        return pause_s

    def _look_for_all(self) -> None:
        """Look for resources at once; after starts that failed in a row, with a pause."""
        if self._num_failed_starts > MAX_QUICK_STARTS:
            self._num_pauses = self._num_failed_starts - MAX_QUICK_STARTS - 1
            self._pause(0.0)
        else:
            self._orders.append(LookForResources())

    def _kill(self, number: int, worker: KnownWorker) -> None:
        if worker.stage is not WorkerStage.KILLED:
            worker.move(WorkerStage.KILLED, self._at)
            self._orders.append(KillWorker(number))

    def _leave_alone(self, *numbers: int) -> None:
        """Their ends are not waited for any longer."""
        for number in numbers:
            worker = self._workers.pop(number)
            self._orders.append(ReportLeftAlone(number, worker.rank))

    def _alive(self) -> dict[int, KnownWorker]:
        return {number: each for number, each in self._workers.items() if each.counts}

    def _num_carriers(self) -> int:
        """How many workers have the state of the last step."""
        return sum(each.has_state for each in self._alive().values())

    def _note_behind(self, asked: Collection[KnownWorker]) -> None:
        """Workers that have finished ask for no more quorums: nobody else reaches their step."""
        last = max(each.step for each in asked if each.is_done)
        for each in asked:
            if self.rules.keeps_others and not each.is_done and each.step < last:
                each.behind_since = min(each.behind_since, self._at)

    def _num_missing(self) -> int:
        return self.rules.num_workers - len(self._workers)

    def _heard(self, worker: int, now: float) -> KnownWorker | None:
        at = self._time(now)
        found = self._workers.get(worker)
        if found is None or found.stage is WorkerStage.KILLED:
            return None
        found.heard_at = at
        return found

    def _time(self, now: float) -> float:
        self._at = self._clock.now(now)
        return self._at

    def _done(self) -> RetryOrders:
        orders, self._orders = tuple(self._orders), []
        return orders

    def _fill(self, num: int, jitter: float) -> None:
        """Start what is missing beside those that train."""
        taken = {each.rank for each in self._workers.values()}
        free = [rank for rank in range(self.rules.num_workers) if rank not in taken]
        for rank in free[:num]:
            self._start(rank)
        left = len(free) - min(num, len(free))
        if left:
            self._pause(jitter)
            self._orders.append(RequestWorkers(left))
        elif free:
            self._num_pauses = self._num_failed_starts
            self._orders.append(RequestWorkers(0))

    def _look_for_missing(self) -> None:
        """At once, unless those that were started for it were lost, too."""
        if not self._num_missing():
            return
        if self._num_failed_starts:
            self._num_pauses = max(self._num_pauses, self._num_failed_starts - 1)
            self._pause(0.0)
        else:
            self._orders.append(LookForResources())

    def _can_go_on(self) -> bool:
        """Whether enough workers have a state, and keep it."""
        return self.rules.keeps_others and self._num_carriers() >= self.rules.min_workers

    def _report(
        self,
        remedy: Remedy,
        cause: IncidentCause,
        reason: str,
        rank: int | None,
        *,
        explains: bool = False,
    ) -> None:
        self._orders.append(
            ReportBroken(remedy=remedy, cause=cause, reason=reason, rank=rank, explains=explains)
        )

    def _move(self, change: RunChange) -> None:
        self.phase = RUN_TRANSITIONS[self.phase, change]
