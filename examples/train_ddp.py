"""Trains a character model on Python's own sources, in as many replica groups as you start.

    lighthouse --bind :29510
    TORCHFT_LIGHTHOUSE=localhost:29510 REPLICA_GROUP_ID=0 python examples/train_ddp.py
    TORCHFT_LIGHTHOUSE=localhost:29510 REPLICA_GROUP_ID=1 python examples/train_ddp.py

Kill any of them and start it again: it heals from the others. Only when all were stopped does the
checkpoint matter. One group per launcher works too: ``torchrun --nproc-per-node=1 ...``.
"""

import argparse
import os
import socket
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchft_svc.client import DistributedDataParallel, Manager, OptimizerWrapper

CONTEXT, BATCH, WIDTH, VOCABULARY = 16, 64, 64, 128


def read_text() -> Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)


def draw_batch(text: Tensor, step: int, part: int) -> tuple[Tensor, Tensor]:
    """Contexts (BATCH, CONTEXT) and next characters (BATCH,): a function of step and group only,
    so a discarded step draws the same data again, and nothing of it must be saved."""
    generator = torch.Generator().manual_seed(step * 1_000 + part)
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT)], text[starts[:, 0] + CONTEXT]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one replica group.")
    parser.add_argument("--steps", type=int, default=1000, help="updates to commit")
    parser.add_argument("--checkpoint", type=Path, help="file to resume from and to save to")
    parser.add_argument("--save-every", type=int, default=100, help="updates between checkpoints")
    parser.add_argument("--ready-file", type=Path, help="file to create after the first update")
    options = parser.parse_args()
    if options.ready_file:
        options.ready_file.unlink(missing_ok=True)  # that of a former run

    text = read_text()
    net = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 256),
        nn.ReLU(),
        nn.Linear(256, VOCABULARY),
    )
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)

    def state_dict() -> dict[str, object]:
        return {"model": net.state_dict(), "optimizer": adam.state_dict()}

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        net.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(state_dict=state_dict, load_state_dict=load_state_dict)
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        load_state_dict(saved["training"])
        manager.load_state_dict(saved["manager"])
        print(f"resumed at step {manager.current_step()}", flush=True)
    optimizer = OptimizerWrapper(manager, adam)
    model = DistributedDataParallel(manager, net)

    while (step := manager.current_step()) < options.steps:
        optimizer.zero_grad()  # requests the quorum of this step
        part = manager.participating_rank() or 0  # None while this group heals
        contexts, targets = draw_batch(text, step, part)
        loss = functional.cross_entropy(model(contexts), targets)
        loss.backward()  # averages the gradients over the participating groups
        optimizer.step()  # commits, or changes nothing

        if options.ready_file and manager.current_step() > step:
            options.ready_file.touch()
        step = manager.current_step()
        if step % 20 == 0:
            groups = manager.num_participants()
            print(f"step {step} loss {loss.item():.3f} groups {groups}", flush=True)
        if options.checkpoint and step % options.save_every == 0 and part == 0:
            # Write another file and rename it, so that a kill never leaves a partial checkpoint.
            # In containers the process ids of all groups may be the same.
            beside = options.checkpoint.with_suffix(f".{socket.gethostname()}-{os.getpid()}")
            torch.save({"training": state_dict(), "manager": manager.state_dict()}, beside)
            beside.replace(options.checkpoint)
    manager.shutdown()


if __name__ == "__main__":
    main()
