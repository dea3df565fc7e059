"""Trains a character model on Python's own sources, in as many replica groups as you start.

    lighthouse --bind :29510
    TORCHFT_LIGHTHOUSE=localhost:29510 REPLICA_GROUP_ID=0 python examples/train_ddp.py
    TORCHFT_LIGHTHOUSE=localhost:29510 REPLICA_GROUP_ID=1 python examples/train_ddp.py

Kill any of them and start it again: it heals from the others. Only when all were stopped does the
checkpoint matter. With ``--device=cuda:0`` they use NCCL, which needs another device for each group
of a host. One group per launcher works too: ``torchrun --nproc-per-node=1 ...``.
"""

import argparse
import os
import socket
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from torchft_svc.client import (
    DistributedDataParallel,
    ElasticDataLoader,
    ElasticSampler,
    Manager,
    OptimizerWrapper,
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)

CONTEXT, GLOBAL_BATCH, WIDTH, VOCABULARY = 16, 128, 64, 128
NUM_EPOCHS = 1000


def read_text() -> Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Contexts of shape (CONTEXT,) and the characters that follow them."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        return self.text[start : start + CONTEXT], self.text[start + CONTEXT]


def make_process_group(device: torch.device) -> ProcessGroup:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return ProcessGroupNCCL()
    return ProcessGroupGloo()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one replica group.")
    parser.add_argument("--steps", type=int, default=1000, help="updates to commit")
    parser.add_argument("--checkpoint", type=Path, help="file to resume from and to save to")
    parser.add_argument("--save-every", type=int, default=100, help="updates between checkpoints")
    parser.add_argument("--device", type=torch.device, default="cpu", help="such as cuda:0")
    parser.add_argument("--ready-file", type=Path, help="file to create after the first update")
    options = parser.parse_args()
    if options.ready_file:
        options.ready_file.unlink(missing_ok=True)  # that of a former run

    windows = Windows(read_text())
    net = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 256),
        nn.ReLU(),
        nn.Linear(256, VOCABULARY),
    ).to(options.device)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)

    def state_dict() -> dict[str, object]:
        return {"model": net.state_dict(), "optimizer": adam.state_dict()}

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        net.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    pg = make_process_group(options.device)
    manager = Manager(pg=pg, state_dict=state_dict, load_state_dict=load_state_dict)
    # A step has the same samples, however many groups there are; none is lost or used twice.
    torchs = DataLoader(windows, sampler=ElasticSampler(windows))
    loader = ElasticDataLoader(manager, torchs, global_batch_size=GLOBAL_BATCH)
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=options.device, weights_only=True)
        load_state_dict(saved["training"])
        manager.load_state_dict(saved["manager"])
        loader.load_state_dict(saved["data"])
        print(f"resumed at step {manager.current_step()}", flush=True)
    optimizer = OptimizerWrapper(manager, adam)
    model = DistributedDataParallel(manager, net)

    batches = (batch for _ in loader.epochs(NUM_EPOCHS) for batch in loader)
    while (step := manager.current_step()) < options.steps:
        contexts, targets = next(batches)  # begins the step: requests its quorum
        optimizer.zero_grad()
        logits = model(contexts.to(options.device))
        loss = functional.cross_entropy(logits, targets.to(options.device))
        loss.backward()  # averages the gradients over the participating groups
        optimizer.step()  # commits, or changes nothing: then the same samples come again

        if options.ready_file and manager.current_step() > step:
            options.ready_file.touch()
        step = manager.current_step()
        if step % 20 == 0:
            groups = manager.num_participants()
            print(f"step {step} loss {loss.item():.3f} groups {groups}", flush=True)
        is_first = manager.participating_rank() == 0
        if options.checkpoint and step % options.save_every == 0 and is_first:
            # Write another file and rename it, so that a kill never leaves a partial checkpoint.
            # In containers the process ids of all groups may be the same.
            beside = options.checkpoint.with_suffix(f".{socket.gethostname()}-{os.getpid()}")
            saved = {"manager": manager.state_dict(), "data": loader.state_dict()}
            torch.save({"training": state_dict(), **saved}, beside)
            beside.replace(options.checkpoint)
    manager.shutdown()


if __name__ == "__main__":
    main()
