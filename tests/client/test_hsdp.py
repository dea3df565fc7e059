"""Tests sharded models over several groups: real workers, and a real kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .sharded_groups import LIMIT_S, heal_part_by_part


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
def test_i3_a_sharded_group_heals_part_by_part(
    tmp_path: Path, layout: str, num_workers: int
) -> None:
    """Mixed precision, accumulated and clipped gradients; tensors in parallel on a 2-D mesh."""
    heal_part_by_part(tmp_path, layout, num_workers)
