"""Reads the data of a job whose samples are counted, and writes down what each step has used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tools.chaos.options import WorkerOptions
from tools.demo.events import EventLog, SamplesRead
from tools.demo.orphans import die_with_parent
from torchft_svc.client import (
    DistributedDataParallel,
    ElasticDataLoader,
    ElasticSampler,
    Manager,
)

WIDTH = 16


class Counted(Dataset[Any]):
    """Samples that follow from their index: features of shape (`WIDTH`,), and the index."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        dice = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=dice, dtype=torch.float64), index


def batches_of(options: WorkerOptions) -> tuple[int, int] | None:
    """The length of the data set and the global batch size; None: samples are not counted."""
    if "samples" not in options.program:
        return None
    return options.program["samples"], options.program["batch"]


class CountedReader:
    """The data of a worker, through an `ElasticDataLoader`."""

    def __init__(self, options: WorkerOptions, manager: Manager, log: EventLog) -> None:
        size, batch = options.program["samples"], options.program["batch"]
        data = Counted(size)
        torchs = DataLoader(
            data,
            sampler=ElasticSampler(data, seed=options.seed),
            num_workers=options.program.get("workers", 0),
            worker_init_fn=lambda _: die_with_parent(),
        )
        self.loader = ElasticDataLoader(
            manager,
            torchs,
            global_batch_size=batch,
            microbatch_size=options.program.get("microbatch"),
            recover_within_step=options.program.get("recovers", False),
        )
        self._manager, self._log = manager, log
        self._batches: Iterator[Any] = iter(())

    def backward(self, model: DistributedDataParallel, pause: Callable[[], None]) -> float:
        """Make the passes of the step, with a pause in each; the loss of this worker's samples."""
        used: list[int] = []
        total = 0.0
        device = next(model.parameters()).device
        is_whole = False
        while not is_whole:
            features, indices = self._read()
            with self.loader.accumulate(model):
                loss = model(features.to(device)).square().mean()
                pause()
                # A group without a sample may get some of those of one that is lost in the step.
                counts = self.loader.weight > 0
                used += indices.tolist() if counts else ()
                # Before it is summed: from then on the others can commit it, whatever happens here.
                self._write_down(used)
                torch.autograd.backward(loss * self.loader.weight)
            is_whole = self.loader.ends_step
            total += loss.item() * len(indices) if counts else 0.0
        self._write_down(used)  # once more, as the quorum can be another one within a step
        return total / max(1, len(used))

    def _read(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        return batch

    def _write_down(self, used: list[int]) -> None:
        # A step that has shown the program its members is not summed again without one of them.
        members = self._manager._sums.wait_for_members()
        quorum = self._manager.last_quorum()
        self._log.write(
            SamplesRead,
            step=self._manager.committed_step(),
            quorum_id=0 if quorum is None else quorum.quorum_id,
            rank=members.participating_rank,
            num_participants=members.num_participants,
            epoch=self.loader.position.epoch,
            indices=" ".join(map(str, used)),
        )
