"""A replica group that reads small images through torch's loader, or through ours around it.

Each line of its input, ``KIND STEPS``, is answered as JSON: the milliseconds of each step, and the
CPU time of a step in this process and in the worker processes of the loaders.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from torchft_svc.client import (
    DistributedDataParallel,
    DistributedSampler,
    ElasticDataLoader,
    ElasticSampler,
    Manager,
    OptimizerWrapper,
)

NUM_IMAGES, SIDE, PADDING = 20_000, 32, 4
NUM_MICROBATCHES = 4  # of a group


_WHOLE = ("ours", "seeded")  # a group's share of a step is one batch


class Images(Dataset[Any]):
    """Random images, cropped and mirrored at random, as for CIFAR."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(0)
        side = SIDE + 2 * PADDING
        self._images = torch.randint(
            256, (500, 3, side, side), dtype=torch.uint8, generator=dice
        )  # the rest are the same again: what is measured is how they are read

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        top, left, mirrored = torch.randint(2 * PADDING, (3,)).tolist()
        image = self._images[index % len(self._images), :, top : top + SIDE, left : left + SIDE]
        if mirrored % 2:
            image = image.flip(-1)
        return (image.float() - 127.5) / 64, index % 10


class ReadingTrainer:
    """Trains one model with any of the loaders, in the same loop."""

    def __init__(self, flags: argparse.Namespace) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        net = nn.Sequential(
            nn.Conv2d(3, flags.channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(flags.channels, flags.channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(flags.channels * 64, 10),
        )
        sgd = torch.optim.SGD(net.parameters(), lr=0.01)
        self.manager = Manager(
            state_dict=lambda: {"model": net.state_dict(), "optimizer": sgd.state_dict()},
            load_state_dict=lambda state: (
                net.load_state_dict(state["model"]),
                sgd.load_state_dict(state["optimizer"]),
            ),  # type: ignore[arg-type]
            lighthouse_addr=flags.lighthouse,
            replica_id=str(flags.group),
        )
        self._optimizer = OptimizerWrapper(self.manager, sgd)
        self._model = DistributedDataParallel(self.manager, net)
        data, workers = Images(), flags.workers
        sampler = DistributedSampler(data, flags.group, flags.groups)
        self._torchs = DataLoader(
            data, flags.batch, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
        )
        self._ours = {
            name: ElasticDataLoader(
                self.manager,
                DataLoader(data, sampler=ElasticSampler(data), num_workers=workers),
                global_batch_size=flags.batch * flags.groups,
                microbatch_size=None if name in _WHOLE else flags.batch // NUM_MICROBATCHES,
                seed_samples=name == "seeded",
                ordered_sums=name == "ordered",
                name=name,
            )
            for name in (*_WHOLE, "micro", "ordered")
        }
        self._iterators: dict[str, Iterator[Any]] = {}

    def measure(self, kind: str, num_steps: int) -> list[float]:
        """Milliseconds of each step; the loop is the same for all loaders."""
        times = []
        begun_at = time.perf_counter()
        for _ in range(num_steps):
            self._optimizer.zero_grad()
            self._make_passes(kind)
            self._optimizer.step()
            now = time.perf_counter()
            times.append(1000 * (now - begun_at))
            begun_at = now
        return times

    def _make_passes(self, kind: str) -> None:
        loader = None if kind == "torch" else self._ours[kind]
        is_whole = False
        while not is_whole:
            images, labels = self._next_batch(kind)
            is_whole = loader is None or loader.ends_step
            if loader is None or kind in _WHOLE:
                torch.autograd.backward(functional.cross_entropy(self._model(images), labels))
                continue
            with loader.accumulate(self._model):
                loss = functional.cross_entropy(self._model(images), labels)
                torch.autograd.backward(loss * loader.weight)

    def _next_batch(self, kind: str) -> Any:
        loader: Any = self._ours.get(kind, self._torchs)
        again: Callable[[], Iterator[Any]] = lambda: iter(loader)  # noqa: E731
        if kind not in self._iterators:
            self._iterators[kind] = again()
        batch = next(self._iterators[kind], None)
        if batch is None:
            self._iterators[kind] = again()
            batch = next(self._iterators[kind])
        return batch


def _cpu_s() -> float:
    """The CPU time of this process, and of the worker processes of its loaders."""
    workers = multiprocessing.active_children()
    return time.process_time() + sum(
        sum(psutil.Process(each.pid).cpu_times()[:2]) for each in workers
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    for name in ("group", "groups", "batch", "workers", "channels"):
        parser.add_argument(f"--{name}", type=int, required=True)
    trainer = ReadingTrainer(parser.parse_args())
    print("ready", flush=True)
    for line in sys.stdin:
        kind, steps = line.split()
        since_s = _cpu_s()
        times = trainer.measure(kind, int(steps))
        cpu_ms = 1000 * (_cpu_s() - since_s) / len(times)
        print(json.dumps({"times": times, "cpu_ms": cpu_ms}), flush=True)
    trainer.manager.shutdown()


if __name__ == "__main__":
    main()
