"""Tests the layout of gradients, which depends on the parameters only."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchft_svc.client.gradients.buckets import Bucket, plan_buckets
from torchft_svc.errors import ConfigError

MB = 1024 * 1024


def parameters(*sizes_kb: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(kb * 256, dtype=dtype)) for kb in sizes_kb]


def members(buckets: list[Bucket], of: list[nn.Parameter]) -> list[list[int]]:
    index = {id(parameter): i for i, parameter in enumerate(of)}
    return [[index[id(parameter)] for parameter in bucket.parameters] for bucket in buckets]


def test_reverse_order_with_a_small_first_bucket() -> None:
    of = parameters(512, 512, 512, 512, 512, 512, 512)
    assert members(plan_buckets(of, 1.5), of) == [[6, 5], [4, 3, 2], [1, 0]]


def test_a_large_parameter_is_not_split() -> None:
    of = parameters(100, 9000, 100)
    assert members(plan_buckets(of, 2), of) == [[2, 1], [0]]


def test_dtypes_do_not_mix() -> None:
    single, double = parameters(4, 4), parameters(4, 4, dtype=torch.float64)
    of = [single[0], double[0], single[1], double[1]]
    buckets = plan_buckets(of, 25)
    assert members(buckets, of) == [[3, 1], [2, 0]]
    assert [bucket.memory.dtype for bucket in buckets] == [torch.float64, torch.float32]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30), st.floats(0.001, 8))
def test_every_parameter_has_one_place(sizes: list[int], capacity: float) -> None:
    of = [nn.Parameter(torch.zeros(size)) for size in sizes]
    buckets = plan_buckets(of, capacity)
    assert [i for bucket in members(buckets, of) for i in bucket] == list(range(len(of)))[::-1]
    for bucket in buckets:
        num_more = 0 if bucket.wish is None else bucket.wish.numel()
        assert num_more == int(bucket is buckets[0])
        assert bucket.memory.numel() == sum(view.numel() for view in bucket.views) + num_more
        for number, view in enumerate(bucket.views):
            view.fill_(number)
        expected = [n for n, view in enumerate(bucket.views) for _ in range(view.numel())]
        assert bucket.memory.tolist() == [*expected, *[0.0] * num_more]


@pytest.mark.parametrize("capacity", [0, -1, float("nan")])
def test_a_capacity_that_cannot_work(capacity: float) -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        plan_buckets(parameters(1), capacity)


def test_views_keep_the_parameter_s_memory_layout() -> None:
    weight = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    bucket = Bucket([weight, nn.Parameter(torch.zeros(()))])
    assert bucket.views[0].stride() == weight.stride()
    assert bucket.views[1].shape == ()


def test_filling_scales_and_missing_gradients_are_zero() -> None:
    one, two = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    one.grad = torch.tensor([2.0, 4.0])
    bucket = Bucket([one, two])
    bucket.memory.fill_(9)
    bucket.fill(0.5)
    assert bucket.memory.tolist() == [1.0, 2.0, 0.0, 0.0]
    bucket.fill(0.0)
    assert bucket.memory.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_filling_gives_the_bits_of_a_product_with_the_number(dtype: torch.dtype) -> None:
    one = nn.Parameter(torch.zeros(1000, dtype=dtype))
    one.grad = torch.randn(1000, dtype=dtype)
    bucket = Bucket([one])
    for scale in (1 / 3, 1 / 7, 0.5, 1.0):
        bucket.fill(scale)
        assert torch.equal(bucket.views[0], one.grad * scale)


def test_a_gradient_that_lives_in_the_bucket_is_scaled_in_place() -> None:
    one = nn.Parameter(torch.zeros(2))
    bucket = Bucket([one])
    bucket.hand_out()
    assert one.grad is not None
    one.grad.fill_(8.0)
    bucket.fill(0.25)
    assert one.grad.tolist() == [2.0, 2.0]


def test_renewed_memory_is_not_the_old_one() -> None:
    one, two = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    bucket = Bucket([one, two])
    bucket.hand_out()
    two.grad = torch.tensor([3.0, 3.0])  # its own memory: it stays
    old = bucket.memory
    bucket.renew()
    old.fill_(7.0)  # what an abandoned operation may do
    assert one.grad is not None
    assert one.grad.tolist() == [0.0, 0.0]
    assert two.grad.tolist() == [3.0, 3.0]
    assert bucket.memory.data_ptr() != old.data_ptr()


def test_copies_leave_the_gradients_their_own_memory() -> None:
    one = nn.Parameter(torch.zeros(2))
    bucket = Bucket([one])
    bucket.memory.fill_(5.0)
    bucket.copy_out()
    bucket.memory.fill_(6.0)
    assert one.grad is not None
    assert one.grad.tolist() == [5.0, 5.0]


_FAULTS = """
import resource
import torch
from torch import nn
from torchft_svc.client.gradients.buckets import plan_buckets

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def of_a_pass():
    before = faults()
    gradients = [torch.ones(256 * 1024) for _ in range(8)]
    del gradients
    return faults() - before

buckets = plan_buckets([nn.Parameter(torch.zeros(256 * 1024)) for _ in range(8)], 4.0)
print(min(of_a_pass() for _ in range(10)))
"""


@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is how glibc works")
def test_memory_of_gradients_is_not_taken_from_the_system_again_in_each_pass() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FAULTS], capture_output=True, text=True, timeout=100, check=True
    )
    assert int(ran.stdout) < 200, "faults; there are 2048 pages"


@pytest.mark.parametrize("carries_wish", [False, True])
def test_gradients_of_a_model_that_was_converted_and_back_are_summed(carries_wish: bool) -> None:
    """A conversion gives the gradients, which are views of the memory, memory of their own."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    bucket = Bucket(list(model.parameters()), carries_wish=carries_wish)
    model(torch.ones(1, 2)).sum().backward()
    bucket.fill(1.0)
    bucket.hand_out()
    model.double().float()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(8.0)
    bucket.fill(0.5)
    num = sum(parameter.numel() for parameter in model.parameters())
    assert bucket.memory[:num].tolist() == [4.0] * num
    bucket.hand_out()
    bucket.memory.mul_(2.0)  # the sum of two groups
    assert all(bool((each.grad == 8.0).all()) for each in model.parameters())
    assert bucket.holds_gradients()
