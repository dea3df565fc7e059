"""Trains a line fit in one replica group with either package; run as a script by test_interop.py.

Arguments: `public` or `ours`, the lighthouse's address, the group's name, the steps to commit (and
then to end). Prints one JSON object for every committed step.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

if sys.argv[1] == "public":
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
else:
    from torchft_svc.client import (
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

_, _, LIGHTHOUSE, NAME, STEPS = sys.argv
TIMEOUT = timedelta(seconds=20)


def main() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        net.load_state_dict(state["net"])
        sgd.load_state_dict(state["sgd"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=2 * TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=LIGHTHOUSE,
        replica_id=NAME,
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, sgd)
    model = DistributedDataParallel(manager, net)
    while (step := manager.current_step()) < int(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:
            report = {"step": step + 1, "loss": loss.item(), "groups": manager.num_participants()}
            print(json.dumps(report), flush=True)
    manager.shutdown()
    sys.stdout.flush()
    os._exit(0)  # whatever threads either package leaves are not what is tested here


main()
