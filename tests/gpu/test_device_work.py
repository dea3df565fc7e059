"""Tests what of the NCCL group needs no device: how a work is waited for, and the refusal."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from torchft_svc.client import ProcessGroupNCCL
from torchft_svc.client.process_groups.nccl import DeviceWork
from torchft_svc.errors import ConfigError, QuorumFailed


class Link:
    """The part of a connection that a work looks at."""

    left = False
    down = False

    def is_down(self) -> bool:
        return self.down


def gloo(store: HashStore, rank: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=5))


@pytest.fixture
def backends() -> list[Any]:
    """Two real members; making them needs both at once."""
    store, made = HashStore(), [None, None]

    def make(rank: int) -> None:
        made[rank] = gloo(store, rank)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return made


def test_a_timed_wait_leaves_the_operation_alone(backends: list[Any]) -> None:
    first, second = torch.ones(3), torch.ones(3)
    work = DeviceWork(backends[0].allreduce([first]), Link())
    began_at = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not over after 0\.05 s"):
        work.wait(timedelta(seconds=0.05))
    assert 0.05 <= time.monotonic() - began_at < 1
    assert not work.is_completed()
    assert not work.is_success()

    other = DeviceWork(backends[1].allreduce([second]), Link())
    assert work.wait(timedelta(seconds=5))
    assert other.wait(timedelta(seconds=5))
    assert work.is_completed()
    assert work.is_success()
    assert first.tolist() == second.tolist() == [2, 2, 2]


def test_a_failure_is_raised_by_the_wait_and_not_by_the_look(backends: list[Any]) -> None:
    work = DeviceWork(backends[0].allreduce([torch.ones(3)]), Link())
    backends.pop()  # closes the connection
    with pytest.raises(RuntimeError) as caught:
        work.wait(timedelta(seconds=4))
    assert "not over" not in str(caught.value)
    assert work.is_completed()
    assert not work.is_success()


def test_an_operation_of_a_group_that_was_left_is_no_success(backends: list[Any]) -> None:
    link = Link()
    works = [DeviceWork(backend.allreduce([torch.ones(3)]), link) for backend in backends]
    assert works[0].wait(timedelta(seconds=5))
    link.left = True
    for work in works:
        with pytest.raises(QuorumFailed, match="was left"):
            work.wait(timedelta(seconds=5))
        assert not work.is_success()
        assert not work.is_completed()  # while it is taken down nobody may ask torch
    link.down = True
    assert all(work.is_completed() for work in works)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_sentence_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match="use ProcessGroupGloo"):
        ProcessGroupNCCL()
