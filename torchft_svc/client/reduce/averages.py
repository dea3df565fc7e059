"""Implements `Manager.allreduce` on copies, so that abandoned operations cannot corrupt tensors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.operations import CompletedWork
from torchft_svc.client.reduce.collectives import Collectives, neutral_element
from torchft_svc.client.reduce.operations import Kind
from torchft_svc.core.step import Participation
from torchft_svc.errors import ConfigError


class Averages:
    """Implements `Manager.allreduce` over ``collectives``."""

    def __init__(self, pg: ProcessGroup, collectives: Collectives) -> None:
        self.collectives = collectives
        self._pg = pg
        self._works: list[ManagedWork] = []

    @property
    def has_any(self) -> bool:
        """Whether a tensor was reduced in this step."""
        return bool(self._works)

    def begin(self, epoch: int) -> None:
        """Begin a new step."""
        self._works = []
        self.collectives.begin(epoch)

    def check(self, tensor: torch.Tensor, quantized: bool, op: ReduceOp.RedOpType) -> None:
        """Refuse invalid arguments, on every group alike.

        Raises:
            ConfigError: the message says what to change.
        """
        if quantized:
            raise ConfigError("should_quantize", True, "quantized reductions are not supported yet")
        if op == ReduceOp.AVG:
            if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                raise ConfigError("tensor", tensor.dtype, "whole numbers cannot be averaged")
        else:
            neutral_element(op, tensor.dtype)

    def skip(self, tensor: torch.Tensor) -> dist.Work:
        """Leave the tensor unchanged, because the step cannot be committed."""
        return CompletedWork(tensor)

    def allreduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType,
        participation: Participation,
        kind: Kind,
    ) -> dist.Work:
        """Start reducing a copy of ``tensor``; the work's ``wait`` copies the result back."""
        average = op == ReduceOp.AVG
        sent_op = ReduceOp.SUM if average else op
        copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if participation.participating_rank is None:
            copy.fill_(neutral_element(sent_op, tensor.dtype))
        elif average:
            # Dividing before the sum saves a pass after it.
            torch.div(tensor, participation.num_participants, out=copy)
        else:
            copy.copy_(tensor)
        reduction = self.collectives.launch(copy, sent_op, kind, op)
        if reduction is None:
            return self.skip(tensor)

        def finish() -> torch.Tensor:
            if reduction.wait():
                tensor.copy_(copy)
            return tensor

        work = ManagedWork(finish)
        self._works.append(work)
        return work

    def finish(self) -> None:
        """Wait for all reductions of this step."""
        for work in self._works:
            work.wait()
        self.collectives.finish()
        self._works = []
        self._pg.tidy()


class ManagedWork(dist.Work):
    """What `Manager.allreduce` returns: its error is latched by the manager, never raised."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        super().__init__()
        self._finish: Callable[[], Any] | None = finish
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor holds the result, or the step's error is latched; always True."""
        if self._finish is not None:
            value = self._finish()
            self._finish = None  # not before: a wait that is interrupted may be repeated
            self._future.set_result(value)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has been called."""
        return self._finish is None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that holds the tensor. Waits for it first, because an error of the step does not
        reach the waiters of a future."""
        self.wait()
        return self._future
