"""Decoupled DiLoCo: learners train at their own pace; nobody waits for a slow, frozen or dead one.

    lighthouse --bind :29510
    export TORCHFT_LIGHTHOUSE=localhost:29510
    REPLICA_GROUP_ID=0 python examples/train_decoupled_diloco.py
    REPLICA_GROUP_ID=1 python examples/train_decoupled_diloco.py --pause 0.05

Kill or freeze any of them: the others train on, and merge what they have learned. Start it again:
it has the merged weights before its first update.
"""

import argparse
import time

import torch
from characters import BATCH, Text, make_model

from torchft_svc.client import Manager
from torchft_svc.client.algorithms import DecoupledDiLoCo


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one learner.")
    parser.add_argument("--merges", type=int, default=100, help="merges of the job to wait for")
    parser.add_argument("--sync-every", type=int, default=100, help="updates for all fragments")
    parser.add_argument("--min-replicas", type=int, default=1, help="learners in a merge")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds more for each update")
    options = parser.parse_args()

    model, text = make_model(), Text()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = Manager(use_async_quorum=False)
    algorithm = DecoupledDiLoCo(
        manager,
        [model[:2], model[2:]],
        inner,
        lambda weights: torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True),
        options.sync_every,
        min_replicas=options.min_replicas,
    )
    with algorithm:
        shown = algorithm.merges
        while algorithm.merges < options.merges:
            inner.zero_grad()
            text.loss(model).backward()
            time.sleep(options.pause)
            algorithm.add_tokens(BATCH)
            inner.step()  # waits for nobody
            if algorithm.merges > shown:
                shown = algorithm.merges
                text.show(shown, algorithm.num_learners)
    manager.shutdown()

    algorithm.load_merged_weights()
    with torch.no_grad():
        loss = sum(text.loss(model).item() for _ in range(20)) / 20
    print(f"merged weights: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
