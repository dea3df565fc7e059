"""Tests which samples each worker uses, while workers come and go."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from torchft_svc.client.data.plan import Turn
from torchft_svc.client.data.seeds import mix, seed_everything
from torchft_svc.errors import ConfigError
from torchft_svc.trainer.data import batch_source
from torchft_svc.trainer.held_state import HeldState
from torchft_svc.trainer.job import WorkerJob
from torchft_svc.trainer.loop import CreatorLoop
from torchft_svc.trainer.messages import Validate
from torchft_svc.trainer.steps import part_of


class Counted(Dataset[Any]):
    """A data set whose samples are their own numbers; with ``noise``, and a random number."""

    def __init__(self, size: int, noise: bool = False) -> None:
        self.size, self.noise = size, noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return (index, torch.rand(()), random.random()) if self.noise else index


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def one_pass(source: Any, sizes: list[int], epoch: int = 0) -> list[list[list[int]]]:
    """The samples of each worker in each step, with ``sizes`` workers in turns."""
    steps, num_samples = [], 0
    while source.has_more(epoch, num_samples):
        size = sizes[len(steps) % len(sizes)]
        drawn = [source.draw(epoch, num_samples, Turn(rank, size)) for rank in range(size)]
        steps.append([[int(each) for each in batch] for batch, _ in drawn])
        assert len({end for _, end in drawn}) == 1
        num_samples = drawn[0][1]
    return steps


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [number for step in steps for batch in step for number in batch]


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    workers=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    shuffles=st.booleans(),
)
def test_every_sample_once_however_many_workers(
    size: int, batch_size: int, workers: list[int], shuffles: bool
) -> None:
    source = batch_source(Counted(size), batch_size, 1, shuffles=shuffles)
    *steps, last = one_pass(source, workers)
    for index, step in enumerate(steps):
        assert [len(batch) for batch in step] == workers[index % len(workers)] * [batch_size]
    lengths = [len(batch) for batch in last]
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1
    before, of_last = flat(steps), flat([last])
    if len(of_last) > size - len(before):  # fewer samples than workers
        assert lengths == len(lengths) * [1]
    assert sorted(before + sorted(set(of_last))) == list(range(size))


def test_passes_are_in_different_orders_that_follow_from_the_seed() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return flat(one_pass(batch_source(Counted(50), 4, seed), [2], epoch))

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != sorted(order(1, 0))


def test_a_loader_of_the_user_is_taken_over() -> None:
    def doubled(samples: list[int]) -> list[int]:
        return [2 * each for each in samples]

    loader = DataLoader(Counted(20), batch_size=3, collate_fn=doubled)
    assert one_pass(batch_source(loader, None, 0), [2])[0] == [[0, 2, 4], [6, 8, 10]]
    shuffled = DataLoader(Counted(20), batch_size=3, shuffle=True)
    found = flat(one_pass(batch_source(shuffled, None, 0), [2]))
    assert sorted(found) == list(range(20))
    assert found != list(range(20))


def test_a_batch_sampler_of_the_user_decides_on_its_batches() -> None:
    batches = BatchSampler(WeightedRandomSampler([0.0, 1.0, 2.0], 9), 4, drop_last=False)
    source = batch_source(DataLoader(Counted(3), batch_sampler=batches), None, seed=1)
    sizes = [len(batch) for step in one_pass(source, [1]) for batch in step]
    assert sizes == [4, 4, 1]


def test_samplers_of_the_user_draw_the_same_for_all() -> None:
    weighted = WeightedRandomSampler([1.0, 0.0, 1.0], 12)
    twice = RandomSampler(Counted(5), replacement=True, num_samples=10, generator=torch.Generator())
    for sampler, size in ((weighted, 3), (twice, 5)):
        loader = DataLoader(Counted(size), batch_size=2, sampler=sampler)
        ours, theirs = (flat(one_pass(batch_source(loader, None, 7), [2])) for _ in range(2))
        assert ours == theirs
        assert len(ours) == len(sampler)
        assert ours != flat(one_pass(batch_source(loader, None, 7), [2], epoch=1))


def test_with_drop_last_a_step_that_is_not_whole_is_left_out() -> None:
    loader = DataLoader(Counted(10), batch_size=2, drop_last=True)
    source = batch_source(loader, None, 0)
    assert source.draw(0, 4, Turn(1, 2)) is not None
    assert source.draw(0, 8, Turn(0, 2)) is None
    with pytest.raises(ConfigError, match="no whole step"):
        batch_source(DataLoader(Counted(3), batch_size=2, drop_last=True), None, 0).draw(
            0, 0, Turn(0, 2)
        )


def test_random_samples_are_the_same_when_a_pass_is_resumed() -> None:
    def noisy() -> Any:
        return batch_source(DataLoader(Counted(24, noise=True), batch_size=4), None, 5)

    whole, resumed, turn = noisy(), noisy(), Turn(1, 2)
    batches = [whole.draw(0, done, turn)[0] for done in (0, 8, 16)]
    seed_everything(99)
    again = [resumed.draw(0, done, turn)[0] for done in (8, 16)]
    for one, other in zip(batches[1:], again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(batches[0][1], batches[1][1])


@pytest.mark.processes
def test_processes_of_a_loader_read_the_same_samples() -> None:
    def noisy(num_workers: int) -> Any:
        loader = DataLoader(Counted(24, noise=True), batch_size=4, num_workers=num_workers)
        return batch_source(loader, None, 5)

    alone, helped = noisy(0), noisy(2)
    for done, turn in ((0, Turn(0, 2)), (8, Turn(0, 2)), (16, Turn(1, 2))):
        one, other = (source.draw(0, done, turn)[0] for source in (alone, helped))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("sizes", [[2], [3], [1, 3, 2]])
def test_batches_of_any_iterable_are_each_used_once(sizes: list[int]) -> None:
    for data in (DataLoader(Stream(22), batch_size=2), [[2 * i, 2 * i + 1] for i in range(11)]):
        *steps, last = one_pass(batch_source(data, None, 0), sizes)
        numbers = flat(steps) + sorted(set(flat([last])))
        assert numbers == list(range(22))


def test_an_iterable_goes_on_in_the_middle_of_a_pass() -> None:
    source = batch_source([[i] for i in range(9)], None, 0)
    assert source.draw(0, 4, Turn(1, 2)) == ([5], 6)
    assert source.draw(0, 0, Turn(0, 3)) == ([0], 3)  # from the beginning
    assert source.draw(1, 0, Turn(2, 3)) == ([2], 3)
    assert source.has_more(1, 8)
    assert not source.has_more(1, 9)


class Shuffling(Stream):
    """Draws its order and its noise while it is gone through, as a buffer that shuffles does."""

    def __iter__(self) -> Iterator[Any]:
        left = list(range(self.size))
        while left:
            yield left.pop(random.randrange(len(left))), torch.rand(()).item()


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_an_iterable_that_draws_random_numbers_is_the_same_for_all(processes: int) -> None:
    def loader() -> Any:
        is_kept = processes > 0
        return DataLoader(
            Shuffling(13), batch_size=2, num_workers=processes, persistent_workers=is_kept
        )

    def read(source: Any, rank: int, epoch: int, begin: int = 0) -> list[Any]:
        batches, num_samples = [], begin
        while source.has_more(epoch, num_samples):
            batch, num_samples = source.draw(epoch, num_samples, Turn(rank, 2))
            seed_everything(epoch, num_samples, rank)  # of the step, which draws some, too
            random.random()
            batches.append([part.tolist() for part in batch])
        return batches

    sources = [batch_source(loader(), None, 0) for _ in range(2)]
    for epoch in range(2):
        both = [read(source, rank, epoch) for rank, source in enumerate(sources)]
        samples = [number for batches in both for numbers, _ in batches for number in numbers]
        # The last of 7 batches is used by both.
        assert set(samples) == set(range(13))
        assert len(samples) == 14
        again = read(batch_source(loader(), None, 0), 1, epoch, begin=4)
        assert again == both[1][2:]


def test_validation_uses_no_sample_twice() -> None:
    for data, batch_size in ((Counted(9), 2), ([[i] for i in range(9)], None)):
        found = []
        for rank in range(4):
            source = batch_source(data, batch_size, 0, trains=False, shuffles=False)
            found += [int(each) for batch in part_of(source, Turn(rank, 4)) for each in batch]
        assert sorted(found) == list(range(9))


@pytest.mark.parametrize("kind", [tuple, list])
def test_training_and_validation_data_are_a_tuple_or_a_list(kind: Any) -> None:
    def made(data: Any) -> CreatorLoop:
        job = WorkerJob(
            fault_tolerance="restart",
            model_creator=lambda config: nn.Linear(1, 1),
            data_creator=lambda config: data,
            optimizer_creator=lambda model, config: torch.optim.SGD(model.parameters()),
            loss_creator=nn.MSELoss,
        )
        return CreatorLoop(job, HeldState())

    command = Validate(command=1, num_steps=1, part=0, num_parts=1, info={})
    with pytest.raises(ConfigError, match="batch_size"):  # so there is a Dataset to validate with
        made(kind([Counted(3), Counted(2)])).validate(command)
    with pytest.raises(ConfigError, match="no validation data"):
        made([torch.ones(1), torch.ones(1)]).validate(command)


def test_data_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        batch_source(Counted(3), None, 0)
    with pytest.raises(ConfigError, match="iterable"):
        batch_source(3, None, 0)
    with pytest.raises(ConfigError, match="0 samples"):
        batch_source(Counted(0), 2, 0).has_more(0, 0)
    spent = iter([[1]])
    assert next(spent) == [1]
    with pytest.raises(ConfigError, match="only once"):
        batch_source(spent, None, 0).has_more(0, 0)


def test_seeds_follow_from_all_their_numbers() -> None:
    assert mix(1, 23) != mix(12, 3)
    seed_everything(4, 5)
    first = random.random(), float(torch.rand(()))
    seed_everything(4, 5)
    assert (random.random(), float(torch.rand(()))) == first
