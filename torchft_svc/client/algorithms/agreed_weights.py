"""The weights of the last synchronization, and the sums of what was learned since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from torchft_svc.client.gradients.buckets import describe_tensors, plain_name
from torchft_svc.client.reduce.quantized import (
    Quantization,
    check_quantizable,
    resolve_quantization,
)
from torchft_svc.client.reduce.reduction import Reduction
from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

DEFAULT_BUCKET_MB = 25.0
_MEGABYTE = 1024 * 1024
_CPU = torch.device("cpu")


class AgreedWeights:
    """The parameters of ``model``, and their ``values`` at the last synchronization.

    For a sharded model (FSDP2, tensor parallelism) both are this worker's shards.
    """

    def __init__(self, model: nn.Module, device: torch.device, pin_memory: bool) -> None:
        named = [
            (plain_name(name), parameter)
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point() or parameter.is_complex()
        ]
        if not named:
            reason = "it has no parameters that could be averaged"
            raise ConfigError("model", type(model).__name__, reason)
        self._model = model
        self.names = [name for name, _ in named]
        self.parameters: list[nn.Parameter] = [parameter for _, parameter in named]
        self.values = [
            _allocate(local_tensor(each), device, pin_memory) for each in self.parameters
        ]
        self.store()
        self.layout = describe_tensors([self.local_tensors()], [self.names])

    def check_quantizable(self) -> None:
        """Raise `ConfigError` if a parameter cannot be summed in 8 bits."""
        for name, tensor in zip(self.names, self.local_tensors(), strict=True):
            check_quantizable(tensor, name)

    def local_tensors(self) -> list[torch.Tensor]:
        """This worker's parts of the parameters, detached; they share the parameters' memory."""
        return [local_tensor(each) for each in self.parameters]

    @torch.no_grad()
    def store(self) -> None:
        """Keep the present weights as those of the last synchronization."""
        for value, tensor in zip(self.values, self.local_tensors(), strict=True):
            value.copy_(tensor)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the parameters to the weights of the last synchronization."""
        for value, tensor in zip(self.values, self.local_tensors(), strict=True):
            tensor.copy_(value)

    def write_weights(self, index: int, out: torch.Tensor) -> None:
        """Write the present weights of parameter ``index`` to ``out``."""
        out.copy_(local_tensor(self.parameters[index]))

    @torch.no_grad()
    def write_pseudo_gradient(self, index: int, out: torch.Tensor) -> None:
        """Write to ``out`` what parameter ``index`` has lost since the last synchronization.

        The weights then, minus those now: the pseudo-gradient of DiLoCo.
        """
        out.copy_(self.values[index])
        out.sub_(local_tensor(self.parameters[index]))

    def replaced(self) -> list[str]:
        """Names of parameters in whose place the model has others now."""
        present = set(map(id, self._model.parameters()))
        return [
            name
            for name, parameter in zip(self.names, self.parameters, strict=True)
            if id(parameter) not in present
        ]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights of the last synchronization by name."""
        return dict(zip(self.names, self.values, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy ``state``, which another group has returned from `state_dict`.

        Raises:
            ConfigError: it has other names or shapes; nothing was copied.
        """
        if list(state) != self.names:
            raise ConfigError("original_parameters", list(state)[:3], "another model's names")
        for name, value in zip(self.names, self.values, strict=True):
            shape = getattr(state[name], "shape", None)
            if shape != value.shape:  # one that is broadcast would pass unnoticed
                found = f"{name} of {'no tensor' if shape is None else tuple(shape)}"
                reason = f"here it has the shape {tuple(value.shape)}: it is another model's"
                raise ConfigError("original_parameters", found, reason)
        for name, value in zip(self.names, self.values, strict=True):
            value.copy_(state[name])


@dataclass(frozen=True, slots=True)
class Rounding:
    """The numbers in which averages travel, and whether what rounding leaves out is kept."""

    quantization: Quantization | None
    error_feedback: bool

    @classmethod
    def of(cls, should_quantize: bool | str, *, error_feedback: bool) -> Rounding:
        """Return what an algorithm's arguments ask for.

        Raises:
            ConfigError: there is no such format, or nothing is rounded.
        """
        quantization = resolve_quantization(should_quantize)
        if error_feedback and quantization is None:
            reason = "without should_quantize nothing is rounded: choose a format there"
            raise ConfigError("error_feedback", error_feedback, reason)
        return cls(quantization, error_feedback)

    def check(self, agreed: Sequence[AgreedWeights]) -> None:
        """Raise `ConfigError` if what is averaged cannot be rounded so."""
        if self.quantization is not None:
            for weights in agreed:
                weights.check_quantizable()

    def __str__(self) -> str:
        if self.quantization is None:
            return "not quantized"
        return f"quantized {self.quantization.value}{' with error feedback' * self.error_feedback}"


EXACT = Rounding(None, error_feedback=False)


class BucketedAverage:
    """Averages tensors over the groups that contribute, several in one collective.

    ``like``: tensors with the shapes, dtypes and devices of what is averaged. ``capacity_mb``: the
    size of a bucket in MiB (None: a collective for each tensor). One average at a time is under
    way; its memory is as large as ``like``, is allocated when it begins, and is summed in place.
    With a ``rounding`` the 8-bit numbers that are sent and received come on top. ``errors_on``:
    where to keep what that leaves out of the averages, which is added to the next ones.
    """

    def __init__(
        self,
        manager: Manager,
        like: Sequence[torch.Tensor],
        capacity_mb: float | None,
        *,
        rounding: Rounding = EXACT,
        errors_on: torch.device = _CPU,
    ) -> None:
        if capacity_mb is not None and not capacity_mb > 0:
            raise ConfigError("bucket_cap_mb", capacity_mb, "a bucket needs a size above 0")
        self._manager = manager
        self._like = list(like)
        self._quantization = rounding.quantization
        self._plan = plan_parts(self._like, capacity_mb)
        self._works: list[dist.Work | Reduction] = []
        self._views: dict[int, torch.Tensor] = {}
        # One for each part: of the averages that were applied, and of those that are under way.
        self._errors: list[torch.Tensor] = []
        self._new_errors: list[torch.Tensor] = []
        if rounding.error_feedback:
            self._errors = [
                torch.zeros(self._numel(part), dtype=torch.float32, device=errors_on)
                for part in self._plan
            ]

    def _numel(self, part: list[int]) -> int:
        return sum(self._like[index].numel() for index in part)

    @torch.no_grad()
    def launch(self, fill: Callable[[int, torch.Tensor], None]) -> None:
        """Begin to average; ``fill`` writes the tensor with a number into a view of its shape."""
        self.drop_averages()
        for number, part in enumerate(self._plan):
            memory = self._fill_memory(part, fill)
            if self._quantization is None:
                self._launch_sum(memory)
                continue
            errors = None
            if self._errors:
                errors = self._errors[number].to(memory.device, copy=True)
                self._new_errors.append(errors)
            self._works.append(
                self._manager._sums.allreduce(
                    memory, self._quantization.value, ReduceOp.AVG, errors=errors
                )
            )

    def _fill_memory(
        self, part: list[int], fill: Callable[[int, torch.Tensor], None]
    ) -> torch.Tensor:
        first = self._like[part[0]]
        memory = torch.empty(self._numel(part), dtype=first.dtype, device=first.device)
        offset = 0
        for index in part:
            like = self._like[index]
            view = memory[offset : offset + like.numel()].view(like.shape)
            fill(index, view)
            self._views[index] = view
            offset += like.numel()
        return memory

    def _launch_sum(self, memory: torch.Tensor) -> None:
        """Average ``memory`` in place: `Manager.allreduce` would hold a copy of it until the vote.

        If the step fails, the memory is not used again.
        """
        scale = self._manager.reduction_scale()
        if scale is None:
            return
        memory.mul_(scale) if scale else memory.zero_()
        reduction = self._manager.launch_sum(memory)
        if reduction is not None:
            self._works.append(reduction)

    def wait(self) -> None:
        """Wait until all collectives have ended; an error is one of the manager's step."""
        for work in self._works:
            work.wait()
        self._works = []

    def pop_averages(self) -> list[torch.Tensor]:
        """Return the averages in the order of ``like``; their memory is the caller's.

        They are applied, so what they lack is added to the next ones.
        """
        views = self._views
        for kept, errors in zip(self._errors, self._new_errors, strict=True):
            kept.copy_(errors)
        self.drop_averages()
        return [views[index] for index in range(len(self._like))]

    def drop_averages(self) -> None:
        """Free the memory of the averages."""
        self._works, self._views, self._new_errors = [], {}, []

    def reset_errors(self) -> None:
        """Begin without errors: a group that heals has sent nothing that it could make up for.

        The errors of the group that it heals from are added to that one's next sums.
        """
        for errors in self._errors:
            errors.zero_()


def plan_parts(tensors: Sequence[torch.Tensor], capacity_mb: float | None) -> list[list[int]]:
    """Which tensors, by their numbers, are averaged together: each is in exactly one part.

    A part has one dtype and one device, and holds more than the capacity only if it is one tensor.
    """
    if capacity_mb is None:
        return [[index] for index in range(len(tensors))]
    capacity = int(capacity_mb * _MEGABYTE)
    parts: list[list[int]] = []
    present: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        kind = tensor.device, tensor.dtype
        part, size = present.get(kind, ([], 0))
        num_bytes = tensor.numel() * tensor.element_size()
        if not part or size + num_bytes > capacity:
            part, size = [], 0
            parts.append(part)
        part.append(index)
        present[kind] = part, size + num_bytes
    return parts


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This worker's part of a parameter, detached; a DTensor's own shard."""
    tensor: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return tensor.detach()


def like_parameter(local: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The gradient of ``parameter`` whose part of this worker is ``local``."""
    if not hasattr(parameter, "_local_tensor"):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _allocate(tensor: torch.Tensor, device: torch.device, pin_memory: bool) -> torch.Tensor:
    pinned = pin_memory and device.type == "cpu" and tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)
