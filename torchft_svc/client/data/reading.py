"""Reads pieces of a data set through torch's DataLoader, which runs ahead by a plan (rule D4).

torch's loader asks its batch sampler for indices whenever a batch is taken, so the plan can change
while its worker processes live. Batches that they have read for a plan that is no more are dropped.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from torchft_svc.client.data.order import Order
from torchft_svc.client.data.plan import Piece
from torchft_svc.client.data.seeds import SampleSeeds, host_states_kept

# What is sent to a worker process: the epoch, and the indices of a batch.
Request = tuple[int, list[int]]


class PieceReader:
    """Reads the pieces that the program needs, and meanwhile those that it will probably need.

    Args:
        loader: everything but its sampler and batch size is used.
        order_of: the order of an epoch.
        seed: of the random numbers of each sample (None: they are left alone).
    """

    def __init__(
        self, loader: DataLoader[Any], order_of: Callable[[int], Order], seed: int | None
    ) -> None:
        self._has_workers = loader.num_workers > 0
        self._plan = _Plan(order_of)
        self._loader = _planned(loader, self._plan, seed)
        self.dataset = loader.dataset
        self._batches: Iterator[Any] | None = None
        self.num_dropped = 0  # batches that were read in vain

    def read(self, piece: Piece, ahead: Callable[[], Iterator[Piece]]) -> Any:
        """The batch of ``piece``; ``ahead()``: the pieces that will probably follow it."""
        issued = self._plan.issued
        if self._batches is None:
            self._plan.upcoming = chain((piece,), ahead())
            self._batches = self._begin_loading()
        elif not self._has_workers:
            self._plan.upcoming = iter((piece,))  # read in this process, and not ahead
        elif not issued or issued[0] != piece:
            self._plan.upcoming = chain((piece,), ahead())
            self._drop(len(issued))
        batch = next(self._batches)
        issued.popleft()
        return batch

    def _drop(self, num: int) -> None:
        assert self._batches is not None
        for _ in range(num):
            self._plan.issued.popleft()
            self.num_dropped += 1
            with contextlib.suppress(Exception):  # of a sample that nobody has asked for
                next(self._batches)

    def _begin_loading(self) -> Iterator[Any]:
        with torch.device("cpu"):  # torch draws the seed of the processes with a generator of it
            return iter(self._loader)

    def close(self) -> None:
        """End the worker processes; reading begins them again."""
        self._batches = None
        self._plan.issued.clear()


class _Plan:
    """The batch sampler of torch's loader: pieces in the order in which they are read.

    ``issued`` are those that the loader was asked for, and has not returned.
    """

    def __init__(self, order_of: Callable[[int], Order]) -> None:
        self._order_of = order_of
        self.upcoming: Iterator[Piece] = iter(())
        self.issued: deque[Piece] = deque()

    def __iter__(self) -> Iterator[Request]:
        while True:
            piece = next(self.upcoming)
            self.issued.append(piece)
            yield piece.epoch, self._order_of(piece.epoch).indices(piece.begin, piece.end)


def _planned(loader: DataLoader[Any], plan: _Plan, seed: int | None) -> DataLoader[Any]:
    """A loader like ``loader`` that reads by ``plan``."""
    own = torch.Generator("cpu")
    own.seed()  # the workers of two groups must not draw the same numbers
    dataset = _RequestedDataset(loader.dataset, seed, loader.num_workers > 0)
    return loader_like(loader, dataset, plan, own)


def loader_like(
    loader: DataLoader[Any],
    dataset: Dataset[Any],
    requests: Iterable[Any],
    generator: torch.Generator,
) -> DataLoader[Any]:
    """Return a loader like ``loader`` that asks ``dataset`` for one of ``requests`` after another.

    ``generator``: one of the host, for the seeds of its worker processes.
    """
    return DataLoader(
        dataset,
        batch_sampler=requests,
        generator=generator,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )


def read_samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Return the samples of ``indices``, at once if the data set can read several."""
    get_all = getattr(dataset, "__getitems__", None)
    if callable(get_all):
        samples: list[Any] = get_all(indices)
        return samples
    return [dataset[index] for index in indices]


class _RequestedDataset(Dataset[Any]):
    """Reads the samples of a request from a data set of the program."""

    def __init__(self, dataset: Any, seed: int | None, in_worker: bool) -> None:
        self._dataset, self._seed, self._in_worker = dataset, seed, in_worker

    def __getitems__(self, request: Request) -> list[Any]:
        epoch, indices = request
        if self._seed is None:
            return read_samples(self._dataset, indices)
        with contextlib.nullcontext() if self._in_worker else host_states_kept():
            return self._read_seeded(SampleSeeds(self._seed, epoch), indices)

    def _read_seeded(self, seeds: SampleSeeds, indices: list[int]) -> list[Any]:
        samples = []
        for index in indices:
            seeds.seed_sample(index)
            samples.append(self._dataset[index])
        return samples

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the data set, for ``worker_init_fn``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)
