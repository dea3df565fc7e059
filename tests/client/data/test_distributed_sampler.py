"""Tests the shards: no sample twice, none left out, the same after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_svc.client import DistributedSampler
from torchft_svc.errors import ConfigError


@given(num_groups=st.integers(1, 4), num_workers=st.integers(1, 3), size=st.integers(12, 40))
def test_every_sample_belongs_to_somebody(num_groups: int, num_workers: int, size: int) -> None:
    data = list(range(size))
    samplers = [
        DistributedSampler(data, group, num_groups, worker, num_workers, shuffle=True, seed=3)
        for group in range(num_groups)
        for worker in range(num_workers)
    ]
    drawn = [list(sampler) for sampler in samplers]
    assert set().union(*drawn) == set(data)
    assert len({len(part) for part in drawn}) == 1
    num_padded = sum(map(len, drawn)) - size
    assert 0 <= num_padded < num_groups * num_workers


def test_a_restarted_group_draws_the_same_part() -> None:
    first, again = (
        list(DistributedSampler(list(range(20)), replica_rank=1, num_replica_groups=3, seed=5))
        for _ in range(2)
    )
    assert first == again


def test_epochs_differ() -> None:
    sampler = DistributedSampler(list(range(20)), 0, 2, seed=5)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((2, 2, 0, 1), "replica_rank=2.*num_replica_groups=2"),
        ((0, 0, 0, 1), "num_replica_groups=0"),
        ((0, 1, 3, 2), "group_rank=3.*num_replicas=2"),
    ],
)
def test_ranks_that_do_not_exist(arguments: tuple[int, int, int, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        DistributedSampler([1, 2], *arguments)
