"""Trains one replica group of the demo: the file to copy for a training script of your own.

The fault tolerance is in five places, marked (1) to (5). The rest is plain PyTorch, and the event
log, through which the demo watches and checks what every group does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from tools.demo.events import Committed, Discarded, EventLog, Finished, Joined, PhaseBegan
from tools.demo.fingerprint import fingerprint
from tools.demo.model import MODEL_SIZES, CharTransformer
from tools.demo.text import VOCABULARY, Corpus, Windows
from torchft_svc.client import (
    DistributedDataParallel,
    ElasticDataLoader,
    ElasticSampler,
    Manager,
    OptimizerWrapper,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """``group`` names the replica group, ``steps`` the number of updates after which it leaves."""

    group: int
    incarnation: int
    steps: int
    seed: int
    model_size: str
    global_batch_size: int
    learning_rate: float


def train(options: TrainOptions, log: EventLog, stop: threading.Event) -> None:
    """Train until ``options.steps`` updates are committed or ``stop`` is set."""
    # Every start begins with other weights: only healing can make this group equal to the others.
    torch.manual_seed(options.seed + 1000 * options.group + options.incarnation)
    size = MODEL_SIZES[options.model_size]
    windows = Windows(Corpus(), size.context)
    model = CharTransformer(size, VOCABULARY)
    adamw = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    def state_dict() -> dict[str, object]:  # (1) what a group that joins needs
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = Manager(  # (2) it finds the lighthouse in the environment: TORCHFT_LIGHTHOUSE
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        replica_id=f"group-{options.group}",
    )
    optimizer = OptimizerWrapper(manager, adamw)  # (3)
    parallel_model = DistributedDataParallel(manager, model)  # (4)
    # (5) A step uses the next samples, divided among the groups that are there. If it is discarded,
    # they come again; a group that joins goes on where the others are.
    torchs = DataLoader(windows, sampler=ElasticSampler(windows, seed=options.seed))
    loader = ElasticDataLoader(manager, torchs, global_batch_size=options.global_batch_size)
    batches = (batch for _ in loader.epochs(sys.maxsize) for batch in loader)
    log.write(Joined)

    while (step := manager.current_step()) < options.steps and not stop.is_set():
        log.write(PhaseBegan, step=step, phase="forward")
        inputs, targets = next(batches)
        optimizer.zero_grad()
        logits = parallel_model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        log.write(PhaseBegan, step=step, phase="backward")
        loss.backward()  # type: ignore[no-untyped-call]

        log.write(PhaseBegan, step=step, phase="commit")
        participating, num_participants = manager.is_participating(), manager.num_participants()
        committed = optimizer.step()

        log.write(PhaseBegan, step=step, phase="record")
        digest = fingerprint(model.state_dict(), adamw.state_dict())
        if committed:
            log.write(
                Committed,
                step=manager.current_step(),
                loss=loss.item(),
                digest=digest,
                num_participants=num_participants,
                participating=participating,
            )
        else:
            log.write(Discarded, step=manager.current_step(), digest=digest)

    log.write(Finished, step=manager.current_step())
    manager.shutdown()


@click.command()
@click.option("--group", type=click.IntRange(0), default=0, show_default=True)
@click.option("--incarnation", type=click.IntRange(0), default=0, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--model-size", type=click.Choice(sorted(MODEL_SIZES)), default="small")
@click.option("--global-batch-size", type=click.IntRange(1), default=24, show_default=True)
@click.option("--learning-rate", type=float, default=2e-3, show_default=True)
@click.option("--events", type=click.Path(path_type=Path), default=Path(os.devnull))
def main(events: Path, **options: object) -> None:
    """Train one replica group; SIGTERM lets it finish its step and leave."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    parsed = TrainOptions(**options)  # type: ignore[arg-type]
    log = EventLog(events, parsed.group, parsed.incarnation)
    try:
        train(parsed, log, stop)
    finally:
        log.close()


if __name__ == "__main__":
    main()
