"""Tests that what rounding leaves out of 8-bit averages comes with later ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.training import bits, lighthouse, make_manager, together
from torch import nn

from torchft_svc.client import Manager
from torchft_svc.client.algorithms import DiLoCo
from torchft_svc.client.algorithms.agreed_weights import BucketedAverage, Rounding
from torchft_svc.client.reduce.quantized import BLOCK, Quantization
from torchft_svc.errors import ConfigError

ROUNDS = 12
SHAPES = ((3, 500), (700,), (1,))


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as address:
        yield address


@pytest.fixture
def pair(address: str) -> Iterator[list[Manager]]:
    options = {
        "use_async_quorum": False,
        "state_dict": dict,
        "load_state_dict": lambda _: None,
    }
    made = together(*(lambda name=name: make_manager(address, name, **options) for name in "ab"))
    try:
        yield made
    finally:
        for manager in made:
            manager.shutdown()


class Member:
    """A group that averages the same tensors again and again, and adds up the averages."""

    def __init__(self, manager: Manager, seed: int, kind: Quantization, *, feeds_back: bool):
        generator = torch.Generator().manual_seed(seed)
        self.manager = manager
        self.values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.totals = [torch.zeros(shape) for shape in SHAPES]
        self.averaging = BucketedAverage(
            manager,
            self.values,
            0.004,  # one part for each large tensor
            rounding=Rounding(kind, error_feedback=feeds_back),
        )

    def average(self, *, applies: bool = True) -> None:
        self.manager.start_quorum()
        self.averaging.launch(lambda index, out: out.copy_(self.values[index]))
        self.averaging.wait()
        if not applies:
            self.manager.report_error(RuntimeError("this synchronization is refused on purpose"))
        if self.manager.should_commit():
            for total, average in zip(self.totals, self.averaging.pop_averages(), strict=True):
                total.add_(average)
        else:
            self.averaging.drop_averages()

    def errors(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.averaging._errors]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


def run(
    pair: list[Manager], kind: Quantization, *, feeds_back: bool, refused: int | None = None
) -> tuple[list[Member], torch.Tensor]:
    """Return the members after all rounds, and what their totals should be."""
    members = [Member(each, seed, kind, feeds_back=feeds_back) for seed, each in enumerate(pair)]
    for number in range(ROUNDS):
        before = [bits(each.errors()) for each in members]
        applies = number != refused
        together(*(functools.partial(each.average, applies=applies) for each in members))
        if number == refused:
            assert [bits(each.errors()) for each in members] == before
    num = sum(1 for number in range(ROUNDS) if number != refused)
    wanted = [num * (a + b) / 2 for a, b in zip(*(each.values for each in members), strict=True)]
    return members, flat(wanted)


@pytest.mark.parametrize("kind", list(Quantization))
@pytest.mark.parametrize("refused", [None, 5])
def test_nothing_is_lost(pair: list[Manager], kind: Quantization, refused: int | None) -> None:
    """What the averages lack is what both groups keep; also after one that was refused."""
    members, wanted = run(pair, kind, feeds_back=True, refused=refused)
    assert bits(members[0].totals) == bits(members[1].totals)
    total, kept = flat(members[0].totals), sum(flat(each.errors()) for each in members)
    assert isinstance(kept, torch.Tensor)
    assert kept.abs().max() > 1e-3, "something was rounded"
    assert (total + kept - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("kind", list(Quantization))
def test_the_error_of_many_averages_is_that_of_one(pair: list[Manager], kind: Quantization) -> None:
    errors = []
    for feeds_back in (True, False):
        members, wanted = run(pair, kind, feeds_back=feeds_back)
        errors.append((flat(members[0].totals) - wanted).abs().mean().item())
    assert errors[0] < errors[1] / 4


def test_the_same_run_gives_the_same_bits(pair: list[Manager]) -> None:
    runs = [run(pair, Quantization.INT8, feeds_back=True)[0] for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert bits([first.totals, first.errors()]) == bits([second.totals, second.errors()])


def test_a_group_that_is_left_alone_applies_its_errors() -> None:
    """Numbers that do not travel are not rounded, so nothing is left to make up for."""
    with lighthouse(min_replicas=1) as alone:
        manager = make_manager(
            alone, "a", use_async_quorum=False, state_dict=dict, load_state_dict=lambda _: None
        )
        try:
            member = Member(manager, 0, Quantization.INT8, feeds_back=True)
            for errors in member.averaging._errors:
                errors.fill_(0.5)
            member.average()
            assert torch.equal(flat(member.totals), flat(member.values) + 0.5)
            assert not flat(member.errors()).any()
        finally:
            manager.shutdown()


class Digits:
    """A group that learns half of the digits with DiLoCo."""

    def __init__(self, address: str, number: int, job: str, **options: Any) -> None:
        sklearn = pytest.importorskip("sklearn.datasets")
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        found = sklearn.load_digits()
        self.inputs = torch.tensor(found.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(found.target)
        self.mine = torch.arange(number, len(self.labels), 2)
        self.order = torch.Generator().manual_seed(number)
        self.manager = make_manager(
            address,
            f"{job}-{number}",
            job_id=job,
            use_async_quorum=False,
            state_dict=lambda: {"model": self.model.state_dict(), "inner": self.inner.state_dict()},
            load_state_dict=self.load,
        )
        self.algorithm = DiLoCo(
            self.manager, [self.model], self.inner, self.outer, sync_every=10, **options
        )

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])

    def train(self, num_syncs: int) -> None:
        with self.algorithm:
            while self.manager.current_step() < num_syncs:
                chosen = self.mine[torch.randint(len(self.mine), (64,), generator=self.order)]
                self.inner.zero_grad()
                loss = nn.functional.cross_entropy(
                    self.model(self.inputs[chosen]), self.labels[chosen]
                )
                loss.backward()
                self.inner.step()

    @torch.no_grad()
    def accuracy(self) -> float:
        return (self.model(self.inputs).argmax(1) == self.labels).float().mean().item()


def test_digits_are_learned_as_well_as_in_float32(address: str) -> None:
    found: dict[str, float] = {}
    for kind in ("float32", "int8", "float8"):
        options: dict[str, Any] = {}
        if kind != "float32":
            options = {"should_quantize": kind, "error_feedback": True}
        groups = [Digits(address, number, kind, **options) for number in range(2)]
        try:
            together(*(lambda each=each: each.train(25) for each in groups))
            assert bits(groups[0].model.state_dict()) == bits(groups[1].model.state_dict())
            found[kind] = groups[0].accuracy()
        finally:
            for each in groups:
                each.manager.shutdown()
    assert found["float32"] > 0.97
    for kind in ("int8", "float8"):
        assert abs(found[kind] - found["float32"]) <= 0.003, found


def test_a_group_that_heals_has_no_errors(address: str) -> None:
    """Those of the group that it heals from are added to that one's next average."""
    options: dict[str, Any] = {"should_quantize": True, "error_feedback": True}
    groups = [Digits(address, number, "heal", **options) for number in range(2)]
    try:
        together(*(lambda each=each: each.train(2) for each in groups))
        source, joiner = (each.algorithm._fragments[0] for each in groups)
        assert flat(joiner._averaging._errors).any()
        joiner.load_state_dict(source.state_dict())
        assert not flat(joiner._averaging._errors).any()
        assert flat(source._averaging._errors).any()
    finally:
        for each in groups:
            each.manager.shutdown()


def test_without_quantization_it_is_refused(address: str) -> None:
    manager = make_manager(address, "a", use_async_quorum=False)
    model = nn.Linear(2, BLOCK)
    inner, outer = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    try:
        with pytest.raises(ConfigError, match=r"error_feedback.*nothing is rounded"):
            DiLoCo(manager, [model], inner, outer, sync_every=2, error_feedback=True)
    finally:
        manager.shutdown()
