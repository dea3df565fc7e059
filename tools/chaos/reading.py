"""Reads the data of a job whose samples are counted, and writes down what each step has used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tools.chaos.options import WorkerOptions
from tools.demo.events import EventLog, SamplesRead
from tools.demo.orphans import die_with_parent
from torchft_svc.client import ElasticDataLoader, ElasticSampler, Manager

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
        self.loader = ElasticDataLoader(manager, torchs, global_batch_size=batch)
        self._manager, self._log = manager, log
        self._batches: Iterator[Any] = iter(())

    def read_step(self) -> torch.Tensor:
        """The features of this worker's samples of the step, which begins with that."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        features, indices = batch
        rank, size = self._manager.participating_rank(), self._manager.num_participants()
        quorum = self._manager.last_quorum()
        self._log.write(
            SamplesRead,
            step=self._manager.committed_step(),
            quorum_id=0 if quorum is None else quorum.quorum_id,
            rank=rank,
            num_participants=size,
            epoch=self.loader.position.epoch,
            indices=" ".join(map(str, indices.tolist() if self.loader.weight else ())),
        )
        return features  # type: ignore[no-any-return]
