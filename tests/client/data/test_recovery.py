"""Tests that a step in which a group is lost is divided among the others, and committed (D11)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from support.reading import BATCH, SIZE, AveragingGroup, Numbers, ReadingGroup
from support.running import eventually
from support.training import DEADLINE_S, bits, lighthouse, make_manager, together
from torch.utils.data import DataLoader

from tools.chaos.samples import SampleLedger
from torchft_svc.client import WorldSizeMode
from torchft_svc.client.data import ElasticDataLoader, ElasticStream
from torchft_svc.client.data.loop import DataLoop
from torchft_svc.errors import ConfigError, TorchFTError

STEPS_OF_EPOCH = -(-SIZE // BATCH)
RECOVERS: dict[str, Any] = {"recover_within_step": True, "microbatch_size": 2}


class Items:
    """A stream of the samples of `Numbers`."""

    def __iter__(self) -> Iterator[Any]:
        data = Numbers()
        return (data[index] for index in range(SIZE))


class StreamingGroup(ReadingGroup):
    """A group that reads them."""

    def make_loader(self, options: dict[str, Any]) -> Any:
        return ElasticStream(self.manager, Items(), global_batch_size=BATCH, **options)


@contextmanager
def in_term(
    names: str,
    ledger: SampleLedger,
    *,
    address: str = "",
    num: int = 0,
    kind: type[ReadingGroup] = ReadingGroup,
    **options: Any,
) -> Iterator[list[ReadingGroup]]:
    """Groups at one step, all of which begin the next one without a question.

    ``num``: how many of them contribute (0: all).
    """
    with ExitStack() as stack:
        address = address or stack.enter_context(lighthouse())
        groups = [
            stack.enter_context(kind(address, name, ledger, **RECOVERS, **options))
            for name in names
        ]
        num = num or len(names)
        together(*(lambda group=group: group.meets(num) for group in groups))
        deadline = time.monotonic() + DEADLINE_S
        while not all(each.manager._worker.round.keeps_quorum for each in groups):
            assert time.monotonic() < deadline, "the quorum never becomes a term"
            together(*(each.step for each in groups))
        for each in groups:
            each.num_discarded = 0
        yield groups


def run_alone(until: int) -> torch.Tensor:
    """The weights of one group alone, whose batches are the same."""
    with lighthouse() as address, ReadingGroup(address, "a") as alone:
        return alone.until(until).weights()


def leave_after_reading(group: ReadingGroup) -> None:
    """Be lost in the step whose first samples were read."""
    group.next_batch()
    group.manager.shutdown()


def leave_when_averages_have_begun(group: ReadingGroup, others: list[Any]) -> None:
    """Be lost in the step in which all of ``others`` have begun an average by hand."""
    group.next_batch()
    eventually(lambda: all(other.works for other in others))
    group.manager.shutdown()


def leave_between_steps(group: ReadingGroup) -> None:
    group.manager.shutdown()


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
@pytest.mark.parametrize("leave", [leave_after_reading, leave_between_steps])
def test_the_others_read_what_a_lost_group_had_to_read(
    names: str, leave: Callable[[ReadingGroup], None]
) -> None:
    ledger = SampleLedger(SIZE, BATCH)
    with in_term(names, ledger) as (*others, lost):
        until = lost.manager.current_step() + 2 * STEPS_OF_EPOCH
        together(lambda: leave(lost), *(lambda group=group: group.until(until) for group in others))
        assert [each.num_discarded for each in others] == [0] * len(others)
        assert ledger.faults() == []
        for each in others[1:]:
            assert torch.equal(each.weights(), others[0].weights())
        expected = run_alone(until)
        torch.testing.assert_close(others[0].weights(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("number_format", ["int8", "float8"])
@pytest.mark.parametrize(("when", "num_discarded"), [("after", 0), ("before", 1)])
def test_averages_in_8_bit_numbers_in_the_step_of_the_loss(
    when: str, num_discarded: int, number_format: str
) -> None:
    """One that has begun such an average before its last pass is discarded (E9)."""
    options = {"when": when, "number_format": number_format}
    ledger = SampleLedger(SIZE, BATCH)
    with in_term("abc", ledger, kind=AveragingGroup, **options) as (*others, lost):
        until = lost.manager.current_step() + STEPS_OF_EPOCH
        for each in others:
            each.works = []
        leave: dict[str, Callable[[], None]] = {
            "before": lambda: leave_when_averages_have_begun(lost, others),
            "after": lambda: leave_after_reading(lost),
        }
        together(leave[when], *(lambda group=group: group.until(until) for group in others))
        assert [each.num_discarded for each in others] == [num_discarded] * len(others)
        assert ledger.faults() == []
        found = [each.state() for each in others]
        assert bits(found[0]) == bits(found[1])
    if when == "after":
        with lighthouse() as address, AveragingGroup(address, "a", **RECOVERS, **options) as alone:
            expected = alone.until(until).memory
        error = (found[0]["memory"] - expected).abs().mean() / expected.abs().mean()
        assert error < 0.02


def test_a_group_that_has_not_begun_the_step_reads_the_rest_of_it() -> None:
    """One group has read its share, another one begins the step when the loss is known."""
    ledger = SampleLedger(SIZE, BATCH)
    with in_term("abc", ledger) as (reader, late, lost):
        until = lost.manager.current_step() + STEPS_OF_EPOCH

        def begin_late() -> None:
            eventually(late.manager._worker.who_is_lost)
            eventually(lambda: not reader.manager._worker.round.keeps_quorum)
            late.until(until)

        together(lambda: leave_after_reading(lost), lambda: reader.until(until), begin_late)
        assert [reader.num_discarded, late.num_discarded] == [0, 0]
        assert ledger.faults() == []
        expected = run_alone(until)
        torch.testing.assert_close(late.weights(), expected, rtol=1e-12, atol=1e-14)


def test_a_group_that_joins_in_that_step_adds_nothing_to_it() -> None:
    ledger = SampleLedger(SIZE, BATCH)
    with (
        lighthouse() as address,
        in_term("abc", ledger, address=address) as (a, b, lost),
        ReadingGroup(address, "d", ledger, **RECOVERS) as joiner,
    ):
        until = lost.manager.current_step() + 2 * STEPS_OF_EPOCH
        together(
            lambda: leave_after_reading(lost),
            *(lambda group=group: group.until(until) for group in (a, b, joiner)),
        )
        assert ledger.faults() == []
        expected = run_alone(until)
        for each in (a, b, joiner):
            torch.testing.assert_close(each.weights(), expected, rtol=1e-12, atol=1e-14)


def test_a_second_loss_in_the_same_step_discards_it() -> None:
    ledger = SampleLedger(SIZE, BATCH)
    with in_term("abcd", ledger) as (a, b, second, first):
        until = first.manager.current_step() + STEPS_OF_EPOCH

        def leave_in_the_recovery() -> None:
            """Leave when the step was divided anew."""
            second.optimizer.zero_grad()
            share = None
            while share in (None, second.loader._step.share):
                features, targets, _ = second.next_batch()
                share = second.loader._step.share
                with second.loader.accumulate(second.parallel):
                    loss = (second.parallel(features) - targets).square().mean()
                    (loss * second.loader.weight).backward()
            second.manager.shutdown()

        together(
            lambda: leave_after_reading(first),
            leave_in_the_recovery,
            lambda: a.until(until),
            lambda: b.until(until),
        )
        assert [a.num_discarded, b.num_discarded] == [1, 1]
        assert ledger.faults() == []
        expected = run_alone(until)
        torch.testing.assert_close(a.weights(), expected, rtol=1e-12, atol=1e-14)


def test_a_spare_takes_the_place_of_a_group_that_is_lost() -> None:
    """What the spare has read does not count, so it begins the step anew."""
    ledger = SampleLedger(SIZE, BATCH)
    options = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2}
    with in_term("abc", ledger, num=2, **options) as groups:
        ranks = [group.manager._worker.state.participation.participating_rank for group in groups]
        lost = groups[ranks.index(0)]
        others = [group for group in groups if group is not lost]
        until = lost.manager.current_step() + STEPS_OF_EPOCH
        together(
            lambda: leave_after_reading(lost),
            *(lambda group=group: group.until(until) for group in others),
        )
        assert ledger.faults() == []
        torch.testing.assert_close(others[0].weights(), run_alone(until), rtol=1e-12, atol=1e-14)


def asks_for_the_number_of_groups(group: ReadingGroup) -> None:
    group.manager.num_participants()


def reports_an_error(group: ReadingGroup) -> None:
    group.manager.report_error(RuntimeError("the program's own"))


@pytest.mark.parametrize("act", [asks_for_the_number_of_groups, reports_an_error])
def test_a_step_that_depends_on_its_members_is_discarded(
    act: Callable[[ReadingGroup], None],
) -> None:
    ledger = SampleLedger(SIZE, BATCH)
    with in_term("ab", ledger) as (left, lost):

        def train() -> bool:
            left.optimizer.zero_grad()
            act(left)
            return left.step()

        committed, _ = together(train, lambda: leave_after_reading(lost))
        assert not committed
        left.until(left.manager.current_step() + STEPS_OF_EPOCH)
        assert ledger.faults() == []


def test_a_stream_is_divided_anew() -> None:
    ledger = SampleLedger(SIZE, BATCH)
    with in_term("ab", ledger, kind=StreamingGroup) as (left, lost):
        until = lost.manager.current_step() + STEPS_OF_EPOCH
        together(lambda: leave_after_reading(lost), lambda: left.until(until))
        assert left.num_discarded == 0
        assert ledger.faults() == []


def test_samples_that_nobody_takes_over_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoop, "_divide", lambda self, step, rows: None)
    ledger = SampleLedger(SIZE, BATCH)
    with in_term("abc", ledger) as (a, b, lost):
        until = lost.manager.current_step() + STEPS_OF_EPOCH
        together(lambda: leave_after_reading(lost), lambda: a.until(until), lambda: b.until(until))
    # Of the shares of three groups two are left; one that begins late has half of the step.
    found = "; ".join(ledger.faults())
    assert any(f"{num} samples instead of 12" in found for num in (8, 10))


@pytest.mark.parametrize(
    ("settings", "options", "sentence"),
    [
        ({}, {}, "microbatch_size=None.*ends_step"),
        ({"use_async_quorum": False}, {"microbatch_size": 2}, "use_async_quorum=False.*needs True"),
        ({"steady_steps": False}, {"microbatch_size": 2}, "steady_steps=False.*needs True"),
    ],
)
def test_what_cannot_recover_is_refused(
    settings: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    with (
        lighthouse() as address,
        make_manager(address, "a", **settings) as manager,
        pytest.raises(ConfigError, match=sentence),
    ):
        ElasticDataLoader(
            manager,
            DataLoader(Numbers()),
            global_batch_size=8,
            recover_within_step=True,
            **options,
        )


def test_a_second_loader_is_refused() -> None:
    torchs = DataLoader(Numbers())
    with (
        lighthouse() as address,
        ReadingGroup(address, "a", **RECOVERS) as group,
        pytest.raises(ConfigError, match="one loader"),
    ):
        ElasticDataLoader(group.manager, torchs, global_batch_size=8, name="other")


def test_groups_with_and_without_it_do_not_fit() -> None:
    with (
        lighthouse(join_timeout_ms=300) as address,  # the first waits for the other for so long
        ReadingGroup(address, "a", **RECOVERS) as first,
        ReadingGroup(address, "b", microbatch_size=2) as second,
    ):
        first.until(1)
        with pytest.raises(TorchFTError, match="recovered within the step"):
            second.until(1)
