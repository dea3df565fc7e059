"""A group that trains from a DataLoader with workers, until it is drained or ended.

Arguments: the lighthouse's address, the group's name. Prints `training` after each step, and
`saved` where a program would write its checkpoint.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchft_svc.client import DistributedDataParallel, Manager, OptimizerWrapper
from torchft_svc.errors import Drained

NUM_WORKERS = 2


def leads_a_session(address: str, name: str) -> None:
    """Train as Slurm and systemd start it: its process group has all of its processes."""
    os.setsid()
    main(address, name)


def main(address: str, name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.ones(100_000, 4))
    with Manager(
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
        lighthouse_addr=address,
        replica_id=name,
    ) as manager:
        optimizer = OptimizerWrapper(manager, sgd)
        parallel = DistributedDataParallel(manager, model)
        try:
            for (batch,) in DataLoader(data, batch_size=2, num_workers=NUM_WORKERS):
                optimizer.zero_grad()
                parallel(batch).sum().backward()
                optimizer.step()
                print("training", flush=True)
        except Drained:
            print("saved", flush=True)
            raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
