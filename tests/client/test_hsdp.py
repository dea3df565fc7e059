"""Tests sharded models over several groups: real workers, and a real kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.sharded_groups import LIMIT_S, change_a_part, heal_part_by_part, pause_a_worker

NOT_IN_2_7 = pytest.mark.skipif(
    torch.__version__.startswith("2.7."), reason="its HSDP cannot work on CPUs"
)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("layout", "num_workers"),
    [
        ("fsdp", 2),
        pytest.param("hsdp", 2, marks=NOT_IN_2_7),
        ("fsdp+tp", 4),
    ],
)
@pytest.mark.processes
def test_i3_a_sharded_group_heals_part_by_part(
    tmp_path: Path, layout: str, num_workers: int
) -> None:
    """Mixed precision, accumulated and clipped gradients; tensors in parallel on a 2-D mesh."""
    heal_part_by_part(tmp_path, layout, num_workers)


@pytest.mark.processes
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("as_a_whole", [False, True], ids=["its main thread", "the process"])
@pytest.mark.parametrize("group_rank", [0, 1])
def test_a_worker_that_pauses_for_too_long_does_not_lock_its_group(
    tmp_path: Path, group_rank: int, as_a_whole: bool
) -> None:
    pause_a_worker(tmp_path, group_rank, as_a_whole=as_a_whole)


@pytest.mark.processes
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("hsdp", marks=NOT_IN_2_7)])
def test_a_part_that_differs_on_one_rank_is_found(tmp_path: Path, layout: str) -> None:
    change_a_part(tmp_path, layout)
