"""A worker of a replica group of `torchft-run --replica-groups`: run by test_replica_groups.py.

Arguments: the number of steps. Prints a line of JSON when its model is made, and one after each
step that it has committed: its group and process, the step, the loss, a digest of the weights, and
how many groups contributed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

import torch
from torch import nn

from torchft_svc.client import DistributedDataParallel, Manager, OptimizerWrapper


def note(**fields: object) -> None:
    """Write a line in one piece: several processes write to the same pipe."""
    about = {"group": os.environ["REPLICA_GROUP_ID"], "pid": os.getpid()}
    os.write(sys.stdout.fileno(), f"{json.dumps({**about, **fields})}\n".encode())


def main(num_steps: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 4)
    targets = inputs @ torch.randn(4, 2)
    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.02)
    note(spare=os.environ.get("TORCHFT_SPARE", "0"))
    with Manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict) as manager:
        optimizer = OptimizerWrapper(manager, sgd)
        parallel = DistributedDataParallel(manager, model)
        while manager.current_step() < num_steps:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(parallel(inputs), targets)
            loss.backward()
            time.sleep(0.05)
            num_groups = manager.num_participants()
            if optimizer.step():
                weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
                digest = hashlib.sha256(weights).hexdigest()[:16]
                step = manager.current_step()
                note(step=step, loss=loss.item(), digest=digest, groups=num_groups)


if __name__ == "__main__":
    main(int(sys.argv[1]))
