"""Tests of sums in 8-bit numbers: the encoding, and whole groups that reduce by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.training import bits, lighthouse, make_manager, together
from torch.distributed import ReduceOp

from torchft_svc.client import Manager
from torchft_svc.client.reduce import collectives
from torchft_svc.client.reduce.quantized import (
    BLOCK,
    Quantization,
    decode_chunks,
    encode_chunks,
    encoded_bytes,
)
from torchft_svc.errors import ConfigError

BOTH = list(Quantization)


def round_trip(values: torch.Tensor, kind: Quantization) -> torch.Tensor:
    """Return what a member that receives ``values`` decodes, as float32 of the same shape."""
    found = torch.empty(values.shape)
    decode_chunks(encode_chunks(values, 1, kind), found, kind)
    return found


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().mean() / wanted.abs().mean()).item()


@pytest.mark.parametrize(
    ("kind", "limit"), [(Quantization.INT8, 0.01), (Quantization.FLOAT8, 0.05)]
)
@pytest.mark.parametrize("shape", [(1,), (255,), (3, 5, 7), (100_003,), (2, 3, 4, 50)])
def test_the_error_of_normal_numbers(
    kind: Quantization, limit: float, shape: tuple[int, ...]
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = round_trip(values, kind)
    assert found.shape == values.shape
    assert relative_error(found, values) <= limit


@pytest.mark.parametrize("kind", BOTH)
def test_numbers_are_rounded_to_the_nearest(kind: Quantization) -> None:
    """Truncation would make the mean of many numbers smaller."""
    values = torch.rand(1 << 20, generator=torch.Generator().manual_seed(1))
    bias = (round_trip(values, kind) - values).mean().item()
    assert abs(bias) < 1e-4
    exact = torch.arange(-127.0, 128.0)
    if kind is Quantization.INT8:
        assert torch.equal(round_trip(exact, kind), exact)


@pytest.mark.parametrize("kind", BOTH)
def test_extreme_numbers(kind: Quantization) -> None:
    zeros = torch.zeros(300)
    assert torch.equal(round_trip(zeros, kind), zeros)
    large = torch.full((300,), 3e38)
    assert torch.allclose(round_trip(large, kind), large)
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(2 * BLOCK)
        values[3] = bad
        found = round_trip(values, kind)
        assert not found[:BLOCK].isfinite().all()
        assert torch.equal(found[BLOCK:], values[BLOCK:]), "only its block is lost"


@pytest.mark.parametrize("kind", BOTH)
def test_tiny_numbers_stay_finite(kind: Quantization) -> None:
    values = torch.zeros(BLOCK + 1)
    values[7] = 1e-37
    assert round_trip(values, kind).isfinite().all()


def test_a_quarter_of_the_bytes_travels() -> None:
    assert encoded_bytes(64 * BLOCK) == 64 * (BLOCK + 4)


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as address:
        yield address


@contextlib.contextmanager
def managers(address: str, names: str, **options: Any) -> Iterator[list[Manager]]:
    settings = {
        "use_async_quorum": False,
        "load_state_dict": lambda state: None,
        "state_dict": dict,
        **options,
    }
    made = together(*(lambda name=name: make_manager(address, name, **settings) for name in names))
    try:
        yield made
    finally:
        for each in made:
            each.shutdown()


def reduce(manager: Manager, tensors: list[torch.Tensor], kind: bool | str, op: Any) -> bool:
    manager.start_quorum()
    works = [manager.allreduce(each, kind, op) for each in tensors]
    for work in works:
        work.wait()
    return manager.should_commit()


@pytest.mark.parametrize("kind", [True, "int8", "float8"])
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.SUM])
def test_three_groups_get_the_same_bits(
    address: str, kind: bool | str, op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "SEGMENT", 30_000)  # the largest tensor has four
    with managers(address, "abc") as made:
        generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
        shapes = [(7,), (1000, 3), (2, 3, 4, 5), (100_000,), (0,)]
        for _ in range(3):
            parts = [[torch.randn(s, generator=each) for s in shapes] for each in generators]
            parts[0][1] = parts[0][1].bfloat16()
            parts[1][1] = parts[1][1].bfloat16()
            parts[2][1] = parts[2][1].bfloat16()
            for part in parts:
                part[2] = part[2].transpose(1, 3)
            exact = [sum(part[i].float() for part in parts) for i in range(len(shapes))]
            done = together(
                *(lambda m=m, p=p: reduce(m, p, kind, op) for m, p in zip(made, parts, strict=True))
            )
            if not all(done):  # they were not all there yet
                continue
            quorum = made[0].last_quorum()
            if quorum is None or quorum.replica_world_size < 3:
                continue
            assert bits(parts[0]) == bits(parts[1]) == bits(parts[2])
            for found, total in zip(parts[0][:-1], exact[:-1], strict=True):
                wanted = total / 3 if op == ReduceOp.AVG else total
                assert relative_error(found.float(), wanted) < 0.06
            return
        raise AssertionError("the three groups never met")


def test_groups_that_differ_in_the_setting_commit_nothing(address: str) -> None:
    with managers(address, "ab") as (a, b):
        tensors = torch.ones(10), torch.ones(10)
        done = together(
            lambda: reduce(a, [tensors[0]], True, ReduceOp.AVG),
            lambda: reduce(b, [tensors[1]], False, ReduceOp.AVG),
        )
        assert done == [False, False]
        assert "should_quantize='int8'" in str(a.errored())


@pytest.mark.parametrize(
    ("tensor", "kind", "op", "words"),
    [
        (torch.ones(2, dtype=torch.int64), True, ReduceOp.SUM, "only floating-point numbers"),
        (torch.ones(2, dtype=torch.float64), True, ReduceOp.AVG, "made in float32"),
        (torch.ones(2), True, ReduceOp.MAX, "sums and averages"),
        (torch.ones(2), "int4", ReduceOp.AVG, "'int8', 'float8'"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    address: str, tensor: torch.Tensor, kind: bool | str, op: Any, words: str
) -> None:
    with managers(address, "a") as (a,), pytest.raises(ConfigError, match=words):
        a.allreduce(tensor, kind, op)
