"""Trains a small transformer, sharded inside each replica group and replicated across the groups.

    lighthouse --bind :29510
    export TORCHFT_LIGHTHOUSE=localhost:29510
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # see docs/worker-groups.md
    REPLICA_GROUP_ID=0 torchrun --standalone --nproc-per-node=2 --max-restarts=9 \\
        examples/train_hsdp.py
    REPLICA_GROUP_ID=1 torchrun --standalone --nproc-per-node=2 --max-restarts=9 \\
        examples/train_hsdp.py

Kill any worker: its launcher restarts that group, whose workers heal each from the worker with the
same rank in the other group, while that one goes on. On CPUs (gloo), or one GPU a worker (NCCL).

Started so, only the killed worker is restarted, and the others keep their process:

    REPLICA_GROUP_ID=0 torchft-run --standalone --nproc-per-node=2 --max-restarts=9 \\
        --restart-policy=soft-replace examples/train_hsdp.py --survive
"""

import argparse
import os
import sysconfig
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from torchft_svc.client import (
    Manager,
    OptimizerWrapper,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    replicate_across_groups,
    sharded_state_dict,
)
from torchft_svc.elastic import WorkerInfo, get_worker_info, leave_world

CONTEXT, BATCH, WIDTH, VOCABULARY = 32, 16, 64, 128
TIMEOUT = timedelta(seconds=60)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits (batch x context, vocabulary) of what follows each of ``characters``."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            characters.shape[1], device=characters.device
        )
        hidden = self.embedding(characters)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden.flatten(0, 1))


def read_text() -> Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)


def draw_batch(text: Tensor, seed: int) -> Tensor:
    """(BATCH, CONTEXT + 1) characters: a function of the seed only, so nothing must be saved."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


def digest(model: nn.Module) -> int:
    """Checksum of this worker's shards: equal in all groups after every step, to the bit."""
    sum_ = 0
    for parameter in model.parameters():
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sum_ = zlib.crc32(shard.detach().cpu().numpy().tobytes(), sum_)
    return sum_


def train_with(
    manager: Manager,
    optimizer: OptimizerWrapper,
    model: nn.Module,
    info: WorkerInfo,
    text: Tensor,
    options: argparse.Namespace,
) -> None:
    device = next(model.parameters()).device
    while (step := manager.current_step()) < options.steps:
        optimizer.zero_grad()  # requests the quorum of this step
        group = manager.participating_rank() or 0  # None while this group heals
        seed = (step * 1_000 + group) * info.world_size + info.rank
        batch = draw_batch(text, seed).to(device)
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits, batch[:, 1:].flatten())
        time.sleep(options.step_s)
        loss.backward()  # reduced and scattered in the group, then averaged over the groups
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # commits, or changes nothing

        step = manager.current_step()
        if step % options.print_every == 0:
            groups = manager.num_participants()
            print(
                f"step {step} loss {loss.item():.3f} groups {groups} rank {info.rank} "
                f"pid {os.getpid()} digest {digest(model):08x}\n",
                end="",
                flush=True,
            )


def train(info: WorkerInfo, text: Tensor, options: argparse.Namespace) -> None:
    """Form the group, heal from another one, and train until it is done, or a worker is lost."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, **info.get_pg_parameters())

    mesh = init_device_mesh(device.type, (info.world_size,), mesh_dim_names=("shard",))
    model = Transformer().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def state_dict() -> dict[str, object]:
        return {"model": sharded_state_dict(model), "optimizer": adam.state_dict()}

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupNCCL(TIMEOUT) if on_gpu else ProcessGroupGloo(TIMEOUT),
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
    )
    try:
        with manager:
            replicate_across_groups(manager, model)
            train_with(manager, OptimizerWrapper(manager, adam), model, info, text, options)
    except Exception as error:
        if manager.is_draining():  # the launcher ends this worker, too: no other world is for it
            raise SystemExit(f"asked to end, and the group is lost: {error}") from error
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one worker of a replica group.")
    parser.add_argument("--steps", type=int, default=500, help="updates to commit")
    parser.add_argument("--print-every", type=int, default=20, help="so many of them")
    parser.add_argument("--step-s", type=float, default=0.0, help="time to add to each step")
    parser.add_argument("--survive", action="store_true", help="the loss of a peer, in process")
    options = parser.parse_args()

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # What is initialized here, a survivor keeps, and nobody waits for the worker that replaces one.
    text = read_text()
    torch.optim.Adam([torch.zeros(1)])  # loads what torch loads at the first use only
    info = get_worker_info()
    while True:
        try:
            train(info, text, options)
            break
        except Exception as error:  # a worker of this group is lost
            if not options.survive:
                raise
            print(f"pid {os.getpid()} lost its group: {error}", flush=True)
        leave_world()
        info = get_worker_info()  # waits until the lost worker was replaced
    leave_world()


if __name__ == "__main__":
    main()
