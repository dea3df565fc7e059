"""Replica groups as threads of one process, with real servers, for the tests of the client."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import TCPStore

from torchft_svc.client import DistributedDataParallel, Manager, Optimizer
from torchft_svc.coordination import LighthouseServer
from torchft_svc.testing.transport_contract import bits

T = TypeVar("T")
DEADLINE_S = 60.0
# Nothing here waits as long as these, unless a machine stalls: each is far longer than that.
TIMEOUT = timedelta(seconds=30)
_JOIN_TIMEOUT_MS = _HEARTBEAT_TIMEOUT_MS = 20_000


@contextlib.contextmanager
def lighthouse(min_replicas: int = 1, join_timeout_ms: int = _JOIN_TIMEOUT_MS) -> Iterator[str]:
    """The address of a lighthouse in this process."""
    with LighthouseServer(
        "127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=join_timeout_ms,
        heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT_MS,
    ) as server:
        yield server.address()


def together(*programs: Callable[[], T]) -> list[T]:
    """Run all programs at once; their results, or the first one's error."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            results[index] = programs[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(programs))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for error in errors.values():
        raise error
    assert len(results) == len(programs), f"only {sorted(results)} came to an end"
    return [results[index] for index in range(len(programs))]


def make_manager(address: str, name: str, **options: Any) -> Manager:
    """The manager of a group in this process; ``options`` go before what it has otherwise."""
    settings: dict[str, Any] = {
        "lighthouse_addr": address,
        "replica_id": name,
        "in_process": True,
        "timeout": TIMEOUT,
        "quorum_timeout": TIMEOUT,
    }
    return Manager(**{**settings, **options})


class Trainer:
    """A replica group of one worker with a small model; ``seed`` makes its weights and its data."""

    def __init__(self, address: str, name: str, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.name = name
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.inner = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.data = torch.Generator().manual_seed(seed)
        states = {"load_state_dict": self.load_state_dict, "state_dict": self.state_dict}
        self.manager = make_manager(address, name, **{**states, **options})
        self.optimizer = Optimizer(self.manager, self.inner)
        self.parallel = DistributedDataParallel(self.manager, self.model, bucket_cap_mb=0.0001)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def loss(self) -> torch.Tensor:
        inputs = torch.randn(3, 4, generator=self.data)
        return self.parallel(inputs).square().mean()

    def backward(self) -> None:
        """Begin a step and compute the gradients."""
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> bool:
        """One whole step; whether it was committed."""
        self.backward()
        return self.optimizer.step()

    def steps(self, num: int) -> list[bool]:
        return [self.step() for _ in range(num)]

    def meets(self, num_groups: int) -> bool:
        """Step until a quorum has ``num_groups``; whether that step was committed.

        A group that is new does not hold up those that train, so they may be a few steps ahead. A
        step that went on without a question, and in vain, does not count: the others wait for this
        group's question.
        """
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.backward()
            self.manager.wait_quorum()
            quorum = self.manager.last_quorum()
            is_in_vain = self.manager._worker.round.keeps_quorum
            committed = self.optimizer.step()
            is_whole = quorum is not None and quorum.replica_world_size == num_groups
            if is_whole and (committed or not is_in_vain):
                return committed
        raise AssertionError(f"{self.name} never met {num_groups} groups")

    def until(self, step: int) -> None:
        """Train until ``step`` is committed."""
        deadline = time.monotonic() + DEADLINE_S
        while self.manager.current_step() < step:
            self.step()
            assert time.monotonic() < deadline, f"{self.name} does not get to step {step}"

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.shutdown()


@contextlib.contextmanager
def trainers(address: str, num: int, **options: Any) -> Iterator[list[Trainer]]:
    """``num`` groups called a, b, c, ... with different weights."""
    with contextlib.ExitStack() as stack:
        names = "abcdef"[:num]
        made = together(
            *(
                lambda name=name, seed=seed: Trainer(address, name, seed, **options)
                for seed, name in enumerate(names)
            )
        )
        for trainer in made:
            stack.enter_context(trainer)
        yield made


@contextlib.contextmanager
def workers(
    address: str,
    name: str,
    num: int,
    seed: int = 0,
    of_rank: Mapping[int, dict[str, Any]] | None = None,
    **options: Any,
) -> Iterator[list[Trainer]]:
    """One group of ``num`` workers, each with a model, and maybe options, of its own."""
    own = of_rank or {}
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"store_addr": "localhost", "store_port": store.port, "world_size": num}
    with contextlib.ExitStack() as stack:
        made = together(
            *(
                lambda rank=rank: Trainer(
                    address, name, seed + rank, rank=rank, **place, **options, **own.get(rank, {})
                )
                for rank in range(num)
            )
        )
        for trainer in made:
            stack.enter_context(trainer)
        yield made
    del store


def in_step(until: int, *trainers: Trainer) -> None:
    """Train until all have committed the same step, ``until`` or a later one.

    None is done before the others: who was left behind, by a busy machine, has somebody to heal
    from.
    """
    deadline = time.monotonic() + DEADLINE_S
    num = len(trainers)
    while True:
        steps = [trainer.manager.current_step() for trainer in trainers]
        if min(steps) == max(steps) >= until:
            return
        assert time.monotonic() < deadline, f"they do not get to step {until} together: {steps}"
        together(*(lambda trainer=trainer: trainer.meets(num) for trainer in trainers))


def assert_identical(trainers: Sequence[Trainer]) -> None:
    """I3: groups at the same step hold bitwise identical state."""
    first, *others = trainers
    for other in others:
        assert other.manager.state_dict() == first.manager.state_dict()
        assert bits(other.state_dict()) == bits(first.state_dict())
