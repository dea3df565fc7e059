"""Tests that a wait for a sum on a device is counted from the end of the worker's own kernels."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from torchft_svc.client.reduce.wait_times import WaitTimes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The lengths of the worker's own kernels, and of a sum that begins beside them.
OWN_S, SUM_S = 0.05, 0.25


@pytest.fixture(scope="module")
def sleep() -> Callable[[float], None]:
    """Keeps the current stream busy for so many seconds."""
    torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    began_at = time.monotonic()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    cycles_per_s = 100_000_000 / (time.monotonic() - began_at)
    return lambda seconds: torch.cuda._sleep(int(seconds * cycles_per_s))


def wait_for_sum(times: WaitTimes, sleep: Callable[[float], None], sum_s: float) -> float:
    """Wait on the host, as for NCCL; returns for how long."""
    tensor, stream = torch.zeros(1, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sleep(sum_s)
        over = torch.cuda.Event()
        over.record()
    sleep(OWN_S)
    since = time.monotonic()
    began = times.begin_wait(tensor)
    over.synchronize()
    times.end_wait(tensor, began)
    waited_s = time.monotonic() - since
    torch.cuda.current_stream().synchronize()
    return waited_s


def test_only_the_wait_after_the_own_kernels_counts(sleep: Callable[[float], None]) -> None:
    times = WaitTimes()
    on_host_s = wait_for_sum(times, sleep, SUM_S)
    counted_s = times.pop_seconds()
    assert on_host_s == pytest.approx(SUM_S, abs=0.03)
    assert counted_s == pytest.approx(SUM_S - OWN_S, abs=0.03)
    assert times.pop_seconds() == 0.0, "each wait counts once"


def test_a_sum_that_ends_before_the_own_kernels_is_no_wait(sleep: Callable[[float], None]) -> None:
    times = WaitTimes()
    wait_for_sum(times, sleep, OWN_S / 5)
    assert times.pop_seconds() == pytest.approx(0.0, abs=0.01)


def test_what_the_device_has_not_reached_counts_later(sleep: Callable[[float], None]) -> None:
    times, tensor = WaitTimes(), torch.zeros(1, device="cuda")
    sleep(OWN_S)
    times.end_wait(tensor, times.begin_wait(tensor))
    assert times.pop_seconds() == 0.0
    assert len(times._on_device) == 1
    torch.cuda.synchronize()
    assert times.pop_seconds() == pytest.approx(0.0, abs=0.01)
    assert not times._on_device


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_waits_on_all_devices_count(sleep: Callable[[float], None]) -> None:
    times = WaitTimes()
    for index in range(2):
        with torch.cuda.device(index):
            wait_for_sum(times, sleep, SUM_S)
    assert times.pop_seconds() == pytest.approx(2 * (SUM_S - OWN_S), abs=0.06)


def test_the_measurement_costs_microseconds(sleep: Callable[[float], None]) -> None:
    times, tensor = WaitTimes(), torch.zeros(1, device="cuda")
    for _ in range(1000):
        times.end_wait(tensor, times.begin_wait(tensor))
    torch.cuda.synchronize()
    times.pop_seconds()
    began_at = time.monotonic()
    for _ in range(1000):
        times.end_wait(tensor, times.begin_wait(tensor))
    cost_us = (time.monotonic() - began_at) * 1000
    torch.cuda.synchronize()
    times.pop_seconds()
    print(f"{cost_us:.1f} us for each wait")
    assert cost_us < 100
