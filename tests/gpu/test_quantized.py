"""Tests that a device makes the same 8-bit numbers as the CPU, with and without Triton."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator

import pytest
import torch
from support.quantized_blocks import all_bit_patterns, assert_same_bits, cases, numbers, reduce

from torchft_svc.client.reduce import quantized
from torchft_svc.client.reduce.quantized import BLOCK, Quantization

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,  # Triton's compilers
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
LARGE = 3_000_001


@pytest.fixture(autouse=True)
def looked_up_again() -> Iterator[None]:
    quantized._fused.cache_clear()
    yield
    quantized._fused.cache_clear()


@pytest.fixture(params=[pytest.param("triton", marks=needs_triton), "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the device makes the numbers; without Triton it is hidden."""
    if request.param == "torch":
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    is_fused = quantized._fused(torch.device("cuda", 0), Quantization.INT8) is not None
    assert is_fused == (request.param == "triton")
    return str(request.param)


def assert_like_the_cpu(members: list[torch.Tensor], kind: Quantization) -> None:
    wanted = reduce(members, kind)
    assert_same_bits(reduce([each.cuda() for each in members], kind), wanted)


@pytest.mark.parametrize("kind", list(Quantization))
@pytest.mark.parametrize("num_members", [1, 2, 3])
def test_the_bits_are_those_of_the_cpu(way: str, kind: Quantization, num_members: int) -> None:
    for name, values in cases():
        try:
            assert_like_the_cpu([values.roll(7 * each) for each in range(num_members)], kind)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("kind", list(Quantization))
def test_many_numbers(way: str, kind: Quantization) -> None:
    assert_like_the_cpu([numbers(LARGE, seed) for seed in range(4)], kind)
    for seed in range(3):
        assert_like_the_cpu([all_bit_patterns(LARGE, seed)], kind)


@pytest.mark.parametrize("kind", list(Quantization))
def test_numbers_with_gaps_between_them(way: str, kind: Quantization) -> None:
    values = numbers(6 * BLOCK)
    wanted = quantized.encode_chunks(values[::2], 2, kind)
    assert torch.equal(quantized.encode_chunks(values.cuda()[::2], 2, kind).cpu(), wanted)


@needs_triton
def test_without_a_compiler_torch_makes_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torchft_svc.client.reduce import triton_blocks

    def fail(*_: object) -> None:
        raise RuntimeError("there is no C compiler")

    monkeypatch.setattr(triton_blocks, "check", fail)
    with caplog.at_level(logging.WARNING):
        assert_like_the_cpu([numbers(5 * BLOCK + 1)], Quantization.INT8)
    assert "there is no C compiler" in caplog.text


@needs_triton
def test_without_a_part_of_triton_torch_makes_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torchft_svc.client.reduce

    name = "torchft_svc.client.reduce.triton_blocks"
    monkeypatch.delattr(torchft_svc.client.reduce, "triton_blocks", raising=False)
    monkeypatch.setitem(sys.modules, name, None)  # its import fails
    with caplog.at_level(logging.WARNING):
        assert_like_the_cpu([numbers(5 * BLOCK + 1)], Quantization.INT8)
    assert "ImportError" in caplog.text or "ModuleNotFoundError" in caplog.text


@needs_triton
def test_another_stream_is_used(way: str) -> None:
    """Kernels run on the stream of the caller, behind what fills their tensors."""
    wanted = reduce([numbers(LARGE)], Quantization.INT8)
    matrix = torch.randn(4096, 4096, device="cuda")
    source = numbers(LARGE).cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        values = torch.zeros(LARGE, device="cuda")
        for _ in range(20):  # keeps the stream behind the CPU
            matrix = matrix @ matrix * 1e-3
        values.copy_(source)
        found = reduce([values], Quantization.INT8)
        stream.synchronize()
    assert_same_bits(found, wanted)
