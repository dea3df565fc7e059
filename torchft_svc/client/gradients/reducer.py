"""Averages gradients during the backward pass."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from torchft_svc.client.gradients.buckets import Bucket, describe_tensors, plain_name
from torchft_svc.client.gradients.early_updates import guard_updates, raise_early_update
from torchft_svc.client.gradients.module_watch import KindWatch, ModuleWatch
from torchft_svc.client.reduce.collectives import NO_GRAPH, uncompiled, unfinished_pass
from torchft_svc.client.reduce.reduction import Again, CurrentParameter, Reduction
from torchft_svc.errors import ConfigError, RequestRefused

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

# Called for each gradient: without the way through torch's modules.
_present_graph = torch._C._current_graph_task_id
_is_executed = torch._C._will_engine_execute_node
_STRIDED = torch.strided
_AS_IT_IS = contextlib.nullcontext()
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
_OTHER_KIND = (
    "the buckets of gradients were made for the parameter as it was when the module was wrapped: "
    "wrap the module again after .to(), .bfloat16(), or another change of its parameters"
)
_OVERWRITTEN = (
    "the averages across groups were overwritten in the same backward pass: the parameters are "
    "reduced by another wrapper, too, such as torch's DistributedDataParallel; use one of them"
)


class Reducer:
    """Hooks the parameters' gradients, and sums full buckets, always in the same order.

    ``hands_out``: gradients become views of the buckets' memory instead of copies. ``module`` has
    the parameters in ``buckets``; ``names`` are their names by id, in the model's order.

    A failed sum does not raise into the backward pass: the manager latches the error, and the other
    sums of the step are skipped. A pass that an exception ends stays open until `settle_step`,
    which the manager calls before each vote.
    """

    def __init__(
        self,
        manager: Manager,
        buckets: list[Bucket],
        *,
        hands_out: bool,
        module: nn.Module,
        names: Mapping[int, str],
    ) -> None:
        self._manager = manager
        self._sums = manager._sums
        self._module = module
        self._buckets = buckets
        self._hands_out = hands_out
        self._names = names
        parts = [bucket.parameters for bucket in buckets]
        places = self._places = {
            id(each): (bucket, index)
            for bucket in buckets
            for index, each in enumerate(bucket.parameters)
        }
        self.layout = describe_tensors(
            parts, [[names[id(each)] for each in part] for part in parts]
        )
        self._module_watch = ModuleWatch(module, lambda: places)
        self._kind_watch = KindWatch(self.parameters)
        self.enabled = True
        self._active = False
        self._failed = False
        self._missing: list[int] = []
        self._next = self._num_launched = 0  # of buckets, and of their sums
        self.graph = NO_GRAPH
        self._pass: weakref.ref[functools.partial[None]] | None = None
        self._outer: _OuterPass | None = None
        self._is_nested = False
        self._is_alone = False  # the pass, in a quorum of this group
        self.has_averaged = False
        self._arrived: dict[int, int] = {}  # versions of the parameters whose gradients are there
        self._versions_before: dict[int, int] = {}  # see `_register_hooks`
        self._reductions: list[Reduction] = []
        hooks = [
            handle
            for index, bucket in enumerate(buckets)
            for parameter in bucket.parameters
            for handle in self._register_hooks(index, parameter)
        ]
        self._remove_hooks = weakref.finalize(self, _remove_hooks, hooks)
        self._remove_hooks.atexit = False
        known = _reducers.get(module)
        before = None if known is None else known()
        if before is not None and (before._manager is manager or before._manager.has_ended()):
            before.retire()
        _reducers[module] = weakref.ref(self)
        guard_updates(self)
        manager.register_reducer(self)

    def retire(self) -> None:
        """Sum nothing any more, because another reducer of the same module replaces this one.

        A program that wraps a module again may still have the wrapper before, if only in the
        traceback of an error.
        """
        self.enabled = False
        self.settle_step()
        self._remove_hooks()
        self._sums.remove_reducer(self)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    @property
    def names(self) -> list[str]:
        return [name for key, name in self._names.items() if key in self._places]

    def walk_parameters(self) -> list[CurrentParameter]:
        """See `Walking`."""
        return [
            CurrentParameter(plain_name(name), parameter, id(parameter) in self._places)
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad or id(parameter) in self._places
        ]

    @uncompiled
    def prepare(self) -> None:
        """Clean up, before a forward pass, a backward pass that an exception has ended."""
        # During a pass, checkpointing recomputes a forward pass.
        if _present_graph() == NO_GRAPH:
            self._give_up_broken()

    @property
    def first(self) -> torch.Tensor:
        return self._buckets[0].memory

    def replaced(self) -> list[str]:
        """See `Reducing.replaced`."""
        gone = self._places.keys() - set(map(id, self._module.parameters()))
        return [name for key, name in self._names.items() if key in gone]

    def unsummed(self) -> list[tuple[str, nn.Parameter]]:
        """See `Reducing.unsummed`."""
        return self._module_watch.find_unsummed()

    def average_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """See `Reducing.average_of`."""
        if not self.has_averaged or self._is_alone:
            return None
        place = self._places.get(id(parameter))
        return None if place is None else place[0].views[place[1]]

    def begin_step(self) -> None:
        """See `Reducing.begin_step`."""
        self.has_averaged = False

    def settle_step(self) -> Exception | None:
        """See `Reducing.settle_step`; replaces memory that an operation may still write to."""
        if not self._active:
            return None
        for bucket in self._buckets[: self._next]:
            bucket.renew()
        self._reductions = []
        self._active = False
        return unfinished_pass()

    def _give_up_broken(self) -> None:
        """Clean up if an exception has ended the pass.

        If sums were launched it is an error of the step: those of another pass would not match the
        other groups' sums.
        """
        if self._active and (self._pass is None or self._pass() is None):
            error = self.settle_step()
            if error is not None and not self._manager.has_fresh_step():
                self._manager.report_error(error)

    @uncompiled
    def watch(self, outputs: Any) -> None:
        """Begin a pass when ``outputs`` get their gradients in a pass that will accumulate into a
        parameter; it ends with that graph.

        A reentrant checkpoint runs a nested pass, whose end is not the end of the whole pass.
        """
        watch_outputs(outputs, self._make_output_hook(make_check(self._manager)))

    def _register_hooks(self, index: int, parameter: nn.Parameter) -> Iterator[RemovableHandle]:
        """Register hooks of ``parameter``, after the program's, which may change its gradient."""
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if any(getattr(hook, "__module__", "") != __name__ for hook in hooks.values()):
            reducer = weakref.ref(self)

            @uncompiled
            def record(parameter: nn.Parameter) -> None:
                listener = reducer()
                if listener is not None:
                    listener._versions_before[id(parameter)] = parameter._version

            yield _register_first(parameter, record)
        yield parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            self._make_hook(index)
        )

    def _make_hook(self, index: int) -> Callable[[nn.Parameter], None]:
        # Python's garbage collector does not see the hooks of a parameter: with a strong reference
        # they would keep the manager, the model and all of its gradients forever.
        reducer = weakref.ref(self)

        @uncompiled
        def hook(parameter: nn.Parameter) -> None:
            listener = reducer()
            if listener is not None and listener.enabled:
                listener._count_down(index, parameter)

        return hook

    def _make_output_hook(self, check: Callable[[], None]) -> Callable[[], None]:
        reducer = weakref.ref(self)

        def hook() -> None:
            listener = reducer()
            if listener is not None:
                listener._reach_outputs(check)

        return hook

    def _reach_outputs(self, check: Callable[[], None]) -> None:
        """Begin a pass that has reached the outputs of the module.

        ``check`` raises if its graph is stale.

        Only a pass that will accumulate into a parameter counts: torch.autograd.grad, or
        ``backward(inputs=...)`` for other tensors, leave the gradients alone.
        """
        if self.enabled:
            self._give_up_broken()
        if self._active or self._will_accumulate():
            check()
            if self.enabled and not self._active:
                self._begin_pass(_present_graph())
        elif self.enabled and (self._outer is None or self._outer.is_over()):
            # All parameters may be inside reentrant checkpoints: then they are in nested graphs,
            # and their first gradient shows that this is a backward pass.
            running = self._queue_end()
            self._outer = _OuterPass(_present_graph(), weakref.ref(running), check)

    def _will_accumulate(self) -> bool:
        """Whether the present pass will accumulate into one of the parameters.

        Nearly always the first one that is asked decides.
        """
        with torch.enable_grad():
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    node = parameter.view_as(parameter).grad_fn
                    if node is None:  # frozen
                        continue
                    accumulation = node.next_functions[0][0]
                    assert accumulation is not None
                    try:
                        if _is_executed(accumulation):
                            return True
                    except RuntimeError:  # torch.autograd.grad returns this parameter's gradient
                        return False
        return False

    def _count_down(self, index: int, parameter: nn.Parameter) -> None:
        graph = _present_graph()
        if graph != self.graph or not self._active:
            if self._manager.has_ended():
                return  # the module may be used without it, or with another manager
            self._enter_pass(graph)
        key = id(parameter)
        arrived = self._arrived
        if key in arrived:
            if index < self._next:
                raise ConfigError("use_reentrant", True, _TOO_LATE)
            return
        grad = parameter.grad
        if grad is not None and grad.layout is not _STRIDED:
            raise ConfigError(self._names[key], str(grad.layout), SPARSE)
        arrived[key] = self._versions_before.get(key, parameter._version)
        missing = self._missing
        missing[index] -= 1
        if not missing[index] and not self._is_nested:
            self._launch_full()

    def _enter_pass(self, graph: int) -> None:
        """Begin the pass of ``graph`` if it is a new one, or record that it is nested."""
        if graph != self.graph:
            self._give_up_broken()
        if not self._active:
            outer, self._outer = self._outer, None
            if outer is None or outer.is_over():
                self._begin_pass(graph)
            else:
                outer.check()
                self._begin_pass(outer.graph, outer.running)
        if graph != self.graph:
            self._is_nested = True  # a parameter may get several gradients: sum at the end

    def _begin_pass(
        self, graph: int, running: weakref.ref[functools.partial[None]] | None = None
    ) -> None:
        """Begin the pass of ``graph``; ``running``: what torch calls at its end, if it is queued
        already, or else at the end of the present graph."""
        changed = self._kind_watch.find_changed()
        if changed is not None:
            parameter, how = changed
            error = ConfigError(self._names[id(parameter)], how, _OTHER_KIND)
            self._manager.report_error(error)
            raise error
        self._active = True
        self._failed = False
        self.graph = graph
        self._is_nested = False
        self._is_alone = False
        self._arrived = {}
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._next = self._num_launched = 0
        self._reductions = []
        self._pass = weakref.ref(self._queue_end()) if running is None else running

    def _queue_end(self) -> functools.partial[None]:
        """Make torch call `_end_graph` at the end of the present graph.

        It drops the returned function if the pass raises.
        """
        running = functools.partial(self._end_graph, _present_graph())
        Variable._execution_engine.queue_callback(running)
        return running

    def _end_graph(self, graph: int) -> None:
        if self._outer is not None and self._outer.graph == graph:
            self._outer = None
        if self._active and self.graph == graph:
            self._finish()

    def _launch_full(self) -> None:
        """Launch full buckets, in the order that all groups keep."""
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            if self._next == 0 and not self._sums.take_turn(self, is_last=False):
                return  # after the sums of another wrapper
            self._launch_next()

    def is_launching(self) -> bool:
        return self._active and 0 < self._next < len(self._buckets)

    def flush_buckets(self, graph: int) -> None:
        """See `Launching`; parameters that the pass did not use count as zero."""
        while self.graph == graph and self._next < len(self._buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._failed:
            return
        scale = self._sums.scale()
        if scale is None:
            self._failed = True
            return
        self._is_alone = scale == 1.0 and self._sums.is_alone()
        if self._is_alone:
            self._launch_wish(bucket)
            return
        # In a backward pass it is off already, unless the pass makes a graph.
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            bucket.fill(scale)
        self._num_launched += 1
        reduction = self._sums.launch_sum(bucket.memory, bucket.wish)
        if reduction is None:
            self._failed = True
            bucket.renew()
            return
        self._reductions.append(reduction)

    def _launch_wish(self, bucket: Bucket) -> None:
        """Sum nothing but the wish, in place of ``bucket``.

        The gradients are their averages, and stay where they are: copies of all of them in the
        buckets would double their memory.
        """
        if bucket.wish is None:
            return
        self._num_launched += 1
        reduction = self._sums.launch_sum(bucket.wish, bucket.wish)
        self._failed = reduction is None
        if reduction is None:
            bucket.renew()
        else:
            self._reductions.append(reduction)

    @uncompiled
    def _finish(self) -> None:
        """End the backward pass: parameters that it did not use count as zero.

        An interrupt in this function leaves the pass open, like one in the pass.
        """
        self._check_unchanged()
        if self._next == 0:
            self._sums.take_turn(self, is_last=True)
        self.flush_buckets(self.graph)
        again = Again.NO
        if self._may_launch_again():
            again = self._sums.sum_again(self._num_launched)
        if again is not Again.NO:
            self._launch_again(is_now=again is Again.NOW)
        if again is not Again.LATER:
            self._end_sums()

    def _end_sums(self) -> None:
        """Wait for the sums of the pass that has ended, and give the parameters their averages."""
        for bucket, reduction in zip(self._buckets, self._reductions, strict=False):
            if not reduction.wait():
                self._failed = True
                bucket.renew()
            elif self._is_alone:
                continue
            elif self._hands_out:
                bucket.hand_out()
            else:
                bucket.copy_out()
        self.has_averaged = not self._failed
        if self._failed or self._is_alone:
            # Other workers of the group may have averages for all parameters. A program may reduce
            # its gradients inside the group, so each worker needs gradients of the same ones.
            for bucket in self._buckets:
                bucket.zero_unused()
        self._reductions = []
        self._active = False
        # A callback that is queued now runs after those of other wrappers at the end of the pass.
        check = functools.partial(self._check_owned, self._versions())
        Variable._execution_engine.queue_callback(check)

    def guarded_names(self) -> Mapping[int, str]:
        """See `Guarded`."""
        return (
            {}
            if self._manager.has_ended()
            else {id(p): self._names[id(p)] for p in self.parameters}
        )

    def refuse_update(self, name: str) -> NoReturn:
        """See `Guarded`."""
        raise_early_update(self._manager, name)

    def _check_unchanged(self) -> None:
        """Raise `ConfigError` if a parameter has changed since its gradient arrived.

        The step cannot be committed: the weights are not those of the others any more. A forward
        pass may change them in place, also one that a checkpoint repeats in this pass, but that is
        before the gradient arrives.
        """
        arrived = self._arrived
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                version = parameter._version
                if arrived.get(id(parameter), version) != version:
                    self.refuse_update(self._names[id(parameter)])

    def _may_launch_again(self) -> bool:
        """Whether no sum has succeeded, and all gradients are as the pass has left them."""
        if self._reductions and self._reductions[0].wait():
            return False
        return all(bucket.can_fill_again for bucket in self._buckets)

    def _launch_again(self, *, is_now: bool) -> None:
        """Launch all sums again, at the end of this pass or of a later one."""
        for bucket in self._buckets[: self._next]:
            bucket.renew()
        self._failed = False
        self._reductions = []
        self._next = self._num_launched = 0
        self._active = is_now
        if is_now:
            self.flush_buckets(self.graph)

    def _versions(self) -> list[Any]:
        """Version counters of the gradients; a write changes them."""
        if self._hands_out and not self._is_alone:
            return [bucket.memory._version for bucket in self._buckets]
        return [bucket.copied_versions() for bucket in self._buckets]

    @uncompiled
    def _check_owned(self, versions: list[Any]) -> None:
        """Report an error if another wrapper has overwritten the gradients meanwhile."""
        if self._manager.errored() is not None:
            return
        hands_out = self._hands_out and not self._is_alone
        replaced = hands_out and not all(bucket.holds_gradients() for bucket in self._buckets)
        if replaced or self._versions() != versions:
            self._manager.report_error(ConfigError("module", "wrapped twice", _OVERWRITTEN))


def _register_first(
    parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]
) -> RemovableHandle:
    """Register ``hook`` so that it is called before those that are there."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks = parameter._post_accumulate_grad_hooks
    *before, last = hooks.items()
    hooks.clear()
    hooks.update([last, *before])
    return handle


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


# The last one of each wrapped module.
_reducers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Reducer]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _OuterPass:
    """A pass through the module's outputs that may turn out to be a backward pass.

    Torch drops ``running`` at the end of the pass; ``check`` raises if the graph is stale.
    """

    graph: int
    running: weakref.ref[functools.partial[None]]
    check: Callable[[], None]

    def is_over(self) -> bool:
        return self.running() is None


def watch_outputs(outputs: Any, on_pass: Callable[[], None]) -> None:
    """Call ``on_pass`` when a pass of autograd reaches a tensor in ``outputs``.

    Inside torch.func's transformations, which run passes of their own, that is a pass of the
    program around them.
    """

    @uncompiled
    def hook(_: torch.Tensor) -> None:
        on_pass()

    # Mostly one tensor, for which pytree would take as long as for a large tree.
    leaves = [outputs] if isinstance(outputs, torch.Tensor) else tree_leaves(outputs)
    for output in leaves:
        if not isinstance(output, torch.Tensor):
            continue
        tensor = output
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        if tensor.grad_fn is not None:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def is_plain_backward() -> bool:
    """Whether the present pass accumulates into all parameters that it reaches.

    torch.autograd.grad does not, nor does ``backward`` with ``inputs``.
    """
    return bool(Variable._execution_engine.is_checkpoint_valid())


def make_check(manager: Manager) -> Callable[[], None]:
    """Return a check for the backward passes of a forward pass that has just run.

    It raises `RequestRefused` if the manager was shut down, or has loaded other weights since:
    torch would report an unrelated tensor, or, for gathered weights, nothing.
    """
    version = manager.weights_version()
    known = weakref.ref(manager)

    def check() -> None:
        manager = known()
        if manager is not None and manager.weights_version() != version:
            raise RequestRefused(_STALE)
        check_running(manager)

    return check


def check_running(manager: Manager | None) -> None:
    """Raise `RequestRefused` if the manager was shut down, so that nothing is averaged."""
    if manager is None or manager.has_ended():
        raise RequestRefused(_ENDED)
