"""Tests that the values of a model on a device are compared there, without large copies."""

from __future__ import annotations

import pytest
import torch

from torchft_svc.client.step.fingerprint import digest_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str
)
def test_values_on_a_device_are_compared(dtype: torch.dtype) -> None:
    values = torch.arange(3_000_001, device="cuda").to(dtype)
    other = values.clone()
    other.view(torch.uint8)[-1] ^= 1
    same, changed = digest_values([values, values.clone()]), digest_values([other])
    assert same[0] == same[1] != changed[0]


def test_a_large_tensor_needs_little_more_memory() -> None:
    values = torch.zeros(256 << 20, dtype=torch.bfloat16, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    digest_values([values])
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
