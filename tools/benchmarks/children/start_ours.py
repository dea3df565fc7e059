"""A replica group of ours that prints the stages of its start, and then trains slowly."""

from __future__ import annotations

import argparse
import time

from tools.benchmarks.children.stages import print_stage


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--participants", type=int, required=True, help="commit with so many")
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--early", action="store_true", help="start the manager before torch")
    flags = parser.parse_args()
    if flags.early:
        from torchft_svc import start_manager_early

        start_manager_early()

    import torch
    from torch.optim import SGD

    print_stage("torch")
    from torchft_svc.client import DistributedDataParallel, Manager, OptimizerWrapper

    print_stage("client")
    model = torch.nn.Linear(16, 16)
    sgd = SGD(model.parameters(), lr=1e-3)
    print_stage("model")

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        load_state_dict=load_state_dict,
        lighthouse_addr=flags.lighthouse,
        replica_id=flags.name,
        job_id=flags.job,
    )
    print_stage("manager")
    replicated = DistributedDataParallel(manager, model)
    optimizer = OptimizerWrapper(manager, sgd)
    optimizer.zero_grad()
    manager.wait_quorum()
    print_stage("quorum")
    inputs, is_whole = torch.ones(8, 16), False
    while True:
        replicated(inputs).sum().backward()
        participants, before = manager.num_participants(), manager.current_step()
        optimizer.step()
        if not is_whole and manager.current_step() > before and participants == flags.participants:
            is_whole = True
            print_stage("commit")
        time.sleep(flags.step_s)
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
