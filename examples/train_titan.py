"""Trains as torchtitan does: FSDP2 in each group, averages across groups by a hook of FSDP.

The program imports `torchft`, and runs with the public release as with this package:

    lighthouse --bind :29510
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # see docs/worker-groups.md
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 \\
        -m torchft_svc.compat examples/train_titan.py --group 0
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 \\
        -m torchft_svc.compat examples/train_titan.py --group 1

Kill a worker: its launcher restarts that group, which heals from the other one. `torchft-run` may
stand in the place of `torchrun`.
"""

import argparse
import importlib.util
import os
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

if importlib.util.find_spec("torchft") is None:
    raise SystemExit("run it with: -m torchft_svc.compat examples/train_titan.py")
import torchft
from torchft.process_group import ManagedProcessGroup

WIDTH, BATCH, TOKENS = 32, 8, 64
TIMEOUT = timedelta(seconds=60)


class OptimizersContainer(torch.optim.Optimizer):
    """The optimizers of all parts of a model, as one."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]
        super().__init__([each for part in parts for each in part.parameters()], {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, object]:
        return {str(index): each.state_dict() for index, each in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for index, each in enumerate(self.optimizers):
            each.load_state_dict(state[str(index)])


class VotingContainer(OptimizersContainer):
    """A container that hands itself to `torchft.Optimizer`, which calls it back for the update."""

    def __init__(self, parts: list[nn.Module], manager: torchft.Manager) -> None:
        super().__init__(parts)
        self.voting = torchft.Optimizer(manager, self)
        self.is_called_back = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.is_called_back:
            super().zero_grad(set_to_none)
            return
        self.is_called_back = True
        try:
            self.voting.zero_grad(set_to_none=set_to_none)
        finally:
            self.is_called_back = False

    def step(self, closure: None = None) -> None:
        if self.is_called_back:
            super().step()
            return
        self.is_called_back = True
        try:
            self.voting.step()
        finally:
            self.is_called_back = False


def make_model(group_size: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *layers, nn.Linear(WIDTH, TOKENS))
    mesh = init_device_mesh("cpu", (group_size,), mesh_dim_names=("dp_shard",))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def average_across(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Average what FSDP has reduced in the group over the groups, too."""

    def hook(reduced: Tensor) -> None:
        dist.all_reduce(reduced, group=replicas, op=dist.ReduceOp.AVG)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hook)


def batches(manager: torchft.Manager, rank: int) -> Iterator[Tensor]:
    """Tokens whose successor is known: a function of step, group and rank only."""
    while True:
        seed = manager.current_step() * 100 + (manager.participating_rank() or 0) * 10 + rank
        generator = torch.Generator().manual_seed(seed)
        yield torch.randint(TOKENS, (BATCH,), generator=generator)


def digest(model: nn.Module) -> str:
    """A checksum of this worker's part: equal in all groups after each step."""
    found = 0
    for parameter in model.parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found = zlib.crc32(part.detach().numpy().tobytes(), found)
    return f"{found:08x}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, required=True, help="the number of this group")
    parser.add_argument("--steps", type=int, default=100, help="updates to commit")
    parser.add_argument("--step-s", type=float, default=0.0, help="time to add to each step")
    options = parser.parse_args()

    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, group_size = dist.get_rank(), dist.get_world_size()
    model = make_model(group_size)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        load_state_dict=None,
        state_dict=None,
        use_async_quorum=True,
        replica_id=f"titan_{options.group}",
    )
    optimizer = VotingContainer([model], manager)
    manager.set_state_dict_fns(
        lambda state: [
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optimizer"]),
        ],
        lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    )
    replicas = ManagedProcessGroup(manager)
    replicas.register("dp_replicate")
    average_across(model, replicas)

    data = batches(manager, rank)
    while manager.current_step() < options.steps:
        optimizer.zero_grad(set_to_none=True)
        tokens = next(data)
        loss = functional.cross_entropy(model(tokens), (tokens + 1) % TOKENS)
        loss.backward()
        time.sleep(options.step_s)
        optimizer.step()
        # After the step: what is logged, over all workers of all groups.
        total = funcol.all_reduce(loss.detach(), "SUM", replicas)
        worst = funcol.all_reduce(loss.detach(), "MAX", replicas)
        num_tokens = funcol.all_reduce(torch.tensor(BATCH, dtype=torch.int64), "SUM", replicas)
        line = {
            "step": manager.current_step(),
            "loss": round(total.item() / replicas.size(), 4),
            "worst": round(worst.item(), 4),
            "tokens": num_tokens.item(),
            "groups": replicas.size(),
            "group": options.group,
            "rank": rank,
            "pid": os.getpid(),
            "digest": digest(model),
        }
        print(*[f"{name}={value}" for name, value in line.items()], flush=True)
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
