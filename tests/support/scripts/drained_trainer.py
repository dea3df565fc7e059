"""A worker that trains until it is drained, as a process: run by test_draining.py.

Arguments: the lighthouse's address, the group's name, maybe `in-process`; the environment says
which worker it is.
Prints `training` after each step that two or more groups committed, `discarded` after one that was
not committed, and `drained` with the step at its end; the first and the last with the time, and the
last with the time that is left.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

from torchft_svc.client import DistributedDataParallel, Manager, OptimizerWrapper
from torchft_svc.errors import Drained

LIFE_S = 110.0


def leads_a_session(address: str, name: str) -> None:
    """Train as a launcher starts it: its signals reach it alone, and its manager."""
    os.setsid()
    main(address, name, in_process=False)


def main(address: str, name: str, *, in_process: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with Manager(
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
        lighthouse_addr=address,
        replica_id=name,
        in_process=in_process,
    ) as manager:
        optimizer = OptimizerWrapper(manager, sgd)
        parallel = DistributedDataParallel(manager, model)
        assert manager.draining_until() is None
        ends_at = time.monotonic() + LIFE_S
        try:
            while time.monotonic() < ends_at:
                optimizer.zero_grad()
                parallel(torch.ones(3, 4)).sum().backward()
                num = manager.num_participants()
                began_at = time.monotonic()
                committed = optimizer.step()
                print("training" if committed else "discarded", num, began_at, flush=True)
        except Drained:
            until = manager.draining_until()
            left_s = None if until is None else until - time.monotonic()
            print("drained", manager.current_step(), time.monotonic(), left_s, flush=True)
            raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], in_process="in-process" in sys.argv)
