"""Tests what a fingerprint consists of, and that it reads all kinds of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from torchft_svc.client.reduce.reduction import CurrentParameter
from torchft_svc.client.step.fingerprint import (
    _BLOCK,
    Fingerprint,
    _factors,
    _sum_with_factors,
    digest_values,
    show_setting,
    take_fingerprint,
)
from torchft_svc.core.quorum.worker.state_check import Part, find_item


class Wrapper:
    """A reducer of ``model``, whose parameters it knows by identity."""

    layout = ""
    names: Sequence[str] = ()
    has_averaged = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = list(model.parameters())

    def begin_step(self) -> None:
        return None

    def settle_step(self) -> None:
        return None

    def average_of(self, parameter: torch.Tensor) -> None:
        return None

    def walk_parameters(self) -> list[CurrentParameter]:
        known = {id(each) for each in self.parameters}
        named = self.model.named_parameters()
        return [CurrentParameter(name, each, id(each) in known) for name, each in named]


def made(**settings: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = [{"params": layer.parameters()} for layer in model]
    return model, torch.optim.AdamW(groups, **{"lr": 0.1, **settings})


def differing(one: Fingerprint, other: Fingerprint) -> list[Part]:
    pairs = zip(one.row(0).digests, other.row(0).digests, strict=True)
    return [Part(index) for index, (ours, theirs) in enumerate(pairs) if ours != theirs]


def of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Fingerprint:
    return take_fingerprint([Wrapper(model)], optimizers)


def test_equal_states_have_equal_fingerprints() -> None:
    one, other = of(*made()), of(*made())
    assert differing(one, other) == []
    assert one.row(3).since == 3
    assert one.row(0).num_items == (4, 4, 2, len(one.items[Part.SETTINGS]), 4)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("lr", 0.2, "the learning rate of optimizer 0 (AdamW), group 0"),
        ("lr", torch.tensor(0.2), "the learning rate of optimizer 0 (AdamW), group 0"),
        ("betas", (0.9, 0.9), "'betas[1]' of optimizer 0 (AdamW), group 0"),
        ("maximize", True, "'maximize' of optimizer 0 (AdamW), group 0"),
        ("weight_decay", 0, "'weight_decay' of optimizer 0 (AdamW), group 0"),
    ],
)
def test_a_setting_is_compared(name: str, value: Any, shown: str) -> None:
    one, other = of(*made()), of(*made(**{name: value}))
    assert differing(one, other) == [Part.SETTINGS]
    ours, theirs = one.items[Part.SETTINGS], other.items[Part.SETTINGS]
    first = next(
        key for (key, number), their in zip(ours, theirs, strict=True) if number != their[1]
    )
    assert one.name(Part.SETTINGS, first) == shown


def test_how_an_update_is_computed_is_not_compared() -> None:
    assert differing(of(*made(foreach=True)), of(*made(foreach=False))) == []
    assert differing(of(*made(lr=torch.tensor(0.1, dtype=torch.float64))), of(*made())) == []


def test_parameters_of_optimizers_are_compared_by_identity_and_order() -> None:
    model, optimizer = made()
    before = of(model, optimizer)
    parameters = optimizer.param_groups[1]["params"]
    parameters.reverse()
    assert differing(before, of(model, optimizer)) == [Part.OPTIMIZERS]
    parameters.reverse()
    parameters[0] = parameters[0].detach().clone().requires_grad_()
    assert differing(before, of(model, optimizer)) == [Part.OPTIMIZERS]


def test_a_replaced_parameter_is_marked() -> None:
    model, optimizer = made()
    wrapper = Wrapper(model)
    before = take_fingerprint([wrapper], [optimizer])
    model[1].bias = nn.Parameter(model[1].bias.detach().clone())
    after = take_fingerprint([wrapper], [optimizer])
    assert differing(before, after) == [Part.OBJECTS, Part.OPTIMIZERS]
    assert [number for _, number in after.items[Part.OBJECTS]] == [1, 1, 1, 0]


def test_names_and_order_are_compared() -> None:
    model, optimizer = made()
    torch.manual_seed(0)
    renamed = nn.Sequential()
    for name in "xy":
        renamed.add_module(name, nn.Linear(3, 3))
    assert Part.LAYOUT in differing(of(model, optimizer), of(renamed, optimizer))


def test_an_optimizer_that_another_one_has_replaced_is_left_out() -> None:
    """A program may make another one; a group that joins then has only that."""
    model, first = made(lr=0.5)
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    assert differing(of(model, first, second), of(model, second)) == []
    part = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    assert Part.OPTIMIZERS in differing(of(model, first), of(model, part, first, part))


def test_parameters_of_two_wrappers_may_have_one_name() -> None:
    model, optimizer = made()
    wrappers = [Wrapper(layer) for layer in model]
    before = take_fingerprint(wrappers, [optimizer])
    with torch.no_grad():
        model[1].bias[1] += 1
    after = take_fingerprint(wrappers, [optimizer])
    item = find_item(before.items[Part.VALUES], after.items[Part.VALUES])
    assert item is not None
    assert before.name(Part.VALUES, item.name) == "parameter 'bias' of wrapper 1"


def test_without_a_known_model_the_optimizers_have_the_parameters() -> None:
    """The registered optimizers name the parameters where torch's own wrapper is used."""
    model, optimizer = made()
    before = take_fingerprint([], [optimizer])
    assert before.row(0).num_items[Part.VALUES] == 4
    with torch.no_grad():
        model[1].weight[2, 1] += 1
    assert differing(before, take_fingerprint([], [optimizer])) == [Part.VALUES]


def test_a_setting_is_shown_with_as_many_digits_as_it_needs() -> None:
    numbers = dict(zip("ab", (0.1, 0.1 + 1e-12), strict=True))
    shown = []
    for value in numbers.values():
        _, optimizer = made(lr=value)
        found = take_fingerprint([], [optimizer])
        names = found.names[Part.SETTINGS]
        index = names.index("the learning rate of optimizer 0 (AdamW), group 0")
        shown.append(show_setting(found.items[Part.SETTINGS][index][1]))
    assert shown == ["0.1", "0.10000000000100001"]


# -- values ----------------------------------------------------------------------------------------

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_each_type_are_read(dtype: torch.dtype) -> None:
    values = torch.arange(1, 8).to(torch.float32).to(dtype)
    other = values.clone()
    other.view(torch.uint8)[3] ^= 1
    same, changed = digest_values([values, values.clone()]), digest_values([other])
    assert same[0] == same[1] != changed[0]


def test_values_do_not_depend_on_where_they_lie() -> None:
    values = torch.randn(6, 8)
    turned = values.t().contiguous().t()
    assert not turned.is_contiguous()
    sliced = torch.cat([values, values], dim=1)[:, :8]
    assert len(set(digest_values([values, turned, sliced, nn.Parameter(values)]))) == 1
    assert digest_values([values])[0] != digest_values([values.t()])[0]


def test_all_bits_count() -> None:
    zeros = torch.zeros(2)
    nans = torch.tensor([float("nan"), 0.0])
    digests = digest_values([zeros, -zeros, nans, nans.clone()])
    assert digests[0] != digests[1]
    assert digests[2] == digests[3]


def test_tensors_without_memory_are_equal() -> None:
    meta = torch.empty(3, device="meta")
    assert digest_values([torch.empty(0), torch.empty(2, 0), meta]) == [0, 0, 0]
    assert digest_values([torch.tensor(1.5)])[0] != digest_values([torch.tensor(2.5)])[0]


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_values_are_read(layout: str) -> None:
    def made(value: float) -> torch.Tensor:
        dense = torch.tensor([[0.0, value], [1.0, 0.0]])
        return dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()

    assert digest_values([made(2.0)]) == digest_values([made(2.0)])
    assert digest_values([made(2.0)]) != digest_values([made(3.0)])


@pytest.mark.parametrize("numel", [1, 7, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK + 5])
def test_a_sum_with_factors_finds_changed_and_exchanged_words(numel: int) -> None:
    """What other devices than CPUs do."""
    torch.manual_seed(1)
    words = torch.randint(-(2**31), 2**31 - 1, (numel,), dtype=torch.int32)
    factors = _factors(torch.device("cpu"))
    before = int(_sum_with_factors(words, factors))
    assert int(_sum_with_factors(words.clone(), factors)) == before
    for place in {0, numel // 2, numel - 1}:
        changed = words.clone()
        changed[place] ^= 1 << 7
        assert int(_sum_with_factors(changed, factors)) != before
    if numel > 1:
        exchanged = words.clone()
        exchanged[0], exchanged[-1] = words[-1], words[0]
        assert int(_sum_with_factors(exchanged, factors)) != before
    if numel > _BLOCK + 1:  # the same place of two blocks
        exchanged = words.clone()
        exchanged[0], exchanged[_BLOCK] = words[_BLOCK], words[0]
        assert int(_sum_with_factors(exchanged, factors)) != before
