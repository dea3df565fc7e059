"""A replica group of `buddy`: a state that each step changes as a whole, and that is copied.

It obeys ``steps N`` on its standard input: trains N steps, and answers with one line of JSON, their
milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from torch import nn

from torchft_svc.client import DistributedDataParallel, Manager, Optimizer

_BYTES_OF_A_NUMBER = 8  # of a parameter, and of its momentum


class Wide(nn.Module):
    """A layer whose gradient costs little beside its size."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--num-bytes", type=int, required=True)
    parser.add_argument("--compute-s", type=float, required=True)
    parser.add_argument("--every", type=int, required=True)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    model = Wide(flags.num_bytes // _BYTES_OF_A_NUMBER)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def load(state: dict[str, dict[str, torch.Tensor]]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])

    manager = Manager(
        lighthouse_addr=flags.lighthouse,
        replica_id="copied",
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        load_state_dict=load,
        buddy_every=flags.every,
        check_every=0,
    )
    optimizer = Optimizer(manager, sgd)
    parallel = DistributedDataParallel(manager, model)

    def step() -> float:
        began_at = time.perf_counter()
        optimizer.zero_grad()
        loss = parallel(torch.ones(()))
        time.sleep(flags.compute_s)
        loss.backward()
        optimizer.step()
        return (time.perf_counter() - began_at) * 1000

    print("ready", flush=True)
    for line in sys.stdin:
        num = int(line.split()[1])
        print(json.dumps([step() for _ in range(num)]), flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
