"""Tests, in Triton's interpreter, that the kernels for devices make the same bits as torch.

With a device tests/gpu/test_quantized.py runs the kernels themselves.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import pytest
import torch
from support.quantized_blocks import assert_same_bits, cases, reduce

from torchft_svc.client.reduce import quantized
from torchft_svc.client.reduce.quantized import Quantization

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    from torchft_svc.client.reduce import triton_blocks

    return triton_blocks


@pytest.mark.parametrize("kind", list(Quantization))
@pytest.mark.parametrize("num_members", [1, 2, 3])
@pytest.mark.parametrize(("name", "values"), list(cases()), ids=lambda each: str(each)[:40])
def test_the_bits_are_those_of_torch(
    interpreted: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    values: torch.Tensor,
    kind: Quantization,
    num_members: int,
) -> None:
    members = [values.roll(7 * number) for number in range(num_members)]
    wanted = reduce(members, kind)
    monkeypatch.setattr(quantized, "_fused", lambda device, kind: interpreted)
    assert_same_bits(reduce(members, kind), wanted)
