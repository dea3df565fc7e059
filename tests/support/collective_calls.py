"""Every collective on small tensors that hold the member's rank + 1."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

NAMES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
    "send_and_recv",
    "barrier",
)


class Calls:
    """Each method gives what its collective has left in this member's tensors."""

    def __init__(
        self, pg: Any, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.pg = pg
        self.rank, self.size = pg.rank(), pg.size()
        self._options = {"device": device, "dtype": dtype}

    def all(self) -> dict[str, list[float] | str]:
        """The results of all by name; an error is a string."""
        found: dict[str, list[float] | str] = {}
        for name in NAMES:
            try:
                found[name] = getattr(self, name)()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found

    def allreduce(self) -> list[float]:
        tensor = self._own()
        return _done(self.pg.allreduce([tensor]), tensor)

    def allreduce_coalesced(self) -> list[float]:
        tensors = [self._own(), self._own(1)]
        return _done(self.pg.allreduce_coalesced(tensors), *tensors)

    def allgather(self) -> list[float]:
        outputs = [self._zeros(2) for _ in range(self.size)]
        return _done(self.pg.allgather([outputs], [self._own()]), *outputs)

    def allgather_base(self) -> list[float]:
        output = self._zeros(2 * self.size)
        return _done(self.pg._allgather_base(output, self._own()), output)

    def allgather_coalesced(self) -> list[float]:
        outputs = [[self._zeros(2), self._zeros(1)] for _ in range(self.size)]
        work = self.pg.allgather_coalesced(outputs, [self._own(), self._own(1)])
        return _done(work, *[part for parts in outputs for part in parts])

    def allgather_into_tensor_coalesced(self) -> list[float]:
        output = self._zeros(2 * self.size)
        work = self.pg.allgather_into_tensor_coalesced([output], [self._own()])
        return _done(work, output)

    def reduce_scatter(self) -> list[float]:
        output = self._zeros(2)
        parts = [self._own() for _ in range(self.size)]
        return _done(self.pg.reduce_scatter([output], [parts]), output)

    def reduce_scatter_base(self) -> list[float]:
        output = self._zeros(2)
        return _done(self.pg._reduce_scatter_base(output, self._own(2 * self.size)), output)

    def reduce_scatter_tensor_coalesced(self) -> list[float]:
        output = self._zeros(2)
        source = self._own(2 * self.size)
        return _done(self.pg.reduce_scatter_tensor_coalesced([output], [source]), output)

    def alltoall(self) -> list[float]:
        outputs = [self._zeros(2) for _ in range(self.size)]
        return _done(self.pg.alltoall(outputs, [self._own() for _ in outputs]), *outputs)

    def alltoall_base(self) -> list[float]:
        output = self._zeros(self.size)
        return _done(self.pg.alltoall_base(output, self._own(self.size), [], []), output)

    def broadcast(self) -> list[float]:
        tensor = self._own()
        return _done(self.pg.broadcast([tensor]), tensor)

    def gather(self) -> list[float]:
        outputs = [[self._zeros(2) for _ in range(self.size)]] if self.rank == 0 else []
        work = self.pg.gather(outputs, [self._own()])
        return _done(work, *[part for parts in outputs for part in parts])

    def reduce(self) -> list[float]:
        tensor = self._own()
        found = _done(self.pg.reduce([tensor]), tensor)
        return found if self.rank == 0 else []

    def scatter(self) -> list[float]:
        output = self._zeros(2)
        parts = [[self._own() for _ in range(self.size)]] if self.rank == 0 else []
        return _done(self.pg.scatter([output], parts), output)

    def send_and_recv(self) -> list[float]:
        tensor = self._own()
        if self.rank == 0:
            return _done(self.pg.send([tensor], 1, 0), tensor)
        if self.rank == 1:
            return _done(self.pg.recv([tensor], 0, 0), tensor)
        return []

    def barrier(self) -> list[float]:
        return _done(self.pg.barrier())

    def _own(self, numel: int = 2) -> torch.Tensor:
        return torch.full((numel,), self.rank + 1, **self._options)

    def _zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, **self._options)


def expected(rank: int, size: int) -> dict[str, list[float]]:
    """What plain arithmetic says."""
    total = sum(range(1, size + 1))
    everyone = [float(r + 1) for r in range(size)]
    gathered = [value for value in everyone for _ in range(2)]
    return {
        "allreduce": [total] * 2,
        "allreduce_coalesced": [total] * 3,
        "allgather": gathered,
        "allgather_base": gathered,
        "allgather_coalesced": [value for value in everyone for _ in range(3)],
        "allgather_into_tensor_coalesced": gathered,
        "reduce_scatter": [total] * 2,
        "reduce_scatter_base": [total] * 2,
        "reduce_scatter_tensor_coalesced": [total] * 2,
        "alltoall": gathered,
        "alltoall_base": everyone,
        "broadcast": [1.0] * 2,
        "gather": gathered if rank == 0 else [],
        "reduce": [total] * 2 if rank == 0 else [],
        "scatter": [1.0] * 2,
        "send_and_recv": [1.0] * 2 if rank < 2 else [],
        "barrier": [],
    }


def _done(work: Any, *tensors: torch.Tensor) -> list[float]:
    work.wait(timedelta(seconds=20))
    return [value for tensor in tensors for value in tensor.flatten().tolist()]
