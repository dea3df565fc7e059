"""Data parallel training across groups that may join and leave."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from torchft_svc.client.checkpointing.encoding.shards import is_sharded
from torchft_svc.client.gradients.buckets import plain_names, plan_buckets
from torchft_svc.client.gradients.reducer import SPARSE, Reducer
from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

DEFAULT_BUCKET_CAP_MB = 25.0
# Between CPUs, transfers are slow and launches are cheap, so smaller buckets overlap more of the
# backward pass: with 17 MB of gradients a step took 1.03 of plain DDP's instead of 1.16.
CPU_BUCKET_CAP_MB = 4.0
# Arguments of torch's class without effect here, and why.
_WITHOUT_EFFECT = {
    "device_ids": "the module stays where it is",
    "output_device": "the module stays where it is",
    "dim": "inputs are not scattered",
    "broadcast_buffers": "each group keeps its own, and one that heals takes its source's",
    "check_reduction": "torch ignores it too",
    "static_graph": "the layout of the buckets never changes",
    "skip_all_reduce_unused_params": "the sums are the same on every group",
}
_WITHOUT_SUPPORT = {
    "process_group": "the manager brings its own",
    "mixed_precision": "use torch.autocast, or parameters of the wanted dtype",
    "delay_all_reduce_named_params": "wrap the module without these parameters",
    "param_to_hook_all_reduce": "wrap the module without these parameters",
    "device_mesh": "a replica group of several workers needs another wrapper",
}


class DistributedDataParallel(nn.Module):
    """Averages the gradients of ``module`` over the groups that contribute.

    Replaces torch's class of the same name; ``.module`` is the wrapped module, and the names in
    ``state_dict()`` start with ``module.``. Weights are made equal by healing, not by a broadcast;
    each group keeps its own buffers.

    Args:
        manager: the manager of this worker.
        module: the model to train.
        bucket_cap_mb: the size of a bucket of gradients in MiB (default: 4 on CPUs, else 25).
        gradient_as_bucket_view: gradients are views of the buckets' memory, which saves a copy.
            False gives them separate memory.
        find_unused_parameters: accepted; a parameter that the backward pass did not reach counts as
            zero here, and gets the average of the others. One that no group uses gets zeros, so
            weight decay and momentum still apply; a frozen parameter gets no gradient.
        broadcast_buffers: True only warns.
        init_sync: accepted; the manager's own argument of this name decides.
        kwargs: other arguments of torch's class: they are refused, or warn that they have no
            effect.

    Raises:
        ConfigError: the module has no parameter to train, an argument is not supported, or a part
            is sharded or reduced inside the group. Sparse gradients that are not known in advance
            are refused by the first backward pass.
    """

    def __init__(
        self,
        manager: Manager,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = False,
        init_sync: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ConfigError("module", type(module).__name__, "a torch.nn.Module is needed")
        _check_others({**kwargs, "broadcast_buffers": broadcast_buffers})
        _refuse_other_wrappers(module)
        self.module = module
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
        if not parameters:
            raise ConfigError("module", type(module).__name__, "it has no parameter to train")
        _refuse_sparse(module)
        _refuse_parts(module)
        if bucket_cap_mb is None:
            on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
            bucket_cap_mb = CPU_BUCKET_CAP_MB if on_cpu else DEFAULT_BUCKET_CAP_MB
        # Not a submodule: the state dict must contain only the user's names.
        self._reducer = Reducer(
            manager,
            plan_buckets(parameters, bucket_cap_mb),
            hands_out=gradient_as_bucket_view,
            module=module,
            names=plain_names(module),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass.

        Raises:
            ConfigError: a parameter that was frozen at construction is trained now, or this
                module is a part of one that torch's class of the same name wraps.
        """
        # Torch keeps this per process; with several threads it may be outdated.
        outer = nn.parallel.DistributedDataParallel._active_ddp_module
        if outer is not None and any(child is self for child in outer.modules()):
            raise _both_wrappers()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                reason = "it was frozen when the module was wrapped: wrap the module again"
                raise ConfigError(f"{name}.requires_grad", True, reason)
        self._reducer.prepare()
        outputs = self.module(*args, **kwargs)
        self._reducer.watch(outputs)
        return outputs

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Raise an error: torch's class of the same name reads this when it wraps a module."""
        raise _both_wrappers()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("copy or save .module: the manager cannot be copied")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside this block; the next pass outside averages them."""
        before, self._reducer.enabled = self._reducer.enabled, False
        try:
            yield
        finally:
            self._reducer.enabled = before


def _check_others(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if name in _WITHOUT_SUPPORT:
            if value is not None:
                raise ConfigError(name, value, _WITHOUT_SUPPORT[name])
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(f"DistributedDataParallel has no argument {name!r}")
        elif value:
            warnings.warn(f"{name} has no effect: {_WITHOUT_EFFECT[name]}", stacklevel=3)


def _refuse_sparse(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if getattr(child, "sparse", False):
            raise ConfigError(f"{name or type(child).__name__}.sparse", True, SPARSE)


def _refuse_other_wrappers(module: nn.Module) -> None:
    """Refuse nested wrappers, which would overwrite each other's averages."""
    for name, child in module.named_modules():
        if isinstance(child, nn.parallel.DistributedDataParallel):
            raise _both_wrappers()
        # Without its module there is none; importing it here would only cost time.
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
        if isinstance(child, DistributedDataParallel) or (fsdp and isinstance(child, fsdp)):
            reason = "its gradients are reduced by this wrapper already: use one of them"
            raise ConfigError(name or "module", type(child).__name__, reason)


def _both_wrappers() -> ConfigError:
    return ConfigError(
        "module",
        "in torch's DistributedDataParallel and in torchft_svc's",
        "each would overwrite the other's averages: use this one alone in groups of one worker; in "
        "groups of several, fully_shard and replicate_across_groups",
    )


def _refuse_parts(module: nn.Module) -> None:
    """Refuse parameters that are sharded or not initialized."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(name, "not initialized", "call the module once before it is wrapped")
        if is_sharded(parameter):
            raise ConfigError(
                name,
                "a DTensor",
                "this wrapper averages whole parameters; for those that are sharded inside the "
                "group (tensor parallelism, FSDP2) use fully_shard and replicate_across_groups",
            )
