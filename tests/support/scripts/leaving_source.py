"""A worker that trains until it is drained, for a test of heals from a group that leaves.

Prints `training` and the number of groups after each committed step. A second SIGTERM ends it,
also if it follows at once.
"""

from __future__ import annotations

from support.training import Trainer
from torchft_svc.client.process import draining


def main(address: str, name: str) -> None:
    draining.REPEAT_S = 0.0
    with Trainer(address, name, 0, in_process=False) as trainer:
        while True:
            trainer.backward()
            quorum = trainer.manager.last_quorum()
            if trainer.optimizer.step() and quorum is not None:
                print("training", quorum.replica_world_size, flush=True)
