"""A process group whose collectives are those of a `Manager`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ReduceOp

from torchft_svc.client.gradients.reducer import check_running
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.operations import CompletedWork, result_of
from torchft_svc.client.reduce.reduction import ManagedWork
from torchft_svc.errors import ConfigError, RequestRefused

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

# Also raised for the first collective of torch's wrapper with default arguments.
_ONLY_REDUCTIONS = (
    "groups that come and go support reductions only; torch's DistributedDataParallel "
    "needs init_sync=False, broadcast_buffers=False and find_unused_parameters=True"
)


class ManagedProcessGroup(ProcessGroup):
    """A process group of the groups that contribute in the manager's step.

    Only reductions work across groups that join and leave: ``allreduce``,
    ``allreduce_coalesced``, and ``barrier``, which does not wait. The manager latches their errors;
    they are never raised.

    Args:
        averages_sums: reduce sums of floats as averages. For callers that divide by the size of the
            group themselves, and read it only once: torch's own ``DistributedDataParallel``, with
            ``init_sync=False``, ``broadcast_buffers=False``, and ``find_unused_parameters=True``,
            without which it changes the layout of its buckets after the first step. Then a step in
            which nothing was reduced, or the backward pass was not finished, is discarded.
    """

    layout = ""  # only torch's wrapper knows it
    parameters = ()  # likewise
    names = ()
    has_averaged = False  # not known

    def __init__(self, manager: Manager, *, averages_sums: bool = False) -> None:
        super().__init__()
        self._manager = manager
        self._averages_sums = averages_sums
        if averages_sums:
            manager.register_reducer(self)

    def _configure(self, members: Members) -> None:
        """Raise an error: the manager configures its own process group.

        Raises:
            RequestRefused: always.
        """
        raise RequestRefused("a managed process group gets its members from its manager")

    def abort(self) -> None:
        """Do nothing: the manager aborts its own process group."""

    def errored(self) -> Exception | None:
        """The first error of the manager's step."""
        return self._manager.errored()

    def replaced(self) -> list[str]:
        """Return none: the program's wrapper is not known."""
        return []

    def unsummed(self) -> list[tuple[str, nn.Parameter]]:
        """Return none: the program's wrapper is not known."""
        return []

    def average_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return None: the program owns the memory of the averages."""
        return None

    def begin_step(self) -> None:
        """Do nothing; see `Reducing.begin_step`."""

    def settle_step(self) -> Exception | None:
        """See `Reducing.settle_step`; the manager tracks passes that sum something."""
        return None

    def rank(self) -> int:
        """This group's index among those that contribute; 0 if it does not."""
        return self._manager.participating_rank() or 0

    def size(self) -> int:
        """The number of groups that contribute in this step, after a wait for the quorum.

        1 without a quorum.
        """
        # Torch 2.7 looks up the group of a mesh by its size, which has to be 1 then.
        return self._manager.num_participants() or 1

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        if name == "barrier":
            return CompletedWork()
        if name not in ("allreduce", "allreduce_coalesced"):
            raise ConfigError("collective", name, _ONLY_REDUCTIONS)
        if self._averages_sums:
            check_running(
                self._manager
            )  # otherwise torch's wrapper would continue without averages
        op = _operation(args, kwargs)
        tensors = result_of(name, args, kwargs)
        works = [
            self._manager.allreduce(tensor, reduce_op=self._meant(op, tensor)) for tensor in tensors
        ]
        if all(work.is_completed() for work in works):
            return CompletedWork(tensors)

        def finish() -> list[torch.Tensor]:
            for work in works:
                work.wait()
            return tensors

        return ManagedWork(finish)

    def _meant(self, op: ReduceOp.RedOpType, tensor: torch.Tensor) -> ReduceOp.RedOpType:
        averages = self._averages_sums and op == ReduceOp.SUM and tensor.is_floating_point()
        return ReduceOp.AVG if averages else op


def _operation(args: Any, kwargs: Any) -> ReduceOp.RedOpType:
    """The operation, from an options object or the operation itself."""
    given = args[1] if len(args) > 1 else kwargs.get("opts", kwargs.get("op", ReduceOp.SUM))
    op = getattr(given, "reduceOp", given)
    found: ReduceOp.RedOpType = getattr(op, "op", op)
    return found
