"""Tests of slow groups that read through a loader: shares of a step, and evictions (N9, Q26)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from support.reading import BATCH, ReadingGroup
from support.training import together

from tools.chaos.samples import SampleLedger
from torchft_svc.coordination import LighthouseServer
from torchft_svc.core.quorum.worker.time_use import NUM_WARM_UP_STEPS
from torchft_svc.errors import Drained

# Three groups are dealt 2, 1 and 1 of them; all steps are whole.
MICROBATCHES = {"microbatch_size": BATCH // 4, "size": 4 * BATCH}
PASS_S, SLOW_PASS_S = 0.01, 0.15
AFTER_S, UNTIL = 1.0, 40


class SleepingGroup(ReadingGroup):
    """A group whose passes take time."""

    pass_s = PASS_S

    def next_batch(self) -> Any:
        batch = super().next_batch()
        time.sleep(self.pass_s)
        return batch


@contextmanager
def sleeping_groups(
    address: str, names: str, ledger: SampleLedger | None = None, **options: Any
) -> Iterator[list[SleepingGroup]]:
    """Groups with one letter each as their name, which meet in their first step."""
    with ExitStack() as stack:
        groups = [
            stack.enter_context(SleepingGroup(address, name, ledger, **MICROBATCHES, **options))
            for name in names
        ]
        yield groups


@contextmanager
def watching_lighthouse() -> Iterator[LighthouseServer]:
    """A lighthouse that finds out within seconds which groups are slow."""
    with LighthouseServer(
        "127.0.0.1:0", min_replicas=2, slow_after_ms=int(AFTER_S * 1000), on_slow="evict"
    ) as server:
        yield server


def load_of(group: Any) -> float:
    tally = group.manager._worker.time_use.tally(time.monotonic())
    return tally.step_times.load


def train(group: ReadingGroup, until: int) -> bool:
    """Train until a step is committed; whether the group was drained before."""
    try:
        group.until(until)
    except Drained:
        return True
    return False


def train_all(groups: list[SleepingGroup], until: int) -> list[bool]:
    return together(*(lambda group=group: train(group, until) for group in groups))


def test_q26_an_eviction_loses_no_step_where_steps_are_recovered() -> None:
    """What each group was dealt is reported with its times. The slow one leaves between two steps;
    the others divide the next one among themselves."""
    ledger = SampleLedger(4 * BATCH, BATCH)
    with (
        watching_lighthouse() as server,
        sleeping_groups(server.address(), "abc", ledger, recover_within_step=True) as groups,
    ):
        assert train_all(groups, NUM_WARM_UP_STEPS + 4) == [False, False, False]
        assert [load_of(each) for each in groups] == pytest.approx([1.5, 0.75, 0.75])
        groups[2].pass_s = SLOW_PASS_S
        assert train_all(groups, UNTIL) == [False, False, True]
        assert [each.num_discarded for each in groups] == [0, 0, 0]
        assert ledger.faults() == []
        assert ledger.num_steps == UNTIL
