"""A worker of a launched run that prints each step; fails with its peers unless it survives."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist

from torchft_svc.elastic import get_worker_info, leave_world, world_changed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--init-s", type=float, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--survives", action="store_true", help="live through changes of the world")
    parser.add_argument("--idle", action="store_true", help="no collective in a step")
    options = parser.parse_args()

    weights = torch.zeros(1000)
    time.sleep(options.init_s)
    num_worlds = num_steps = 0
    while True:
        info = get_worker_info()
        num_worlds += 1
        try:
            dist.init_process_group("gloo", **info.get_pg_parameters())
            leaves = False
            while not leaves:
                time.sleep(options.step_s)
                wants_to_leave = torch.tensor([float(world_changed())])
                summed = torch.cat([weights + 1, wants_to_leave])
                if not options.idle:
                    dist.all_reduce(summed)
                num_steps += 1
                at = (os.getpid(), num_worlds, info.world_size, num_steps, time.monotonic_ns())
                # In one write: workers of a node share the pipe.
                os.write(1, f"step {' '.join(map(str, at))}\n".encode())
                leaves = bool(summed[-1] > 0)
        except RuntimeError:
            if not options.survives:
                raise
        leave_world()


if __name__ == "__main__":
    main()
