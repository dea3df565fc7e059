"""Averages gradients while the backward pass goes on."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from torchft_svc.client.gradients.buckets import Bucket, describe_tensors
from torchft_svc.client.reduce.collectives import NO_GRAPH, unfinished_pass
from torchft_svc.client.reduce.reduction import Reduction
from torchft_svc.errors import ConfigError, RequestRefused

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

SPARSE = "sparse gradients cannot be averaged across groups; use sparse=False"
_TOO_LATE = (
    "a parameter that is used inside a reentrant checkpoint and outside of it got a gradient after "
    "its sum had begun; give torch.utils.checkpoint use_reentrant=False"
)
_STALE = (
    "the forward pass ran before zero_grad() (or start_quorum()), which may replace the "
    "weights by those of another group: call zero_grad() first, then the model, then backward()"
)
_ENDED = (
    "the manager that the model was wrapped for was shut down, so nothing would be averaged: wrap "
    "the model again for the manager that trains now; to train without one, call the module that "
    "was wrapped"
)
_OVERWRITTEN = (
    "the averages across groups were overwritten in the same backward pass: the parameters are "
    "reduced by another wrapper, too, such as torch's DistributedDataParallel; use one of them"
)


class Reducer:
    """Listens to the parameters' gradients and sums full buckets, always in the same order.

    ``hands_out``: gradients become views of the buckets' memory instead of copies. ``names`` are
    those of the parameters, by id.

    No failed sum raises into the backward pass: what fails is latched by the manager, and the rest
    of the step's sums are left out. A pass that an exception ends stays open until `settle`, which
    the manager calls before each vote.
    """

    def __init__(
        self,
        manager: Manager,
        buckets: list[Bucket],
        *,
        hands_out: bool,
        names: Mapping[int, str],
    ) -> None:
        self._manager = manager
        self._buckets = buckets
        self._hands_out = hands_out
        self._names = names
        self.layout = describe_tensors([bucket.parameters for bucket in buckets])
        self.enabled = True
        self._active = False
        self._failed = False
        self._missing: list[int] = []
        self._next = 0
        self.graph = NO_GRAPH
        self._pass: weakref.ref[_Pass] | None = None
        self._is_nested = False
        self._arrived: set[int] = set()
        self._reductions: list[Reduction] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._make_hook(index)
            )
            for index, bucket in enumerate(buckets)
            for parameter in bucket.parameters
        ]
        manager.register_reducer(self)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """See `Reducing.parameters`."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    def prepare(self) -> None:
        """A forward pass begins; a backward pass that an exception ended is cleaned up."""
        if not _runs_backward():  # there it computes again what was not kept
            self._give_up_broken()

    @property
    def first(self) -> torch.Tensor:
        """See `Launching`."""
        return self._buckets[0].memory

    def settle(self) -> Exception | None:
        """See `Reducing.settle`; memory that an operation may still write to is given up."""
        if not self._active:
            return None
        for bucket in self._buckets[: self._next]:
            bucket.renew()
        self._reductions = []
        self._active = False
        return unfinished_pass()

    def _give_up_broken(self) -> None:
        """If an exception has ended the pass, another may begin unless sums were launched: what it
        would sum is not what the other groups do."""
        if self._active and (self._pass is None or self._pass() is None):
            error = self.settle()
            if error is not None and not self._manager.has_fresh_step():
                self._manager.report_error(error)

    def watch(self, outputs: Any) -> None:
        """The pass begins where ``outputs`` get their gradients, and ends with that graph.

        A reentrant checkpoint runs a pass of its own inside, whose end is not that of all.
        """
        watch_outputs(self._manager, outputs, self._make_output_hook())

    def _make_hook(self, index: int) -> Callable[[nn.Parameter], None]:
        # Torch keeps a parameter's hooks where Python's collector does not look: with a reference
        # of their own they would keep the manager, the model and all of its gradients for ever.
        reducer = weakref.ref(self)

        def hook(parameter: nn.Parameter) -> None:
            listener = reducer()
            if listener is None or not listener.enabled or listener._manager.has_ended():
                return  # the module may be trained without it, or for another manager
            listener._count_down(index, parameter)

        return hook

    def _make_output_hook(self) -> Callable[[], None]:
        reducer = weakref.ref(self)

        def hook() -> None:
            listener = reducer()
            if listener is not None and listener.enabled:
                listener._give_up_broken()
                if not listener._active:
                    listener._begin()

        return hook

    def _count_down(self, index: int, parameter: nn.Parameter) -> None:
        graph = torch._C._current_graph_task_id()
        if graph != self.graph:
            self._give_up_broken()
        if not self._active:
            self._begin()
        elif graph != self.graph:
            self._is_nested = True  # a parameter may get more than one gradient: sum in the end
        key = id(parameter)
        if key in self._arrived:
            if index < self._next:
                raise ConfigError("use_reentrant", True, _TOO_LATE)
            return
        grad = parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            raise ConfigError(self._names[key], str(grad.layout), SPARSE)
        self._arrived.add(key)
        self._missing[index] -= 1
        if self._missing[index] == 0 and not self._is_nested:
            self._launch_full()

    def _begin(self) -> None:
        self._active = True
        self._failed = False
        self.graph = torch._C._current_graph_task_id()
        self._is_nested = False
        self._arrived = set()
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._next = 0
        self._reductions = []
        running = _Pass(self._finish)
        self._pass = weakref.ref(running)
        Variable._execution_engine.queue_callback(running)

    def _launch_full(self) -> None:
        """Launch the full buckets that are next in the order which all groups keep."""
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            if self._next == 0 and not self._manager._take_turn(self, is_last=False):
                return  # after those of another wrapper
            self._launch_next()

    def is_launching(self) -> bool:
        """See `Launching`."""
        return self._active and 0 < self._next < len(self._buckets)

    def launch_rest(self, graph: int) -> None:
        """See `Launching`; parameters that the pass did not use count as zero."""
        while self.graph == graph and self._next < len(self._buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._failed:
            return
        scale = self._manager.reduction_scale()
        if scale is None:
            self._failed = True
            return
        with torch.no_grad():
            bucket.fill(scale)
        reduction = self._manager.launch_sum(bucket.memory)
        if reduction is None:
            self._failed = True
            bucket.renew()
            return
        self._reductions.append(reduction)

    def _finish(self) -> None:
        """The backward pass is over: parameters that it did not use count as zero.

        An interrupt in here leaves the pass open, as one in the pass does.
        """
        if self._next == 0:
            self._manager._take_turn(self, is_last=True)
        self.launch_rest(self.graph)
        for bucket, reduction in zip(self._buckets, self._reductions, strict=False):
            if not reduction.wait():
                bucket.renew()
            elif self._hands_out:
                bucket.hand_out()
            else:
                bucket.copy_out()
        self._reductions = []
        self._active = False
        # What is called now, comes after what other wrappers do at the end of the pass.
        check = functools.partial(self._check_owned, self._versions())
        Variable._execution_engine.queue_callback(check)

    def _versions(self) -> list[Any]:
        """They change when somebody writes to the gradients."""
        if self._hands_out:
            return [bucket.memory._version for bucket in self._buckets]
        return [bucket.copied_versions() for bucket in self._buckets]

    def _check_owned(self, versions: list[Any]) -> None:
        """The pass is over for all: the gradients still have to be what was handed out."""
        if self._manager.errored() is not None:
            return
        replaced = self._hands_out and not all(b.holds_gradients() for b in self._buckets)
        if replaced or self._versions() != versions:
            self._manager.report_error(ConfigError("module", "wrapped twice", _OVERWRITTEN))


def watch_outputs(
    manager: Manager, outputs: Any, on_backward: Callable[[], None] | None = None
) -> None:
    """Look when a backward pass comes to a tensor in ``outputs``, and call ``on_backward``.

    That pass raises `RequestRefused` if the manager has put other weights in place since the
    forward pass: torch would complain of some tensor, or, of gathered weights, of nothing.
    """
    version = manager.weights_version()
    known = weakref.ref(manager)

    def hook(_: torch.Tensor) -> None:
        manager = known()
        if manager is not None and manager.weights_version() != version:
            raise RequestRefused(_STALE)
        check_running(manager)
        if on_backward is not None:
            on_backward()

    for output in tree_leaves(outputs):
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            output.register_hook(hook)  # type: ignore[no-untyped-call]


def check_running(manager: Manager | None) -> None:
    """Raise `RequestRefused` if nothing is averaged any more because the manager has ended."""
    if manager is None or manager.has_ended():
        raise RequestRefused(_ENDED)


class _Pass:
    """Called at the end of a backward pass; dropped by torch if an exception ends that."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __call__(self) -> None:
        self._on_end()


def _runs_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != NO_GRAPH)
