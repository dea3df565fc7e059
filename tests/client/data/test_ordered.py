"""Tests that sums in the order of the microbatches have the same bits, whatever else is trained."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.reading import BATCH, SIZE, AveragingGroup, Numbers, ReadingGroup, reading_groups
from support.training import bits, lighthouse, make_manager, together
from torch import nn
from torch.utils.data import DataLoader

from tools.chaos.samples import SampleLedger
from torchft_svc.client import DistributedDataParallel
from torchft_svc.client.data import ElasticDataLoader, ElasticSampler, EpochPosition
from torchft_svc.errors import ConfigError, RequestRefused

ORDERED: dict[str, Any] = {"microbatch_size": 3, "ordered_sums": True}
NUM_STEPS = 4


def test_the_bits_are_the_same_whichever_groups_train() -> None:
    """Fewer microbatches than groups, and short steps, change nothing."""
    options = {**ORDERED, "global_batch_size": 9}
    until = 2 * -(-SIZE // 9)
    with lighthouse() as address, ReadingGroup(address, "a", **options) as alone:
        expected = alone.until(until).weights()
    ledger = SampleLedger(SIZE, 9)
    with lighthouse(1) as address, reading_groups(address, "abcd", ledger, **options) as groups:
        *others, lost = groups
        together(*(lambda group=group: group.meets(4) for group in groups))

        def leave() -> None:
            lost.next_batch()
            lost.manager.shutdown()

        together(leave, *(lambda group=group: group.until(until) for group in others))
        assert ledger.faults() == []
        for each in others:
            assert torch.equal(each.weights(), expected)


@pytest.mark.parametrize("number_format", ["int8", "float8"])
def test_ordered_sums_beside_averages_in_8_bit_numbers(number_format: str) -> None:
    """What is summed in order keeps its bits; all groups that are left have equal ones."""
    options = {**ORDERED, "global_batch_size": 9}
    until = 2 * -(-SIZE // 9)
    with lighthouse() as address, ReadingGroup(address, "a", **options) as alone:
        expected = alone.until(until).weights()
    ledger = SampleLedger(SIZE, 9)
    averages = {"when": "after", "number_format": number_format, **options}
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(lighthouse(1))
        groups = [
            stack.enter_context(AveragingGroup(address, name, ledger, **averages)) for name in "abc"
        ]
        *others, lost = groups
        together(*(lambda group=group: group.meets(3) for group in groups))

        def leave() -> None:
            lost.next_batch()
            lost.manager.shutdown()

        together(leave, *(lambda group=group: group.until(until) for group in others))
        assert ledger.faults() == []
        assert bits(others[0].state()) == bits(others[1].state())
        assert torch.equal(others[0].weights(), expected)


def train_plainly(model: nn.Module, num_epochs: int) -> torch.Tensor:
    """The weights after a loop without this package, over the same order of the samples."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = ElasticSampler(Numbers(), seed=5)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for features, targets, _ in DataLoader(Numbers(), BATCH, sampler=sampler):
            sgd.zero_grad()
            for part, wanted in zip(features.split(3), targets.split(3), strict=True):
                loss = (model(part) - wanted).square().mean()
                torch.autograd.backward(loss * (len(part) / len(features)))
            sgd.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_the_bits_are_those_of_a_plain_loop() -> None:
    with lighthouse(3) as address, reading_groups(address, "abc", **ORDERED) as groups:
        expected = train_plainly(copy.deepcopy(groups[0].model), 2)
        together(*(lambda group=group: group.until(2 * -(-SIZE // BATCH)) for group in groups))
        for each in groups:
            assert torch.equal(each.weights(), expected)


# -- several loaders, models and passes in a step --------------------------------------------------


class Other:
    """A second loader of a group, and a second model, which its optimizer updates, too."""

    def __init__(self, group: ReadingGroup, **options: Any) -> None:
        data = Numbers()
        torchs = DataLoader(data, sampler=ElasticSampler(data, seed=9))
        self.loader = ElasticDataLoader(
            group.manager, torchs, global_batch_size=8, name="other", **options
        )
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        group.inner.add_param_group({"params": list(module.parameters())})
        self.model = DistributedDataParallel(group.manager, module)


def read_step(loader: Any) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of one step of a loader."""
    while True:
        features, targets, _ = next(iter(loader))
        yield features, targets
        if loader.ends_step:
            return


def passes(loader: Any, model: nn.Module, accumulated: Iterable[nn.Module] = ()) -> None:
    """The passes of one step of ``loader``."""
    for features, targets in read_step(loader):
        with loader.accumulate(*(accumulated or (model,))):
            torch.autograd.backward((model(features) - targets).square().mean() * loader.weight)


def one_after_the_other(group: ReadingGroup, other: Other) -> None:
    passes(group.loader, group.parallel)
    passes(other.loader, group.parallel)


def in_turns(group: ReadingGroup, other: Other) -> None:
    """Both have four microbatches."""
    pass_over_both(group, other, read_step)


def pass_over_both(
    group: ReadingGroup, other: Other, read: Callable[[Any], Iterable[Any]] = iter
) -> None:
    """A pass for each batch of both loaders, until one of them has no more."""
    loaders = group.loader, other.loader
    for batches in zip(*map(read, loaders), strict=False):
        for loader, (features, targets, *_) in zip(loaders, batches, strict=True):
            with loader.accumulate(group.parallel):
                loss = (group.parallel(features) - targets).square().mean()
                torch.autograd.backward(loss * loader.weight)


def two_models_in_a_pass(group: ReadingGroup, other: Other) -> None:
    for features, targets in read_step(group.loader):
        with group.loader.accumulate(group.parallel, other.model):
            error = group.parallel(features) - targets
            error = error.square() + (other.model(features) - targets).square()
            torch.autograd.backward(error.mean() * group.loader.weight)


def a_pass_for_each_model(group: ReadingGroup, other: Other) -> None:
    for features, targets in read_step(group.loader):
        for model in (group.parallel, other.model):
            with group.loader.accumulate(model):
                loss = (model(features) - targets).square().mean() * group.loader.weight
                torch.autograd.backward(loss)


def a_model_that_is_named_twice(group: ReadingGroup, other: Other) -> None:
    passes(group.loader, group.parallel, (group.parallel, group.parallel))


KINDS = [
    one_after_the_other,
    in_turns,
    two_models_in_a_pass,
    a_pass_for_each_model,
    a_model_that_is_named_twice,
]


def trained(
    names: str, make_passes: Callable[[ReadingGroup, Other], None], **options: Any
) -> list[torch.Tensor]:
    """The weights of both models of each group after some steps."""

    def train(group: ReadingGroup, other: Other) -> torch.Tensor:
        for _ in range(NUM_STEPS):
            group.optimizer.zero_grad()
            make_passes(group, other)
            assert group.optimizer.step()
        return torch.cat([group.weights(), *(each.flatten() for each in other.model.parameters())])

    with lighthouse(len(names)) as address, reading_groups(address, names, **options) as groups:
        others = [
            Other(group, **(options and {**options, "microbatch_size": 2})) for group in groups
        ]
        return together(
            *(
                lambda group=group, other=other: train(group, other)
                for group, other in zip(groups, others, strict=True)
            )
        )


@pytest.mark.parametrize("make_passes", KINDS)
def test_other_loaders_and_models_change_no_bit(
    make_passes: Callable[[ReadingGroup, Other], None],
) -> None:
    [expected] = trained("a", make_passes)
    [alone] = trained("a", make_passes, **ORDERED)
    torch.testing.assert_close(alone, expected, rtol=1e-12, atol=1e-14)
    for each in trained("abc", make_passes, **ORDERED):
        assert torch.equal(each, alone)


# -- wrong uses ------------------------------------------------------------------------------------


def test_loaders_of_unequal_steps_are_not_read_in_turns() -> None:
    """One loader has a microbatch in the last step of its epoch, the other one has four."""
    with lighthouse() as address, ReadingGroup(address, "a", **ORDERED) as group:
        other = Other(group, **{**ORDERED, "microbatch_size": 2})
        for _ in range(SIZE // BATCH):
            group.optimizer.zero_grad()
            in_turns(group, other)
            assert group.optimizer.step()
        group.optimizer.zero_grad()
        with pytest.raises(RequestRefused, match=r"loader 'other' has some.*equal numbers"):
            pass_over_both(group, other)


def test_sums_are_made_in_accumulate_only() -> None:
    options = {"microbatch_size": 6, "ordered_sums": True}
    with lighthouse() as address, ReadingGroup(address, "a", **options) as group:
        for features, targets in read_step(group.loader):
            (group.parallel(features) - targets).square().mean().backward()
        assert not group.optimizer.step()
        assert "inside of loader.accumulate(model)" in str(group.manager.errored())
        assert group.step()


def test_passes_that_have_no_place_in_the_order_are_refused() -> None:
    with lighthouse() as address, ReadingGroup(address, "a", **ORDERED) as group:
        loader, model = group.loader, group.parallel
        other = DistributedDataParallel(group.manager, nn.Linear(1, 1))

        def backward(features: torch.Tensor, targets: torch.Tensor) -> None:
            (model(features) - targets).square().mean().backward()

        with pytest.raises(RequestRefused, match="no batch was read"), loader.accumulate(model):
            pass
        batch = next(iter(read_step(loader)))
        with model.no_sync():
            backward(*batch)
        with pytest.raises(RequestRefused, match="no sums of this step"), loader.accumulate(model):
            pass
        group.optimizer.zero_grad(set_to_none=False)
        with loader.accumulate(model):
            backward(*batch)
        with pytest.raises(RequestRefused, match="make one pass"), loader.accumulate(model):
            pass
        for batch in read_step(loader):
            with loader.accumulate(group.parallel, other):
                backward(*batch)
        assert not group.optimizer.step()
        assert "of the same models for each batch" in str(group.manager.errored())
        assert loader.position == EpochPosition(0, 0)
        assert group.step()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "microbatch_size=None"),
        ({"microbatch_size": 2, "recover_within_step": True}, "without recover_within_step"),
    ],
)
def test_ordered_sums_that_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with (
        lighthouse() as address,
        make_manager(address, "a") as manager,
        pytest.raises(ConfigError, match=sentence),
    ):
        ElasticDataLoader(
            manager, DataLoader(Numbers()), global_batch_size=8, ordered_sums=True, **options
        )
