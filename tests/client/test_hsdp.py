"""Tests sharded models over several groups: real workers, and a real kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.sharded_groups import LIMIT_S, heal_part_by_part, pause_a_worker


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("layout", "num_workers"),
    [
        ("fsdp", 2),
        pytest.param(
            "hsdp",
            2,
            marks=pytest.mark.skipif(
                torch.__version__.startswith("2.7."), reason="its HSDP cannot work on CPUs"
            ),
        ),
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
