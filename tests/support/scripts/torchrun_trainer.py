"""A worker that sums its rank over all workers, and ends."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(ranks)
    total = f"{int(ranks.item())} of {dist.get_world_size()}"
    (Path(sys.argv[1]) / f"sum-{dist.get_rank()}").write_text(total)
    dist.destroy_process_group()
