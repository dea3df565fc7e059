"""A learner of Decoupled DiLoCo that prints when it has seen how many tokens.

Lines: the monotonic time, the tokens seen since the start, and the merges. ``--alone``: the same
inner steps without a manager, for the learner's own pace.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import click
import torch
from torch import nn
from torch.nn import functional

from torchft_svc.client import Manager
from torchft_svc.client.algorithms import DecoupledDiLoCo

_BATCH, _WIDTH = 32, 256
_PRINT_EVERY_S = 0.1


@click.command()
@click.option("--alone", is_flag=True)
@click.option("--pause", "pause_s", type=float, default=0.02)
@click.option("--sync-every", type=int, default=20)
def main(alone: bool, pause_s: float, sync_every: int) -> None:
    """Train until the end of the process."""
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    learner: Any = None
    if not alone:
        learner = DecoupledDiLoCo(
            Manager(use_async_quorum=False),
            [model[0], model[2]],
            inner,
            lambda weights: torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True),
            sync_every,
        )
    tokens, printed_at = 0, 0.0
    with learner or contextlib.nullcontext():
        while True:
            inputs, labels = torch.randn(_BATCH, _WIDTH), torch.randint(10, (_BATCH,))
            inner.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            time.sleep(pause_s)  # a device computes
            if learner is not None:
                learner.add_tokens(_BATCH)
            inner.step()
            tokens += _BATCH
            if (now := time.monotonic()) - printed_at > _PRINT_EVERY_S:
                printed_at = now
                print(now, tokens, 0 if learner is None else learner.merges, flush=True)


if __name__ == "__main__":
    main()
