"""All collectives of torch: where each writes its result, and whether it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.host.uninterruptible import SLICE

# The first argument holds both the input and the result.
IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "barrier"})
# The first argument holds the result only; so does a receive.
INTO_OUTPUT = frozenset(
    {
        "_allgather_base",
        "_reduce_scatter_base",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "alltoall",
        "alltoall_base",
        "gather",
        "recv",
        "recv_anysource",
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced",
        "scatter",
    }
)
# Gloo reports the end of these only in ``wait``.
HIDDEN_BY_GLOO = frozenset(
    {
        "_reduce_scatter_base",
        "recv",
        "recv_anysource",
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced",
        "send",
    }
)
COLLECTIVES = IN_PLACE | INTO_OUTPUT
# Torch 2.12 renamed some of them. Both names exist here; the older one is passed on.
OLDER_NAMES: Mapping[str, str] = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def result_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that collective ``name`` writes its result to, in order."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return flat(first) if name != "barrier" else []


def flat(tensors: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, in order."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for part in tensors or () for tensor in flat(part)]


def ends_within(work: Any, timeout: timedelta) -> bool:
    """Whether ``work`` ended within ``timeout``; if not, it continues.

    Raises:
        RuntimeError: the work failed; other errors of the work are raised as they are.
    """
    try:
        work.wait(timeout)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    # It may have ended between the timeout and this check: raise its error if it has failed.
    work.wait(SLICE)
    return True


class WrappedWork(dist.Work):
    """Changes a part of what ``work`` does; the rest is as there."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def synchronize(self) -> None:
        self._work.synchronize()

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that holds the tensors; RuntimeError if there is none."""
        future: torch.futures.Future[Any] = self._work.get_future()
        return future


class CompletedWork(dist.Work):
    """A collective that has already ended; ``value`` is its result."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self._value = value
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(value)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future
