"""Averages the buckets of torch's own DistributedDataParallel, from a communication hook."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.autograd import Variable

from torchft_svc.client.reduce.collectives import NO_GRAPH
from torchft_svc.client.reduce.operations import Kind

# Torch changes the order of the gradients in its buckets after the first backward pass, and with
# static_graph=True, whose first buckets come only when the pass is over, after the second one.
_FIRST_PASSES = 1
_FIRST_PASSES_OF_STATIC_GRAPH = 2


class BucketHook:
    """Launches one average after another while a backward pass runs, and waits at its end.

    Torch's wrapper waits for the futures in a callback at the end of the pass. Torch runs these
    callbacks in the order in which they were queued, and queues the wrapper's when the last bucket
    was launched; so one that is queued with the first bucket completes the futures before that.

    ``allreduce`` starts the average of a bucket as an operation of a kind. The order of gradients
    in a bucket is not visible here, only the passes after which torch changes it. Groups before and
    after such a change must not sum with each other, so their operations have different kinds.
    """

    def __init__(self, allreduce: Callable[[torch.Tensor, Kind], dist.Work]) -> None:
        self._allreduce = allreduce
        self._graph = NO_GRAPH  # of the last pass
        self._num_passes = 0  # that have ended
        self._num_first = _FIRST_PASSES
        self._launched: list[tuple[torch.Tensor, dist.Work, torch.futures.Future[torch.Tensor]]]
        self._launched = []

    def keep_order(self) -> None:
        """Regard all passes as alike: a wrapper with ``find_unused_parameters`` keeps its order."""
        self._num_first = 0

    def average(self, bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See `Manager.allreduce_grad`."""
        in_order = self._num_passes < self._num_first
        work = self._allreduce(bucket, Kind.FIRST_BUCKET if in_order else Kind.BUCKET)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        graph = torch._C._current_graph_task_id()
        is_new = graph != self._graph
        self._graph = graph
        if is_new:
            self._launched = []  # what is left of a pass that an exception ended
        if graph == NO_GRAPH or torch._C._current_autograd_node() is None:
            # No gradient is computed any more: nothing can overlap, and the caller waits at once.
            if graph != NO_GRAPH and is_new:
                self._num_first = _FIRST_PASSES_OF_STATIC_GRAPH
                self._num_passes += 1
            work.wait()
            future.set_result(bucket)
            return future
        if is_new:
            Variable._execution_engine.queue_callback(self._end_pass)
        self._launched.append((bucket, work, future))
        return future

    def _end_pass(self) -> None:
        """Complete all futures of the pass; an exception that ends the pass skips this."""
        self._num_passes += 1
        launched, self._launched = self._launched, []
        for bucket, work, future in launched:
            work.wait()
            future.set_result(bucket)
