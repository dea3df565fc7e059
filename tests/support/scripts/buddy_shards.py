"""A worker of a group whose shards and odd contents are copied: prints a digest of each state.

buddy_shards.py <layout of sharded_trainer.py> <seed> <steps between copies>
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from support.scripts.sharded_trainer import PACE_S, WIDTH, Block, build, fingerprint
from torchft_svc.client import (
    Manager,
    OptimizerWrapper,
    ProcessGroupGloo,
    sharded_state_dict,
)

TIMEOUT = timedelta(seconds=20)


class OddContents:
    """What programs keep beside a model; the forward pass of each step changes all of it.

    It depends on the step alone, so that a step which is discarded changes nothing for good.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.counts: Counter[str] = Counter()
        self.table = np.zeros((3, 4))
        self.across = torch.zeros(64, 48).t()  # not contiguous
        self.gaps = torch.zeros(96)[::3]
        self.half = torch.zeros(5, dtype=torch.bfloat16)
        self.seen: set[int] = set()
        self.step = 0

    def change(self, step: int) -> None:
        """Become what belongs to ``step``; in place, as a model's buffers do."""
        self.step = step
        self.counts.clear()
        self.counts.update({"tokens": 17 * step, f"of {self._rank}": step})
        self.table[:] = step + self._rank
        self.across.copy_(torch.arange(48.0)[:, None] * step + self._rank)
        self.gaps.fill_(step)
        self.half.fill_(step)
        self.seen.clear()
        self.seen.update({step % 5, 10 + step % 7})

    def save(self) -> dict[str, Any]:
        return {
            "counts": self.counts,
            "numbers": (
                self.step,
                2.0**-self.step,
                float("-inf"),
                -0.0,
                None,
                step_name(self.step),
            ),
            "table": self.table,
            "tensors": [self.across, self.gaps, self.half, torch.zeros(0), torch.tensor(True)],
            "seen": self.seen,
            "nested": {"empty": {}, 7: [self.step % 2 == 0, b"\x00\xff"]},
        }

    def load(self, state: dict[str, Any]) -> None:
        assert type(state["counts"]) is Counter, type(state["counts"])
        self.counts.clear()
        self.counts.update(state["counts"])
        self.step = state["numbers"][0]
        self.table[:] = state["table"]
        self.seen.clear()
        self.seen.update(state["seen"])
        for mine, theirs in zip(self.save()["tensors"], state["tensors"], strict=True):
            mine.copy_(theirs)


def step_name(step: int) -> str:
    return f"step \N{GREEK SMALL LETTER SIGMA} {step}"


def main(layout: str, seed: str, every: str) -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    torch.manual_seed(int(seed))
    model = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))
    odd = OddContents(rank)

    def save() -> dict[str, Any]:
        return {"model": sharded_state_dict(model), "adam": adam.state_dict(), "odd": odd.save()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        odd.load(state["odd"])

    manager = Manager(
        pg=ProcessGroupGloo(TIMEOUT),
        state_dict=save,
        load_state_dict=load,
        hostname="127.0.0.1",
        timeout=TIMEOUT,
        buddy_every=int(every),
    )
    build(model, manager, layout, "cpu")
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer = OptimizerWrapper(manager, adam)
    while True:
        optimizer.zero_grad()
        if (step := manager.current_step()) > 0:
            sys.stdout.write(f"BEGINS {step} {fingerprint(save())}\n")  # one write: logs do not mix
            sys.stdout.flush()
        odd.change(step + 1)
        dice = torch.Generator().manual_seed(1000 * step + 10 * rank)
        inputs = torch.randn(32, 4, generator=dice)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        time.sleep(PACE_S)
        optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
