"""LocalSGD: each group trains alone, and every 20 updates all of them average their weights.

    lighthouse --bind :29510
    TORCHFT_LIGHTHOUSE=localhost:29510 REPLICA_GROUP_ID=0 python examples/train_local_sgd.py
    TORCHFT_LIGHTHOUSE=localhost:29510 REPLICA_GROUP_ID=1 python examples/train_local_sgd.py

Kill any of them and start it again: it is there again with the next synchronization.
"""

import argparse

import torch
from characters import Text, add_device, make_model, make_process_group

from torchft_svc.client import Manager
from torchft_svc.client.algorithms import LocalSGD


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one replica group.")
    parser.add_argument("--syncs", type=int, default=100, help="synchronizations to commit")
    parser.add_argument("--sync-every", type=int, default=20, help="updates between two of them")
    add_device(parser)
    options = parser.parse_args()

    model, text = make_model().to(options.device), Text()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=make_process_group(options.device),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        load_state_dict=load_state_dict,
    )
    with LocalSGD(manager, model, adam, options.sync_every) as algorithm:
        while manager.current_step() < options.syncs:
            adam.zero_grad()
            text.loss(model).backward()
            adam.step()  # asks nobody, except in every 20th call
            if not algorithm.inner_steps:
                text.show(manager.current_step(), manager.num_participants())
    manager.shutdown()


if __name__ == "__main__":
    main()
