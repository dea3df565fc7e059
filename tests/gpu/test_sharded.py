"""Tests sharded models on a GPU, which all workers of two groups share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gpu.ranks import needs_gpu
from support.sharded_groups import LIMIT_S, heal_part_by_part

pytestmark = [pytest.mark.gpu, pytest.mark.processes, needs_gpu, pytest.mark.timeout(LIMIT_S)]


@pytest.mark.parametrize(("layout", "num_workers"), [("fsdp", 2), ("hsdp", 2), ("fsdp+tp", 4)])
def test_i3_a_sharded_group_heals_part_by_part(
    tmp_path: Path, layout: str, num_workers: int
) -> None:
    """The same as in tests/client/test_hsdp.py, between GPUs."""
    heal_part_by_part(tmp_path, layout, num_workers, "cuda")
