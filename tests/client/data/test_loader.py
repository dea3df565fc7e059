"""Tests what is read in real quorums: every sample in one committed step, whatever is lost."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import re
import threading
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.bounds import again_if_late
from support.reading import BATCH, SIZE, Numbers, ReadingGroup, reading_groups
from support.training import DEADLINE_S, lighthouse, make_manager, together
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from tools.chaos.samples import SampleLedger
from torchft_svc.client import Manager, WorldSizeMode
from torchft_svc.client.data import ElasticDataLoader, ElasticSampler, EpochPosition
from torchft_svc.client.data.plan import Turn
from torchft_svc.client.data.position import JobPosition
from torchft_svc.client.data.reading import PieceReader
from torchft_svc.client.step.data_positions import ALONE, DataPositions
from torchft_svc.client.step.state import StateRegistry
from torchft_svc.core.quorum.worker.step import MAX_REFUSALS, Participation
from torchft_svc.errors import ConfigError, RequestRefused, TorchFTError

_ALONE = Turn(0, 1)
WITH_WORKERS = pytest.param({"num_workers": 2}, marks=pytest.mark.processes)
STEPS_OF_EPOCH = -(-SIZE // BATCH)
# A group that does not fit is there, and takes no part: the others wait for it for so long.
_SHORT_JOIN_MS = 300


def run_alone(until: int, **options: Any) -> torch.Tensor:
    """The weights of one group alone, whose batches are the same."""
    with lighthouse() as address, ReadingGroup(address, "a", **options) as alone:
        return alone.until(until).weights()


@pytest.fixture(scope="module")
def two_epochs() -> torch.Tensor:
    return run_alone(2 * STEPS_OF_EPOCH)


def assert_close(weights: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatch_size": 3},
        {"microbatch_size": 6},  # fewer than groups
        {"use_async_quorum": False},
        {"steady_steps": False},
        {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2},
        WITH_WORKERS,
    ],
    ids=str,
)
def test_three_groups_train_as_one(options: dict[str, Any], two_epochs: torch.Tensor) -> None:
    """The batch is the same, so the weights are, also in short steps with unequal parts."""
    ledger = SampleLedger(SIZE, BATCH)
    with lighthouse(3) as address, reading_groups(address, "abc", ledger, **options) as groups:
        together(*(lambda group=group: group.until(2 * STEPS_OF_EPOCH) for group in groups))
        assert ledger.faults() == []
        assert ledger.num_steps == 2 * STEPS_OF_EPOCH
        assert groups[0].loader.position == EpochPosition(2, 0)
        for group in groups:
            assert_close(group.weights(), two_epochs)


def test_clearing_before_reading_is_the_same_step(two_epochs: torch.Tensor) -> None:
    def train(group: ReadingGroup) -> list[bool]:
        committed = []
        for _ in group.loader.epochs(2):
            batches = iter(group.loader)
            while True:
                group.optimizer.zero_grad()
                batch = next(batches, None)
                if batch is None:
                    break
                features, targets, _ = batch
                (group.parallel(features) - targets).square().mean().backward()
                committed.append(group.optimizer.step())
        return committed

    with lighthouse(2) as address, reading_groups(address, "ab") as groups:
        for committed in together(*(lambda group=group: train(group) for group in groups)):
            assert committed == [True] * (2 * STEPS_OF_EPOCH)
        assert_close(groups[0].weights(), two_epochs)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_discarded_steps_are_read_again(num_workers: int, two_epochs: torch.Tensor) -> None:
    ledger = SampleLedger(SIZE, BATCH)

    def train(group: ReadingGroup) -> None:
        num = 0
        while group.manager.current_step() < 2 * STEPS_OF_EPOCH:
            num += 1
            group.step(fails=num % 3 == (1 if group.name == "a" else 2))

    with (
        lighthouse(2) as address,
        reading_groups(address, "ab", ledger, num_workers=num_workers) as groups,
    ):
        together(*(lambda group=group: train(group) for group in groups))
        assert ledger.faults() == []
        assert groups[0].num_discarded >= 5
        assert_close(groups[0].weights(), two_epochs)
        assert (groups[0].loader.num_dropped > 0) == (num_workers > 0)


@pytest.mark.parametrize("options", [{}, {"use_async_quorum": False}, WITH_WORKERS], ids=str)
def test_a_group_joins_and_another_leaves(options: dict[str, Any]) -> None:
    ledger = SampleLedger(SIZE, BATCH)
    with (
        lighthouse(1) as address,
        reading_groups(address, "ab", ledger, **options) as (first, second),
    ):
        together(lambda: first.meets(2), lambda: second.meets(2))
        first.until(first.manager.current_step())  # nothing: both are there
        with ReadingGroup(address, "c", ledger, **options) as joiner:
            together(*(lambda group=group: group.meets(3) for group in (first, second, joiner)))
            position = joiner.loader.position
            assert position > EpochPosition(0, BATCH)
        second.manager.shutdown()
        until = first.manager.current_step() + 2 * STEPS_OF_EPOCH
        first.until(until)
        assert ledger.faults() == []
        expected = run_alone(until)
        assert_close(first.weights(), expected)


def test_discards_change_no_bit_where_the_same_groups_train() -> None:
    def run(fails: set[int]) -> torch.Tensor:
        def train(group: ReadingGroup) -> None:
            num = 0
            while group.manager.current_step() < STEPS_OF_EPOCH:
                num += 1
                group.step(fails=num in fails)

        with lighthouse(3) as address, reading_groups(address, "abc") as groups:
            together(*(lambda group=group: train(group) for group in groups))
            return groups[1].weights()

    assert torch.equal(run(set()), run({2, 3}))


def test_a_joiner_goes_on_in_the_epoch_of_the_others() -> None:
    """A joiner has no end of an epoch that the others have not."""
    ends: dict[str, list[EpochPosition]] = {"a": [], "b": []}
    far = 4

    def train(group: ReadingGroup, until: int) -> None:
        for _ in group.loader.epochs(until):
            for features, targets, _ in group.loader:
                group.optimizer.zero_grad()
                (group.parallel(features) - targets).square().mean().backward()
                group.optimizer.step()
            ends[group.name].append(group.loader.position)

    with lighthouse(1) as address, ReadingGroup(address, "a") as first:
        train(first, 2)
        assert ends["a"] == [EpochPosition(1, 0), EpochPosition(2, 0)]
        next(iter(first.loader))  # the others wait for its step
        with ReadingGroup(address, "b") as second:
            first.manager.report_error(RuntimeError("on purpose"))
            together(lambda: train(first, far), lambda: train(second, far))
            assert ends["a"][2:] == [EpochPosition(3, 0), EpochPosition(4, 0)]
            assert ends["b"] in (ends["a"][2:], ends["a"][3:])
            torch.testing.assert_close(first.weights(), second.weights(), rtol=0, atol=0)


def test_an_epoch_that_is_left_early_is_over() -> None:
    with lighthouse() as address, ReadingGroup(address, "a") as group:
        begins = []
        for epoch in group.loader.epochs(3):
            for number, _ in enumerate(group.loader):
                if number == 0:
                    begins.append((epoch, group.loader.position))
                if number == 2:
                    break  # after a batch that no step uses, as torch's users do
                group.parallel(torch.ones(1, 3).double()).sum().backward()
                assert group.optimizer.step()
        assert begins == [(each, EpochPosition(each, 0)) for each in range(3)]
        assert group.manager.current_step() == 6


@pytest.mark.parametrize("options", [{}, {"ordered_sums": True}], ids=str)
def test_a_pass_that_raises_costs_its_step_only(options: dict[str, Any]) -> None:
    """The loop of the page on data, which clears the gradients after a step: none are left over."""
    options = {"microbatch_size": 3, **options}

    def train(group: ReadingGroup, fails: set[int]) -> tuple[torch.Tensor, int]:
        num_passes = num_discarded = 0
        while group.manager.current_step() < 6:
            for features, targets, _ in group.loader:
                num_passes += 1
                with (
                    contextlib.suppress(FloatingPointError),
                    group.loader.accumulate(group.parallel),
                ):
                    loss = (group.parallel(features) - targets).square().mean()
                    torch.autograd.backward(loss * group.loader.weight)
                    if num_passes in fails:
                        raise FloatingPointError
                if group.loader.ends_step and num_passes not in fails:
                    num_discarded += not group.optimizer.step()
                    group.optimizer.zero_grad()
        return group.weights(), num_discarded

    with lighthouse() as address, ReadingGroup(address, "a", **options) as alone:
        expected, _ = train(alone, set())
    first_of_its_step, last_of_its_step = 5, 12
    with lighthouse() as address, ReadingGroup(address, "a", **options) as group:
        found, num_discarded = train(group, {first_of_its_step, last_of_its_step})
    assert num_discarded == 1  # the other one was given up, because it was not voted on
    assert torch.equal(found, expected)


# -- wrong uses ------------------------------------------------------------------------------------


def test_a_step_reads_once() -> None:
    with lighthouse() as address, ReadingGroup(address, "a") as group:
        group.next_batch()
        with pytest.raises(RequestRefused, match=r"optimizer\.step\(\) before the next batch"):
            group.next_batch()
        first = group.loader.position
        group.manager.report_error(RuntimeError("an exception in the pass"))
        again = group.next_batch()
        assert group.loader.position == first
        assert len(again[0]) == BATCH


def test_votes_before_all_is_read_come_to_an_end() -> None:
    with lighthouse() as address, ReadingGroup(address, "a", microbatch_size=3) as group:

        def vote_early() -> bool:
            features, targets, _ = group.next_batch()
            (group.parallel(features) - targets).square().mean().backward()
            return group.optimizer.step()

        assert not any(vote_early() for _ in range(MAX_REFUSALS - 1))
        with pytest.raises(RequestRefused, match=r"10 steps .* in vain.* until loader.ends_step"):
            vote_early()
        assert group.loader.position == EpochPosition(0, 0)
        assert group.step()


def pass_over(group: ReadingGroup, batches: Iterable[Any]) -> list[bool]:
    committed = []
    for features, targets, _ in batches:
        group.optimizer.zero_grad()
        (group.parallel(features) - targets).square().mean().backward()
        committed.append(group.optimizer.step())
    return committed


def test_an_epoch_is_not_trained_on_twice() -> None:
    with lighthouse() as address, ReadingGroup(address, "a") as group:
        cycled = itertools.cycle(group.loader)
        assert all(pass_over(group, itertools.islice(cycled, STEPS_OF_EPOCH)))
        position = group.loader.position
        assert position == EpochPosition(1, 0)
        assert pass_over(group, itertools.islice(cycled, 2)) == [False, False]
        assert "itertools.cycle(loader)" in str(group.manager.errored())
        assert group.loader.position == position
        assert all(pass_over(group, group.loader)), "a loader that is read is not replayed"
        group.loader.close()


def test_other_data_may_follow_an_epoch() -> None:
    with lighthouse() as address, ReadingGroup(address, "a") as group:
        last = next(iter(DataLoader(Numbers(), BATCH)))
        for batch in group.loader:
            assert pass_over(group, [batch]) == [True]
            last = batch
        assert pass_over(group, [last] * 2) == [True] * 2
        kept = list(itertools.islice(iter(group.loader), 1))
        assert pass_over(group, kept) == [True]
        assert all(pass_over(group, group.loader))
        assert pass_over(group, kept) == [True], "it was read by another pass, which was left"


def test_a_vote_before_all_is_read_fails(caplog: pytest.LogCaptureFixture) -> None:
    with lighthouse() as address, ReadingGroup(address, "a", microbatch_size=3) as group:
        features, targets, _ = group.next_batch()
        assert not group.loader.ends_step
        (group.parallel(features) - targets).square().mean().backward()
        assert not group.optimizer.step()
        assert "until loader.ends_step" in str(group.manager.errored())
        assert "was not multiplied by loader.weight" not in caplog.text
        group.next_batch()
        assert "batch of loader 'data' was not multiplied by loader.weight" in caplog.text
        assert group.loader.position == EpochPosition(0, 0)
        assert group.step()
        assert group.loader.position == EpochPosition(0, BATCH)


def test_nobody_commits_a_step_that_one_group_has_not_read() -> None:
    """One group has two of three microbatches, and votes after the first."""
    with (
        lighthouse(2) as address,
        reading_groups(address, "ab", global_batch_size=9, microbatch_size=3) as (first, second),
    ):

        def vote_early(group: ReadingGroup) -> bool:
            features, targets, _ = group.next_batch()
            group.optimizer.zero_grad()
            (group.parallel(features) - targets).square().mean().backward()
            return group.optimizer.step()

        assert together(lambda: vote_early(first), lambda: vote_early(second)) == [False, False]
        assert together(lambda: first.meets(2), lambda: second.meets(2)) == [None, None]
        assert first.loader.position == second.loader.position


def test_a_guess_that_was_wrong_is_found_before_anything_is_summed() -> None:
    """A group that joins heals first, so the other one is alone; here it is not."""
    positions = DataPositions(StateRegistry())
    two = Participation(participating_rank=0, num_participants=2)
    assert positions.why_not_summed(two) is None
    positions.guess_alone()
    assert positions.why_not_summed(ALONE) is None
    assert "another group has joined" in str(positions.why_not_summed(two))
    positions.begin_step(1)
    assert positions.why_not_summed(two) is None


def test_a_lone_group_reads_beside_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    with lighthouse() as address, ReadingGroup(address, "a") as alone:
        alone.until(2)
        asked = threading.Event()
        ask = alone.manager._runtime.deps.client.ask
        monkeypatch.setattr(
            alone.manager._runtime.deps.client,
            "ask",
            lambda *arguments: (asked.wait(DEADLINE_S), ask(*arguments))[1],
        )
        features, _, _ = alone.next_batch()
        assert len(features) == BATCH
        asked.set()


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [({"order_seed": 6}, "seed 6"), ({"size": 60}, "60 samples"), ({"last": "pad"}, "step pad")],
    ids=str,
)
def test_other_data_in_one_group_are_refused(mine: dict[str, Any], theirs: str) -> None:
    with (
        lighthouse(1, join_timeout_ms=_SHORT_JOIN_MS) as address,
        ReadingGroup(address, "a") as first,
        ReadingGroup(address, "b", **mine) as second,
    ):
        first.until(1)
        with pytest.raises(TorchFTError, match=rf"all groups of a job need.*{theirs}"):
            second.until(1)


def test_a_position_of_other_data_is_refused() -> None:
    with (
        lighthouse(join_timeout_ms=_SHORT_JOIN_MS) as address,
        ReadingGroup(address, "a") as first,
        ReadingGroup(address, "b", size=60) as other,
        ReadingGroup(address, "c", global_batch_size=5) as smaller,
    ):
        first.until(2)
        saved = first.loader.state_dict()
        with pytest.raises(ConfigError, match=r"50 samples shuffled.*other data.*60 samples"):
            other.loader.load_state_dict(saved)
        with pytest.raises(ConfigError, match="no position in data"):
            first.loader.load_state_dict({"epoch": 1})
        smaller.loader.load_state_dict(saved)  # a run may go on with another batch size
        assert smaller.loader.position == EpochPosition(0, 2 * BATCH)


def test_another_number_of_groups_continues_a_run(two_epochs: torch.Tensor) -> None:
    with lighthouse(1) as address, ReadingGroup(address, "a") as alone:
        alone.until(STEPS_OF_EPOCH + 2)
        saved = alone.state(), alone.manager.state_dict(), alone.loader.state_dict()
    with lighthouse(2) as address, reading_groups(address, "ab") as groups:
        for group in groups:
            group.load(copy.deepcopy(saved[0]))
            group.manager.load_state_dict(saved[1])
            group.loader.load_state_dict(saved[2])
        together(*(lambda group=group: group.until(2 * STEPS_OF_EPOCH) for group in groups))
        assert_close(groups[1].weights(), two_epochs)


class Stream(IterableDataset[Any]):
    """A data set without indices."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.fixture(scope="module")
def manager() -> Any:
    with lighthouse() as address, make_manager(address, "a") as manager:
        yield manager


class PartOfAnotherLibrary(Sampler[int]):
    """A sampler that reads what falls to one of several workers."""

    rank, num_replicas = 0, 2

    def __init__(self, data: Numbers) -> None:
        self._size = len(data)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self._size, self.num_replicas))


class ShuffledByEpoch(Sampler[int]):
    """A sampler whose order follows from its own seed, and from the epoch that it is given."""

    def __init__(self, seed: int = 0) -> None:
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(20))
        random.Random(self._seed + self._epoch).shuffle(order)
        return iter(order)


def test_a_sampler_with_a_seed_of_its_own(manager: Manager) -> None:
    def order(epoch: int, seed: int = 0) -> tuple[list[int], str]:
        torchs = DataLoader(Numbers(), sampler=ShuffledByEpoch(seed))
        made = ElasticDataLoader(
            manager, torchs, global_batch_size=20, name=f"epoch {epoch} of {seed}"
        )
        share = made.share_of(EpochPosition(epoch), _ALONE)
        return made.indices_of(share.pieces[0]), made._position.layout

    first, layout = order(0)
    assert sorted(first) == list(range(20))
    assert order(1)[0] != first
    assert order(0, seed=1)[1] != layout, "groups with other orders would not be refused"


def test_loaders_that_cannot_be_read(manager: Manager) -> None:
    data = Numbers()
    shared = ElasticSampler(data)
    for loader, sentence in (
        (data, "DataLoader is needed"),
        (DataLoader(Stream()), "no indices: use ElasticStream"),
        (DataLoader(data, sampler=DistributedSampler(data, 2, 0)), "a part of the data only"),
        (DataLoader(data, sampler=ElasticSampler(40)), "of 40 samples.*has 50 samples"),
        (DataLoader(data, sampler=PartOfAnotherLibrary(data)), "a part of the data only"),
        (DataLoader(data, sampler=BatchSampler(range(50), 5, False)), "it draws lists"),
        (DataLoader(data, batch_sampler=[[0, 1], [2, 3]]), "batch_sampler='list'.*for the order"),
        (
            DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, 2, 0), 5, False)),
            "a part of the data only",
        ),
        (DataLoader(data, batch_size=None), "would not be collated"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ElasticDataLoader(manager, loader, global_batch_size=8)  # type: ignore[arg-type]
    ElasticDataLoader(manager, DataLoader(data, sampler=shared), global_batch_size=8)
    with pytest.raises(ConfigError, match="make a sampler for each"):
        ElasticDataLoader(
            manager, DataLoader(data, sampler=shared), global_batch_size=8, name="other"
        )
    with pytest.raises(ConfigError, match=r"name='data'.*give each loader its own"):
        ElasticDataLoader(manager, DataLoader(data), global_batch_size=8)
    with pytest.raises(ConfigError, match=r"in_group='all'.*shard or same"):
        ElasticDataLoader(manager, DataLoader(data), global_batch_size=8, in_group="all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda data: DataLoader(data), "50 samples in their order"),
        (lambda data: DataLoader(data, shuffle=True), "50 samples shuffled with seed 3"),
        (
            lambda data: DataLoader(data, sampler=RandomSampler(data, num_samples=20)),
            "20 samples drawn by RandomSampler with seed 3",
        ),
        (
            lambda data: DataLoader(data, sampler=WeightedRandomSampler([0.0, 1.0, 2.0], 9)),
            "9 samples drawn by WeightedRandomSampler with seed 3",
        ),
        (lambda data: DataLoader(data, drop_last=True), "last step drop"),
        (
            lambda data: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, True)),
            "50 samples shuffled with seed 3, 8 in a step, last step drop",
        ),
    ],
)
def test_the_order_of_the_loader_is_kept(
    manager: Manager, loader: Any, words: str, request: pytest.FixtureRequest
) -> None:
    made = ElasticDataLoader(
        manager, loader(Numbers()), global_batch_size=8, seed=3, name=request.node.name
    )
    again = ElasticDataLoader(
        manager, loader(Numbers()), global_batch_size=8, seed=3, name=request.node.name + "2"
    )
    assert words in made._position.layout
    share = made.share_of(EpochPosition(), _ALONE)
    assert made.indices_of(share.pieces[0]) == again.indices_of(share.pieces[0])
    assert len(made.dataset) == SIZE  # type: ignore[arg-type]
    assert len(made) == (made._rules.num_samples // 8 + (made._rules.last != "drop"))


# -- faults that are planted -----------------------------------------------------------------------


def found_by_ledger(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, fault: Any, num_workers: int = 0
) -> str:
    """What the ledger of a small run with discards and a joiner says when ``fault`` is planted."""
    monkeypatch.setattr(target, name, fault)
    ledger = SampleLedger(SIZE, BATCH)
    with (
        lighthouse(1) as address,
        ReadingGroup(address, "a", ledger, num_workers=num_workers) as first,
    ):
        first.until(2)
        first.step(fails=True)
        first.until(3)
        with ReadingGroup(address, "b", ledger) as joiner:
            together(lambda: first.meets(2), lambda: joiner.meets(2))
            together(lambda: first.step(), lambda: joiner.step())
        first.until(first.manager.current_step() + 2 * STEPS_OF_EPOCH)
    return "; ".join(ledger.faults())


def test_the_ledger_finds_nothing_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by_ledger(monkeypatch, JobPosition, "unread", JobPosition.unread) == ""


def test_a_position_that_moves_with_a_discard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def now(self: JobPosition) -> EpochPosition:
        place = self._place
        return self._following(place.position) if place.is_used else place.position

    assert re.search(
        "used more than once|never used|nothing",
        found_by_ledger(monkeypatch, JobPosition, "now", now),
    )


def test_a_joiner_that_begins_at_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = found_by_ledger(monkeypatch, JobPosition, "heal", lambda self, state: None)
    assert re.search("used more than once|in epochs", faults)


@pytest.mark.processes
def test_batches_that_are_kept_over_a_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: PieceReader, piece: Any, ahead: Any) -> Any:
        if self._batches is None:
            self._plan.upcoming = ahead_with(piece, ahead)
            self._batches = self._begin_loading()
        elif not self._has_workers:
            self._plan.upcoming = iter((piece,))
        batch = next(self._batches)
        self._plan.issued.popleft()
        return batch

    faults = found_by_ledger(monkeypatch, PieceReader, "read", read, num_workers=1)
    assert re.search("used more than once|samples instead of", faults)


def ahead_with(piece: Any, ahead: Any) -> Any:
    yield piece
    yield from ahead()


# -- numbers that belong to the step and to the sample ---------------------------------------------


class Many(Numbers):
    """A data set whose indices would take 400 MB as a list."""

    def __init__(self) -> None:
        super().__init__(50_000_000)


@again_if_late
def test_an_epoch_over_fifty_million_samples_starts_at_once(manager: Manager) -> None:
    with contextlib.closing(_over_many(manager)) as loader:
        share = loader.share_of(EpochPosition(), _ALONE)
        tracemalloc.start()
        begun_at = time.monotonic()
        batch = loader._map.read(0, EpochPosition(), _ALONE, share)
        took_s = time.monotonic() - begun_at
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(batch[2]) == 64
        assert took_s < 0.1
        assert peak < 50_000_000


def _over_many(manager: Manager) -> ElasticDataLoader:
    torchs = DataLoader(Many(), sampler=ElasticSampler(Many()))
    return ElasticDataLoader(manager, torchs, global_batch_size=64, name=f"many {time.monotonic()}")


class Noisy(Numbers):
    """Samples with random numbers of all three kinds."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random(), float(np.random.random())


def noise(address: str, name: str, num_workers: int, first: int) -> dict[int, tuple[float, ...]]:
    """The random numbers of the samples of a step at ``first``; those of the program stay."""
    with make_manager(address, name) as manager:
        torchs = DataLoader(Noisy(), shuffle=True, num_workers=num_workers)
        loader = ElasticDataLoader(manager, torchs, global_batch_size=10, seed_samples=True)
        loader._position.move_to(EpochPosition(1, first))
        torch.manual_seed(4)
        batch = next(iter(loader))
        drawn = torch.rand(())
        torch.manual_seed(4)
        assert drawn == torch.rand(())
        loader.close()
    index, *numbers = [each.tolist() for each in batch]
    return dict(zip(index, zip(*numbers, strict=True), strict=True))


@pytest.mark.processes
def test_random_numbers_belong_to_the_sample() -> None:
    with lighthouse() as address:
        one, two = noise(address, "a", 1, 0), noise(address, "b", 2, 5)
    both = one.keys() & two.keys()
    assert len(both) == 5
    assert {each: one[each] for each in both} == {each: two[each] for each in both}
    assert len({*one.values(), *two.values()}) == 15


@pytest.mark.processes
def test_they_are_the_same_without_worker_processes() -> None:
    """Another thread of this process may draw meanwhile, such as one of another test."""
    with lighthouse() as address:
        in_worker = noise(address, "a", 1, 5)
        assert any(noise(address, f"b{each}", 0, 5) == in_worker for each in range(3))


def test_several_loaders_are_weighted_by_their_samples() -> None:
    """Two losses in a step, of loaders with 12 and 5 samples for 2 groups."""

    def train(group: ReadingGroup) -> torch.Tensor:
        torchs = DataLoader(Numbers(), sampler=ElasticSampler(Numbers(), seed=9))
        other = ElasticDataLoader(group.manager, torchs, global_batch_size=5, name="other")
        for _ in range(4):
            losses = []
            for loader in (group.loader, other):
                features, targets, _ = next(iter(loader))
                error = (group.parallel(features) - targets).square().mean()
                losses.append(error * loader.weight)
            group.optimizer.zero_grad()
            torch.autograd.backward(sum(losses))
            assert group.optimizer.step()
        assert other.position == EpochPosition(0, 20)
        return group.weights()

    with lighthouse() as address, ReadingGroup(address, "a") as alone:
        expected = train(alone)
    with lighthouse(2) as address, reading_groups(address, "ab") as groups:
        for weights in together(*(lambda group=group: train(group) for group in groups)):
            assert_close(weights, expected)


def test_an_average_in_a_step_is_weighted_by_samples() -> None:
    def average(group: ReadingGroup) -> tuple[float, float]:
        _, _, indices = group.next_batch()
        mean = indices.double().mean()
        group.manager.allreduce(mean).wait()
        group.manager.report_error(RuntimeError("on purpose"))
        step = group.loader.indices_of(group.loader.share_of(EpochPosition(), _ALONE).pieces[0])
        return mean.item(), sum(step) / len(step)

    with lighthouse(2) as address, reading_groups(address, "ab", global_batch_size=7) as groups:
        for found, expected in together(*(lambda group=group: average(group) for group in groups)):
            assert found == pytest.approx(expected, rel=1e-12)
