"""A replica group of the public release in the slow links' benchmark.

``train ALGORITHM SECONDS`` is answered as `slow_link_group` does; the algorithms are ``diloco`` and
``streaming``, with the same settings as there.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from tools.benchmarks.children.characters import (
    ALPHA,
    BATCH,
    DELAY,
    OUTER,
    SYNC_EVERY,
    Text,
    make_model,
)

TIMEOUT = timedelta(seconds=60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--device-ms", type=float, required=True)
    options = parser.parse_args()
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{options.lighthouse}"
    # Members are sent the name of the machine, which leads nowhere from another network namespace.
    socket.gethostname = lambda: options.host
    print("ready", flush=True)
    for line in sys.stdin:
        _, name, seconds = line.split()
        train(options, name, float(seconds))


def train(options: argparse.Namespace, name: str, seconds: float) -> None:
    """Train a new model for ``seconds``, which begin when all groups are there."""
    model, text = make_model(), Text(options.number)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    store = TCPStore(options.host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        min_replica_size=options.groups,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=options.host,
        store_port=store.port,
        replica_id=f"group-{options.number}-",
        hostname=options.host,
    )
    fragments: list[nn.Module] = list(model) if name == "streaming" else [model]
    outer = [torch.optim.SGD(each.parameters(), **OUTER) for each in fragments]
    algorithm = DiLoCo(
        manager,
        fragments,
        adam,
        outer,
        SYNC_EVERY,
        use_bucketization=True,  # by default each parameter travels alone
        fragment_sync_delay=DELAY if name == "streaming" else 0,
        fragment_update_alpha=ALPHA if name == "streaming" else 0.0,
    )
    with algorithm:
        _meet(manager, options.groups)
        began_at = time.monotonic()
        while time.monotonic() < began_at + seconds:
            adam.zero_grad()
            loss = text.loss(model)
            time.sleep(options.device_ms / 1000)
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            print(f"step {time.monotonic() - began_at:.3f} {BATCH} {loss.item():.4f}", flush=True)
    print(f"end {text.unseen_loss(model):.4f}", flush=True)


def _meet(manager: Manager, num_groups: int) -> None:
    """Return when all groups are in a step together."""
    while True:
        manager.start_quorum()
        manager.allreduce(torch.zeros(1)).wait()
        is_complete = manager.num_participants() == num_groups
        if manager.should_commit() and is_complete:
            return


if __name__ == "__main__":
    main()
