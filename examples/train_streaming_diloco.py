"""Streaming DiLoCo: the parts of the model are synchronized one after the other, during training.

    lighthouse --bind :29510
    TORCHFT_LIGHTHOUSE=localhost:29510 REPLICA_GROUP_ID=0 python examples/train_streaming_diloco.py
    TORCHFT_LIGHTHOUSE=localhost:29510 REPLICA_GROUP_ID=1 python examples/train_streaming_diloco.py

Kill any of them and start it again: it is there again with the next synchronization.
"""

import argparse

import torch
from characters import Text, add_device, make_model, make_process_group

from torchft_svc.client import Manager
from torchft_svc.client.algorithms import DiLoCo


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one replica group.")
    parser.add_argument("--syncs", type=int, default=100, help="synchronizations to commit")
    parser.add_argument("--sync-every", type=int, default=90, help="updates for all parts")
    parser.add_argument("--delay", type=int, default=5, help="updates while an average travels")
    parser.add_argument("--alpha", type=float, default=0.5, help="own share of the weights")
    add_device(parser)
    options = parser.parse_args()

    model, text = make_model().to(options.device), Text()
    fragments = [model[0], model[2], model[4]]
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = [
        torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for each in fragments
    ]

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=make_process_group(options.device),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        load_state_dict=load_state_dict,
        use_async_quorum=False,
    )
    algorithm = DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        options.sync_every,
        fragment_sync_delay=options.delay,
        fragment_update_alpha=options.alpha,
    )
    with algorithm:
        while manager.current_step() < options.syncs:
            inner.zero_grad()
            text.loss(model).backward()
            inner.step()  # asks nobody, except in every 30th call
            if not algorithm.inner_steps:
                text.show(manager.current_step(), manager.num_participants())
    manager.shutdown()


if __name__ == "__main__":
    main()
