"""Replica groups that read through an `ElasticDataLoader`, and a ledger of what they have used."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from support.training import DEADLINE_S, make_manager
from tools.chaos.samples import ReadPart, SampleLedger
from torchft_svc.client import DistributedDataParallel, Optimizer
from torchft_svc.client.data import ElasticDataLoader, ElasticSampler

SIZE, BATCH = 50, 12


class Numbers(Dataset[Any]):
    """A regression whose samples are known by their index."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        features = torch.tensor([index % 7, index % 11, 1.0], dtype=torch.float64) / 10
        return features, torch.tensor([float(index % 5)], dtype=torch.float64), index


class ReadingGroup:
    """A group of one worker with a float64 model, which writes down what its steps have used."""

    def __init__(
        self, address: str, name: str, ledger: SampleLedger | None = None, **options: Any
    ) -> None:
        torch.manual_seed(sum(map(ord, name)))  # nothing but healing could make them equal
        self.name, self.ledger = name, ledger
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        kept = {each: options.pop(each) for each in _MANAGER if each in options}
        self.manager = make_manager(
            address, name, state_dict=self.state, load_state_dict=self.load, **kept
        )
        self.loader = self.make_loader(options)
        self.optimizer = Optimizer(self.manager, self.inner)
        self.parallel = DistributedDataParallel(self.manager, self.model)
        self.batches: Iterator[Any] = iter(())
        self.num_discarded = 0
        self.losses: list[float] = []

    def make_loader(self, options: dict[str, Any]) -> Any:
        """The loader, of a data set with indices."""
        data = Numbers(options.pop("size", SIZE))
        sampler = ElasticSampler(data, seed=options.pop("order_seed", 5))
        torchs = DataLoader(data, sampler=sampler, num_workers=options.pop("num_workers", 0))
        options.setdefault("global_batch_size", BATCH)
        return ElasticDataLoader(self.manager, torchs, **options)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.inner.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def weights(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])

    def next_batch(self) -> Any:
        """The next batch, also over the end of an epoch."""
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)

    def backward(self, fails: bool = False) -> None:
        """The passes of one step, and what they have used; ``fails``: it cannot be committed."""
        used: list[int] = []
        while True:
            features, targets, indices = self.next_batch()
            if not used:
                self.optimizer.zero_grad()
            used += indices.tolist()
            with self.loader.accumulate(self.parallel):
                loss = (self.parallel(features) - targets).square().mean() * self.loader.weight
                loss.backward()
            if self.loader.ends_step:
                break
        if fails:
            self.manager.report_error(RuntimeError("on purpose"))
        self._write_down(used)

    def _write_down(self, used: list[int]) -> None:
        quorum = self.manager.last_quorum()
        if self.ledger is None or quorum is None or self.manager.errored() is not None:
            return
        at = self.loader.position
        rank = self.manager.participating_rank()
        with _LOCK:
            self.ledger.add_read(
                ReadPart(
                    step=self.manager.committed_step(),
                    quorum_id=quorum.quorum_id,
                    rank=rank,
                    size=self.manager.num_participants(),
                    epoch=at.epoch,
                    indices=() if self.loader.weight == 0.0 else tuple(used),
                )
            )

    def step(self, *, fails: bool = False) -> bool:
        """One step; whether it was committed."""
        self.backward(fails)
        committed = self.optimizer.step()
        self.num_discarded += not committed
        quorum = self.manager.last_quorum()
        if committed and self.ledger is not None and quorum is not None:
            with _LOCK:
                self.ledger.add_commit(self.manager.current_step() - 1, quorum.quorum_id)
        return committed

    def until(self, step: int) -> ReadingGroup:
        """Train until ``step`` is committed."""
        deadline = time.monotonic() + DEADLINE_S
        while self.manager.current_step() < step:
            self.step()
            assert time.monotonic() < deadline, f"{self.name} does not get to step {step}"
        return self

    def meets(self, num: int, until: Callable[[], bool] = lambda: True) -> None:
        """Train until a step of ``num`` contributing groups is committed."""
        deadline = time.monotonic() + DEADLINE_S
        while not (self.step() and self.manager.num_participants() == num):
            assert time.monotonic() < deadline, f"{self.name} never met {num} groups"

    def __enter__(self) -> ReadingGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.shutdown()
        self.loader.close()


class AveragingGroup(ReadingGroup):
    """A group that also averages a tensor by hand, in 8-bit numbers, and adds that to its state.

    It is summed up over the microbatches, each with its ``loader.weight``. ``when``: its average
    begins before the last pass of a step, or after it.
    """

    def __init__(self, *args: Any, when: str, number_format: str, **options: Any) -> None:
        self.memory = torch.zeros(300)
        self.when, self.number_format = when, number_format
        super().__init__(*args, **options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "memory": self.memory}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.memory.copy_(state["memory"])

    def next_batch(self) -> Any:
        batch = super().next_batch()
        self.seen += self.loader.weight * batch[0].float().mean(0).repeat(100) * _SPREAD
        if self.when == "before" and self.loader.ends_step:
            self.works.append(self.manager.allreduce(self.seen, self.number_format))
        return batch

    def backward(self, fails: bool = False) -> None:
        self.seen = torch.zeros_like(self.memory)
        self.works: list[Any] = []
        super().backward(fails)
        if self.when == "after":
            self.works.append(self.manager.allreduce(self.seen, self.number_format))

    def step(self, *, fails: bool = False) -> bool:
        committed = super().step(fails=fails)
        if committed:
            self.memory += self.seen
        return committed


# Numbers of different size in each block.
_SPREAD = torch.linspace(0.5, 2.0, 300)
_MANAGER = (
    "use_async_quorum",
    "world_size_mode",
    "min_replica_size",
    "steady_steps",
    "max_retries",
)
_LOCK = threading.Lock()


@contextlib.contextmanager
def reading_groups(
    address: str, names: str, ledger: SampleLedger | None = None, **options: Any
) -> Iterator[list[ReadingGroup]]:
    """Groups with one letter each as their name."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(ReadingGroup(address, name, ledger, **options)) for name in names
        ]
