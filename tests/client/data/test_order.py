"""Tests the order of an epoch: every sample once, computed from anywhere, never stored."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bounds import again_if_late

from torchft_svc.client.data import ElasticSampler
from torchft_svc.client.data.order import BLOCK, ShuffledOrder
from torchft_svc.errors import ConfigError

MANY = 50_000_000


@given(size=st.integers(1, 3 * BLOCK), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_an_order_has_every_sample_once(size: int, seed: int, epoch: int) -> None:
    order = ShuffledOrder(size, seed, epoch).indices(0, size)
    assert sorted(order) == list(range(size))


@given(
    size=st.integers(1, 3 * BLOCK),
    begin=st.integers(0, 3 * BLOCK),
    num=st.integers(0, 2 * BLOCK),
)
def test_a_part_is_that_of_the_whole(size: int, begin: int, num: int) -> None:
    whole = ShuffledOrder(size, 7, 1).indices(0, size)
    part = ShuffledOrder(size, 7, 1).indices(begin, begin + num)
    assert part == [whole[place % size] for place in range(begin, begin + num)]


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(ShuffledOrder(100, seed, epoch).indices(0, 100))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_an_order_is_the_same_for_ever() -> None:
    """A run may be continued on another machine, with other versions of torch and numpy."""
    assert ShuffledOrder(10, 3, 2).indices(0, 10) == [1, 2, 9, 5, 4, 6, 0, 8, 3, 7]


@pytest.mark.parametrize("size", [5, 8, 300])
def test_every_sample_comes_to_every_place(size: int) -> None:
    """Chi-squared over places and samples, whose expectation is (size - 1)^2."""
    num = 20 * size
    found = Counter(
        pair
        for seed in range(num)
        for pair in enumerate(ShuffledOrder(size, seed, 0).indices(0, 5))
    )
    expected = num / size
    chi = sum(
        (found[place, sample] - expected) ** 2 / expected
        for place in range(5)
        for sample in range(size)
    )
    freedom = 5 * (size - 1)
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5


@again_if_late
def test_fifty_million_samples_start_at_once_and_need_no_memory() -> None:
    tracemalloc.start()
    try:
        begun_at = time.monotonic()
        sampler = ElasticSampler(MANY, seed=3)
        first = sampler.order(0).indices(0, 64)
        last = sampler.order(1).indices(MANY - 64, MANY)
        took_s = time.monotonic() - begun_at
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len({*first}) == len({*last}) == 64
    assert took_s < 0.1
    assert peak < 5_000_000


def test_iterating_a_sampler_yields_an_epoch() -> None:
    sampler = ElasticSampler(range(BLOCK + 10), seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    assert sorted(first) == sorted(sampler) == list(range(BLOCK + 10)) != first
    assert list(sampler) != first
    assert list(ElasticSampler(4, shuffle=False)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("data", "sentence"), [(0, "0 samples.*one or more"), (iter(()), "with a length.*Stream")]
)
def test_no_order_without_samples(data: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ElasticSampler(data)  # type: ignore[arg-type]
