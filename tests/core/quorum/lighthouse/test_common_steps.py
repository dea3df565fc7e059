"""Tests that the holders of a group's workers copy the same steps (rule B4)."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from torchft_svc.core.quorum.lighthouse.common_steps import (
    LEAD_S,
    PATIENCE_S,
    PATIENCE_SHARE,
    CopiedSteps,
    StepRate,
)


class Worker:
    """Copies one worker's states, as a thread of a holder does: waits, fetches, and keeps."""

    def __init__(self, dice: random.Random, fetch_s: float) -> None:
        self._dice = dice
        self._fetch_s = fetch_s
        self._steps = CopiedSteps()
        self._until = math.inf  # it has fetched the copy, or waits no longer for the others
        self._above: int | None = None  # for what it waits
        self.held = 0

    def look(self, now: float, per_second: float, every: int, whole: int) -> None:
        """Do what is due at ``now``; ``whole``: the newest step of which all have a copy."""
        step = int(now * per_second)
        if self._above is not None:
            offered = step // every * every
            if offered > self._above:
                fetched_in_s = self._fetch_s * (0.7 + 0.6 * self._dice.random())
                self._steps.record_copy(offered, self._above, fetched_in_s)
                self._above, self.held = None, offered
                self._until = now + fetched_in_s + self._steps.patience_s()
        elif whole >= self.held or now >= self._until:
            seen = max(0, int((now - self._dice.random()) * per_second))
            self._above = self._steps.step_to_wait_above(self.held, seen, per_second)

    def has(self, now: float) -> bool:
        """Whether it keeps its copy at ``now``, a second after it has arrived."""
        return self._above is None and now >= self._until - self._steps.patience_s() + 1


@pytest.mark.parametrize("every", [1, 5, 100])
@pytest.mark.parametrize("per_second", [0.2, 1.0, 7.0, 300.0])
@pytest.mark.parametrize("fetch_s", [(0.01, 0.01), (0.5, 0.9), (2.0, 7.0)])
def test_b4_workers_whose_copies_take_different_times_copy_common_steps(
    every: int, per_second: float, fetch_s: tuple[float, float]
) -> None:
    """Each looks at the job at times of its own, up to a second late, and takes what is offered."""
    dice = random.Random(7)
    workers = [Worker(dice, each) for each in fetch_s]
    takes_s = LEAD_S + PATIENCE_S + (1 + PATIENCE_SHARE) * max(fetch_s)
    period_s = every / per_second + 2 * takes_s
    common = [0]
    for tick in range(int(10 * period_s / 0.1)):
        now = 0.1 * tick
        for worker in workers:
            worker.look(now, per_second, every, common[-1])
        steps = {worker.held for worker in workers}
        if len(steps) == 1 and all(worker.has(now) for worker in workers):
            common += steps - {common[-1]}
    assert max(after - before for before, after in pairwise(common)) <= 2 * period_s * per_second
    assert len(common) >= 5


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = StepRate()
    assert rate.per_second() == 0.0
    rate.record_step(100, 1.0)
    assert rate.per_second() == 0.0
    rate.record_step(110, 6.0)
    assert rate.per_second() == 2.0
    rate.record_step(150, 16.0)
    assert rate.per_second() == 4.0
    rate.record_step(3, 17.0)
    assert rate.per_second() == 0.0, "another run"


def test_a_job_of_unknown_speed_is_copied_at_its_next_step() -> None:
    assert CopiedSteps().step_to_wait_above(held=0, job_step=41, per_second=0.0) == 41
    assert CopiedSteps().step_to_wait_above(held=50, job_step=41, per_second=0.0) == 50
