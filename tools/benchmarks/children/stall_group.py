"""A replica group of `stall` and `catch_up`: a small model, and a large state that must be healed.

Prints ``ready URL`` with the address of its state, and reads the one to give to receivers.
Then it obeys lines on its standard input:

``clone``    answers with the seconds that a plain copy of the state takes, into fresh memory in
             huge pages, as a snapshot is: finding and clearing them is most of the work.
``steps N``  trains N steps; answers with one line of JSON: a list with an object for each, its
             milliseconds (``total``, of which ``wait`` for the quorum and ``update``), the
             number of ``groups`` in its quorum, how many contributed, and ``at``: when it ended.
``meet G N`` the same: steps until one has a quorum of G groups, and N more.
``join NAME N`` the same: steps until group NAME contributes, and all with it, and N more.
``digest``   answers with the step and a digest of the state's bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import nn

from tools.benchmarks.children.healing_ends import make_state
from torchft_svc.client import DistributedDataParallel, HTTPTransport, Manager, OptimizerWrapper
from torchft_svc.client.checkpointing.encoding.memory import allocate
from torchft_svc.core.quorum.names import stable_name

_TIMEOUT = timedelta(seconds=300)
_WIDTH = 64
# Enough for a joiner that imports torch meanwhile.
_MAX_STEPS = 5000


class FarAway(HTTPTransport[Any]):
    """Reached by others at ``url``."""

    url = ""

    def metadata(self) -> str:
        return self.url or super().metadata()


class Follower(FarAway):
    """Prints ``followed`` whenever it has fetched a preview."""

    def recv_preview(self, metadata: str, timeout: timedelta, check: Callable[[], None]) -> None:
        super().recv_preview(metadata, timeout, check)
        print("followed", flush=True)


class Group:
    """Trains; its state is the small model and matrices that no gradient changes."""

    def __init__(self, flags: argparse.Namespace) -> None:
        kind = Follower if flags.spare else FarAway
        transport = kind(_TIMEOUT, hostname="127.0.0.1")
        print("ready", transport.metadata(), flush=True)
        transport.url = sys.stdin.readline().strip()
        self._flags = flags
        self._model = nn.Linear(_WIDTH, _WIDTH)
        self._heavy = make_state(flags.matrices)
        sgd = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._manager = Manager(
            state_dict=self._state,
            load_state_dict=self._load,
            timeout=_TIMEOUT,
            quorum_timeout=_TIMEOUT,
            lighthouse_addr=flags.lighthouse,
            replica_id=flags.name,
            checkpoint_transport=transport,
            catch_up=flags.catch_up,
            spare=flags.spare,
        )
        self._optimizer = OptimizerWrapper(self._manager, sgd)
        self._parallel = DistributedDataParallel(self._manager, self._model)

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "heavy": self._heavy}

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        if not self._flags.copies:
            self._heavy = state["heavy"]
            return
        for mine, theirs in zip(self._heavy["matrices"], state["heavy"]["matrices"], strict=True):
            mine.copy_(theirs)

    def digest(self) -> str:
        digest = xxhash.xxh3_128()
        for tensor in [*self._model.state_dict().values(), *self._heavy["matrices"]]:
            digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())
        return f"{self._manager.current_step()} {digest.hexdigest()}"

    def clone(self) -> float:
        began_at = time.perf_counter()
        copies = []
        for matrix in self._heavy["matrices"]:
            fresh = torch.frombuffer(allocate(matrix.nbytes), dtype=matrix.dtype)
            copies.append(fresh.view_as(matrix).copy_(matrix))
        took_s = time.perf_counter() - began_at
        del copies
        return took_s

    def step(self) -> dict[str, float]:
        at = [time.perf_counter()]
        self._optimizer.zero_grad()
        loss = self._parallel(torch.ones(1, _WIDTH)).square().mean()
        time.sleep(self._flags.compute_s)
        at.append(time.perf_counter())
        self._manager.wait_quorum()
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        self._optimizer.step()
        at.append(time.perf_counter())
        quorum = self._manager.last_quorum()
        return {
            "total": (at[4] - at[0]) * 1000,
            "wait": (at[2] - at[1]) * 1000,
            "update": (at[4] - at[3]) * 1000,
            "groups": 0 if quorum is None else quorum.replica_world_size,
            "contribute": self._manager.num_participants(),
            "at": time.monotonic(),
        }

    def meet(self, num_groups: int, num_more: int) -> list[dict[str, float]]:
        steps = [self.step()]
        while steps[-1]["groups"] < num_groups and len(steps) < _MAX_STEPS:
            steps.append(self.step())
        return steps + [self.step() for _ in range(num_more)]

    def join(self, name: str, num_more: int) -> list[dict[str, float]]:
        steps = [self.step()]
        while not self._contributes(name, steps[-1]) and len(steps) < _MAX_STEPS:
            steps.append(self.step())
        return steps + [self.step() for _ in range(num_more)]

    def _contributes(self, name: str, step: dict[str, float]) -> bool:
        quorum = self._manager.last_quorum()
        names = () if quorum is None else map(stable_name, quorum.replica_ids)
        return name in names and step["groups"] == step["contribute"]

    def close(self) -> None:
        self._manager.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--matrices", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--compute-s", type=float, default=0.03)
    parser.add_argument("--catch-up", action="store_true")
    parser.add_argument("--spare", action="store_true", help="stand by until a place is free")
    parser.add_argument("--copies", action="store_true", help="load into the tensors")
    torch.set_num_threads(1)
    group = Group(parser.parse_args())
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "clone":
            print(group.clone(), flush=True)
        elif command == "steps":
            print(json.dumps([group.step() for _ in range(int(arguments[0]))]), flush=True)
        elif command == "join":
            print(json.dumps(group.join(arguments[0], int(arguments[1]))), flush=True)
        elif command == "digest":
            print(group.digest(), flush=True)
        else:
            print(json.dumps(group.meet(*map(int, arguments))), flush=True)
    group.close()


if __name__ == "__main__":
    main()
