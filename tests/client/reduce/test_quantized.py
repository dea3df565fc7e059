"""Tests of sums in 8-bit numbers: the encoding, and whole groups that reduce by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.training import TIMEOUT, bits, lighthouse, make_manager, together
from torch.distributed import ReduceOp

from torchft_svc.client import Manager, ProcessGroupGloo
from torchft_svc.client.process_groups.operations import flat
from torchft_svc.client.reduce import collectives, quantized
from torchft_svc.client.reduce.operations import HEADER_LENGTH
from torchft_svc.client.reduce.quantized import (
    BLOCK,
    Quantization,
    chunk_length,
    decode_chunks,
    encode_chunks,
    encoded_bytes,
)
from torchft_svc.errors import ConfigError, TorchFTError

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


@pytest.fixture
def like_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the tensors of these tests, which are on the CPU, as those of a device."""
    monkeypatch.setattr(collectives, "_CPU", torch.device("meta"))


FORMATS: list[tuple[bool | str, bool | str]] = [
    ("int8", "float8"),
    ("float8", "int8"),
    ("int8", False),
    (False, "float8"),
]


@pytest.mark.usefixtures("like_a_device")
@pytest.mark.parametrize("formats", FORMATS)
def test_on_devices_groups_with_other_formats_commit_nothing(
    address: str, formats: tuple[bool | str, bool | str]
) -> None:
    with managers(address, "ab") as made:
        tensors = [torch.linspace(-1.0, 1.0, 1000), torch.linspace(0.5, 3.0, 1000)]
        done = together(
            *(
                lambda m=m, t=t, f=f: reduce(m, [t], f, ReduceOp.AVG)
                for m, t, f in zip(made, tensors, formats, strict=True)
            )
        )
        assert done == [False, False]
        for manager, number_format in zip(made, formats, strict=True):
            if number_format:
                assert f"Here: number 1, {_named(number_format)}" in str(manager.errored())


@pytest.mark.usefixtures("like_a_device")
def test_on_devices_a_group_that_changes_its_format_commits_nothing(address: str) -> None:
    """The others wait for what they know of the step, and both sides end at the timeout."""
    with managers(address, "ab", timeout=timedelta(seconds=2)) as (a, b):

        def step(of_b: str) -> list[bool]:
            return together(
                lambda: reduce(a, [torch.linspace(-1.0, 1.0, 1000)], "int8", ReduceOp.AVG),
                lambda: reduce(b, [torch.linspace(0.5, 3.0, 1000)], of_b, ReduceOp.AVG),
            )

        assert [step("int8") for _ in range(3)] == [[True, True]] * 3
        assert step("float8") == [False, False]
        assert step("float8") == [False, False]
        for manager, number_format in ((a, "int8"), (b, "float8")):
            assert f"Here: number 1, {_named(number_format)}" in str(manager.errored())


def test_groups_with_another_block_size_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two versions of this package may differ so."""
    with lighthouse(min_replicas=1) as address, managers(address, "a") as (a,):
        assert reduce(a, [torch.ones(10)], "int8", ReduceOp.AVG)
        monkeypatch.setattr(quantized, "BLOCK", 2 * BLOCK)
        with managers(address, "b") as (b,), pytest.raises(TorchFTError) as refused:
            b.start_quorum()
    assert f"8-bit blocks of {BLOCK} in" in str(refused.value)
    assert f"8-bit blocks of {2 * BLOCK} in" in str(refused.value)


class CountedGloo(ProcessGroupGloo):
    """Gloo that keeps the names of its collectives, and how many bytes each sends."""

    def __init__(self) -> None:
        super().__init__(TIMEOUT)
        self.sent: list[tuple[str, int]] = []

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        source = args[0] if name == "allreduce" else args[1]
        self.sent.append((name, sum(each.nbytes for each in flat(source))))
        return super()._launch(name, args, kwargs)


@pytest.mark.usefixtures("like_a_device")
def test_on_devices_only_the_first_step_of_a_quorum_compares(address: str) -> None:
    pgs = CountedGloo(), CountedGloo()
    made = together(
        *(
            lambda name=name, pg=pg: make_manager(
                address,
                name,
                pg=pg,
                use_async_quorum=False,
                load_state_dict=lambda state: None,
                state_dict=dict,
            )
            for name, pg in zip("ab", pgs, strict=True)
        )
    )
    numel, each_s = 1000, []
    for _ in range(3):
        together(*(lambda m=m: reduce(m, [torch.ones(numel)], "int8", ReduceOp.AVG) for m in made))
        each_s.append([pg.sent for pg in pgs])
        for pg in pgs:
            pg.sent = []
    for manager in made:
        manager.shutdown()
    row = encoded_bytes(chunk_length(numel, 2))
    steady = [("allreduce", 4), ("alltoall_base", 2 * row), ("allgather", row)]
    header = ("allgather", 8 * HEADER_LENGTH)
    assert each_s == [[[header, *steady, header]] * 2, [steady] * 2, [steady] * 2]


def _named(number_format: bool | str) -> str:
    return f"Manager.allreduce with should_quantize={number_format!r}"


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
