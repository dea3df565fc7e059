"""Fully sharded models: sharded inside the group by FSDP2, averaged across groups here."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from torchft_svc.client.gradients.buckets import describe_tensors, plain_names
from torchft_svc.client.gradients.early_updates import guard_updates, raise_early_update
from torchft_svc.client.gradients.module_watch import ModuleWatch
from torchft_svc.client.gradients.reducer import (
    check_running,
    is_plain_backward,
    make_check,
    watch_outputs,
)
from torchft_svc.client.reduce.reduction import CurrentParameter
from torchft_svc.errors import ConfigError, RequestRefused

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from torchft_svc.client.manager import Manager


def replicate_across_groups(manager: Manager, model: nn.Module) -> None:
    """Average the gradients of an FSDP2 model over the groups that contribute.

    Call it after ``fully_shard``, on the training thread. Each module that FSDP reduces gets
    torch's all-reduce hook: once its gradients are reduced and scattered inside the group, each
    worker averages its part with the workers of the same group rank in the other groups. Mixed
    precision, gradient accumulation (``set_requires_gradient_sync``), clipping and tensor
    parallelism inside the group are not affected. A step in which a worker averaged nothing, or not
    everything, is discarded.

    Saving the state for others (``state_dict`` of the `Manager`) happens on another thread while
    the forward pass runs. FSDP's own ``state_dict()`` would reshard the weights during it: use
    `sharded_state_dict`.

    For another manager call it again: its hooks replace those of the manager before.

    Raises:
        ConfigError: there is no FSDP module, or a parameter belongs to none of them.
    """
    groups = [group for module in _fsdp_modules(model) for group in _param_groups(module)]
    if not groups:
        raise ConfigError(
            "model", type(model).__name__, "no part of it was sharded: call fully_shard first"
        )
    sharded = {id(param.sharded_param) for group in groups for param in group.fsdp_params}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in sharded:
            raise ConfigError(
                name,
                "outside of FSDP",
                "its gradient would not be averaged: shard the module it belongs to",
            )

    sums = _ShardedSums(manager, groups, model)
    guard_updates(sums)
    manager.register_reducer(sums)
    trainer = threading.current_thread()
    for group in groups:
        group._all_reduce_hook = sums.average
    for module in _fsdp_modules(model):
        assert isinstance(module, nn.Module)
        for handle in _hooks.get(module, ()):  # of the manager before
            handle.remove()
        # Before FSDP's own hook, which cannot continue after an error in a pass.
        _hooks[module] = (
            module.register_forward_hook(sums.watch, prepend=True),
            module.register_state_dict_pre_hook(_guard(trainer)),  # type: ignore[no-untyped-call]
        )


# Those of `replicate_across_groups`, which replaces them when a model gets another manager.
_hooks: weakref.WeakKeyDictionary[nn.Module, tuple[RemovableHandle, RemovableHandle]] = (
    weakref.WeakKeyDictionary()
)


class _ShardedSums:
    """The sums of FSDP's parameter ``groups`` of ``model``, which keep it alive."""

    def __init__(self, manager: Manager, groups: list[Any], model: nn.Module) -> None:
        self._manager = manager
        names = plain_names(model)
        sharded = [[param.sharded_param for param in group.fsdp_params] for group in groups]
        shards = [[_local(param) for param in part] for part in sharded]
        # Empty: FSDP sums only parameters that are trained, so groups that differ would not match.
        self.parameters: list[nn.Parameter] = []
        self._pass: weakref.ref[functools.partial[None]] | None = None
        named = [[names.get(id(param), "") for param in part] for part in sharded]
        self._summed = [
            (name, param, param.sharded_param)
            for part, group in zip(named, groups, strict=True)
            for name, param in zip(part, group.fsdp_params, strict=True)
        ]
        summed = {id(param) for part in sharded for param in part}
        self.names = [name for key, name in names.items() if key in summed]
        self.has_averaged = False
        self._module_watch = ModuleWatch(model, self._known)
        self.layout = f"sharded in {len(groups)} groups: {describe_tensors(shards, named)}"

    def _known(self) -> set[int]:
        """The identities of all parameters that FSDP knows, sharded and whole."""
        params = [param for _, param, _ in self._summed]
        whole = [getattr(param, "_unsharded_param", None) for param in params]
        return {id(each) for each in (*(param.sharded_param for param in params), *whole)}

    def unsummed(self) -> list[tuple[str, nn.Parameter]]:
        """See `Reducing.unsummed`."""
        return self._module_watch.find_unsummed()

    def average(self, reduced: torch.Tensor) -> None:
        """Average ``reduced`` in place; FSDP's hook."""
        check_running(self._manager)
        self._manager._sums.average_gradients(reduced).wait()
        self.has_averaged = True

    def walk_parameters(self) -> list[CurrentParameter]:
        """See `Walking`; the sharded parameters, also while the whole ones are gathered."""
        return [
            CurrentParameter(name, param.sharded_param, param.sharded_param is was)
            for name, param, was in self._summed
            if param.sharded_param.requires_grad
        ]

    def watch(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Watch the backward pass of ``outputs``, which a forward pass has just returned."""
        # After the manager's end another one may have replaced it.
        if torch.compiler.is_compiling() or self._manager.has_ended():
            return
        check = make_check(self._manager)

        def begin_backward() -> None:
            if is_plain_backward():
                check()
                self._begin_pass()

        watch_outputs(outputs, begin_backward)

    def _begin_pass(self) -> None:
        """Record the versions of the sharded parameters, which only an update changes."""
        if self._pass is not None and self._pass() is not None:
            return
        versions = [parameter._version for _, _, parameter in self._summed]
        running = functools.partial(self._check_unchanged, versions)
        # FSDP's own callback at the end of the pass may sum the last gradients; after it.
        queue = Variable._execution_engine.queue_callback
        self._pass = weakref.ref(running)
        queue(functools.partial(queue, running))

    def _check_unchanged(self, versions: list[int]) -> None:
        """Raise `ConfigError` if an optimizer has stepped in the pass.

        FSDP runs the parameters' hooks when their gradients are averaged, which is before the vote.
        """
        for (name, _, parameter), version in zip(self._summed, versions, strict=True):
            if parameter._version != version:
                self.refuse_update(name)

    def guarded_names(self) -> Mapping[int, str]:
        """See `Guarded`."""
        summed = [] if self._manager.has_ended() else self._summed
        return {id(parameter): name for name, _, parameter in summed}

    def refuse_update(self, name: str) -> NoReturn:
        """See `Guarded`."""
        raise_early_update(self._manager, name)

    def replaced(self) -> list[str]:
        """See `Reducing.replaced`."""
        return [name for name, param, was in self._summed if param.sharded_param is not was]

    def average_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return None: FSDP owns the memory of the averages."""
        return None

    def begin_step(self) -> None:
        """See `Reducing.begin_step`."""
        self.has_averaged = False

    def settle_step(self) -> Exception | None:
        """See `Reducing.settle_step`; the manager tracks passes that sum something."""
        return None


def sharded_state_dict(model: nn.Module) -> OrderedDict[str, Any]:
    """Return ``model.state_dict()`` with the sharded parameters, on any thread, at any moment.

    The values are the live parameters (DTensors) and buffers, for ``model.load_state_dict``. The
    modules' own hooks run, such as those of torch's ``checkpoint_wrapper``, which remove its name
    from the keys.
    """
    sharded = {
        (id(owner), name): param.sharded_param
        for module in _fsdp_modules(model)
        for group in _param_groups(module)
        for param in group.fsdp_params
        for owner, name in _places(param)
    }
    state: OrderedDict[str, Any] = OrderedDict()
    state._metadata = OrderedDict()  # type: ignore[attr-defined]
    _collect(model, "", state, sharded)
    return state


def _collect(
    module: nn.Module,
    prefix: str,
    state: OrderedDict[str, Any],
    sharded: dict[tuple[int, str], nn.Parameter],
) -> None:
    """Do what ``module.state_dict(destination=state, prefix=prefix, keep_vars=True)`` does.

    Except for FSDP's hooks, which would reshard the weights during a forward pass: this function
    inserts the sharded parameters before the module's own hooks run.

    Raises:
        ConfigError: a module with parts that FSDP shards overrides ``state_dict``.
    """
    if type(module).state_dict is not nn.Module.state_dict:
        _check_unsharded(module, prefix, sharded)
        module.state_dict(destination=state, prefix=prefix, keep_vars=True)
        return
    local_metadata = {"version": module._version}
    state._metadata[prefix[:-1]] = local_metadata  # type: ignore[attr-defined]
    for before in module._state_dict_pre_hooks.values():
        if not _is_about_sharding(before):
            before(module, prefix, True)
    module._save_to_state_dict(state, prefix, True)
    for name in module._parameters:
        if (id(module), name) in sharded and prefix + name in state:
            state[prefix + name] = sharded[id(module), name]
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", state, sharded)
    for after in module._state_dict_hooks.values():
        after(module, state, prefix, local_metadata)


def _check_unsharded(
    module: nn.Module, prefix: str, sharded: dict[tuple[int, str], nn.Parameter]
) -> None:
    for part in module.modules():
        if any((id(part), name) in sharded for name in part._parameters):
            raise ConfigError(
                "model",
                f"{prefix}{type(module).__name__}",
                "its own state_dict() cannot be called while FSDP may use the model",
            )


def _is_about_sharding(hook: Any) -> bool:
    """Whether FSDP or `_guard` has registered the hook."""
    return getattr(hook, "__module__", "").startswith(("torch.distributed.fsdp.", __name__))


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _param_groups(module: FSDPModule) -> list[Any]:
    """FSDP's communication groups; a module has several if its parameters are on several meshes.

    Torch's ``set_all_reduce_hook`` refuses these, because its hooks depend on the mesh. Ours do
    not.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch before 2.12


def _local(sharded: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(sharded, "_local_tensor", sharded)
    return local


def _places(param: Any) -> list[tuple[nn.Module, str]]:
    """The modules of the parameter, with its names there; several if it is shared."""
    info = param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def _guard(trainer: threading.Thread) -> Any:
    """A hook that refuses FSDP's own ``state_dict()`` on other threads than the training one."""

    def refuse(*_: Any) -> None:
        if threading.current_thread() is not trainer:
            raise RequestRefused(
                "model.state_dict() of an FSDP model was called while it may be in use: in the "
                "state_dict function of the Manager, use sharded_state_dict(model)"
            )

    return refuse
