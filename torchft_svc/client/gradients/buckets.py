"""Groups gradients into buckets; the layout depends on the parameters only.

A group that joins must split its gradients exactly like the others, so the layout is fixed when the
model is wrapped, and does not depend on the order of a backward pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from torchft_svc.core.quorum.layout import DIGEST_LENGTH
from torchft_svc.errors import ConfigError

# Small, so that the first sum starts early in the backward pass.
FIRST_BUCKET_BYTES = 1024 * 1024
_MEGABYTE = 1024 * 1024
# glibc adapts its threshold to blocks of up to 32 MiB, with their own administration.
_MAX_ADAPTED_BYTES = 32 * _MEGABYTE - 64 * 1024
# What torch.compile, checkpoint_wrapper, and FSDP insert into the names of parameters.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class Bucket:
    """Gradients of one dtype and device, contiguous in ``memory``, with a view for each.

    ``carries_wish``: one more number at the end, ``wish`` of shape (1,), summed with the gradients:
    the place for the wish of a question before the next step (rule E2).
    """

    def __init__(self, parameters: list[nn.Parameter], *, carries_wish: bool = False) -> None:
        self.parameters = parameters
        self._carries_wish = carries_wish
        self.memory, self.views, self.wish = _allocate(parameters, carries_wish)

    def renew(self) -> None:
        """Allocate new memory, because an abandoned operation may write to the present one."""
        old = self.views
        self.memory, self.views, self.wish = _allocate(self.parameters, self._carries_wish)
        for parameter, view in zip(self.parameters, old, strict=True):
            if parameter.grad is not None and _same_memory(parameter.grad, view):
                parameter.grad = torch.zeros_like(parameter)

    def copied_versions(self) -> list[int]:
        """Version counters of the gradients; a write changes them."""
        grads = [parameter.grad for parameter in self.parameters]
        return [grad._version for grad in grads if grad is not None]

    def holds_gradients(self) -> bool:
        """Whether the parameters' gradients are still the views of this bucket."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view and parameter.requires_grad:
                return False
        return True

    def _has_views(self) -> bool:
        """Whether the views are still those of the memory.

        A model that is converted to another dtype and back, or moved, takes the gradients along, so
        that the views get memory of their own. The first and the last view show that.
        """
        first, last, memory = self.views[0], self.views[-1], self.memory
        before_last = memory.numel() - int(self._carries_wish) - last.numel()
        start = memory.data_ptr()
        places = ((first, start), (last, start + before_last * memory.element_size()))
        return all(not view.numel() or view.data_ptr() == place for view, place in places)

    def fill(self, scale: float) -> None:
        """Copy the parameters' gradients times ``scale``; zeros for 0.0 or a missing gradient."""
        if not self._has_views():
            self.memory, self.views, self.wish = _allocate(self.parameters, self._carries_wish)
        if scale == 0.0:
            self.memory.zero_()
            return
        # The same product as with the number itself, which torch would convert for each tensor.
        exact = torch.float32 if self.memory.dtype is torch.float32 else torch.float64
        factor = torch.scalar_tensor(scale, dtype=exact, device="cpu")
        for parameter, view in zip(self.parameters, self.views, strict=True):
            grad = parameter.grad
            if grad is None:
                view.zero_()
            else:
                torch.mul(grad, factor, out=view)

    @property
    def can_fill_again(self) -> bool:
        """Whether the parameters' gradients are as they were before `fill`: none of them is in this
        memory, as after a step that did not set them to None."""
        return not any(
            parameter.grad is not None and _same_memory(parameter.grad, view)
            for parameter, view in zip(self.parameters, self.views, strict=True)
        )

    def hand_out(self) -> None:
        """Set the parameters' gradients to the averages, without a copy; skip frozen ones."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.requires_grad:
                parameter.grad = view

    def copy_out(self) -> None:
        """Copy the averages to the parameters' gradients; frozen ones are skipped."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = view.clone()
            elif not _same_memory(parameter.grad, view):
                parameter.grad.copy_(view)

    def zero_unused(self) -> None:
        """Give zeros to parameters that no backward pass has reached, as the averages would."""
        for parameter in self.parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def describe_tensors(
    parts: Sequence[Sequence[torch.Tensor]], names: Sequence[Sequence[str]]
) -> str:
    """A sentence on what is summed, with a digest: see `Reducing.layout`.

    ``names`` of the same parameters: two of them may have equal shapes, and are averaged by
    position.
    """
    tensors = [tensor for part in parts for tensor in part]
    places = [
        [(name, *_place(tensor)) for name, tensor in zip(named, part, strict=True)]
        for named, part in zip(names, parts, strict=True)
    ]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    num_turned = sum(not tensor.is_contiguous() for tensor in tensors)
    turned = f", {num_turned} not contiguous" if num_turned else ""
    digest = hashlib.sha256(repr((places, "wish")).encode()).hexdigest()[:DIGEST_LENGTH]
    num_elements = sum(tensor.numel() for tensor in tensors)
    return (
        f"{len(tensors)} parameters with {num_elements} elements of {', '.join(dtypes)}{turned}, "
        f"in {len(parts)} parts, digest {digest}"
    )


def _place(tensor: torch.Tensor) -> tuple[str, list[int], list[int]]:
    """Return dtype, sizes and strides; 0 for that of a dimension of size 1, which is arbitrary."""
    sizes = list(tensor.size())
    strides = tensor.stride() if _is_dense(tensor) else torch.empty(sizes, device="meta").stride()
    pairs = zip(sizes, strides, strict=True)
    return str(tensor.dtype), sizes, [0 if size == 1 else step for size, step in pairs]


def plain_names(module: nn.Module) -> dict[int, str]:
    """The parameters' names by id, without the parts that wrappers such as torch.compile add.

    So a group that compiles its model, or recomputes activations, fits to one that does not.
    """
    return {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}


def plain_name(name: str) -> str:
    """See `plain_names`."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plan_buckets(
    parameters: Iterable[nn.Parameter], capacity_mb: float, first_bytes: int = FIRST_BUCKET_BYTES
) -> list[Bucket]:
    """Split ``parameters`` into buckets of at most ``capacity_mb`` MiB; the first one is smaller.

    In reverse order, which is about the order of a backward pass. A parameter that is larger than
    the capacity gets its own bucket. The first bucket carries the wish.

    Raises:
        ConfigError: the capacity is not above 0.
    """
    if not capacity_mb > 0:
        raise ConfigError("bucket_cap_mb", capacity_mb, "a bucket needs a size above 0")
    capacity = int(capacity_mb * _MEGABYTE)
    open_buckets: dict[tuple[torch.device, torch.dtype], tuple[list[nn.Parameter], int]] = {}
    cut: list[list[nn.Parameter]] = []
    limit = min(first_bytes, capacity)
    for parameter in reversed(list(parameters)):
        kind = (parameter.device, parameter.dtype)
        members, size = open_buckets.get(kind, ([], 0))
        members.append(parameter)
        size += parameter.numel() * parameter.element_size()
        open_buckets[kind] = (members, size)
        if size >= limit:
            cut.append(members)
            del open_buckets[kind]
            limit = capacity
    cut.extend(members for members, _ in open_buckets.values())
    _keep_freed_memory([parameter for members in cut for parameter in members])
    return [Bucket(members, carries_wish=i == 0) for i, members in enumerate(cut)]


def _keep_freed_memory(parameters: list[nn.Parameter]) -> None:
    """Make glibc keep the memory of gradients from one step to the next.

    Each backward pass allocates all gradients anew, and they are freed when they are in the
    buckets. What lies free at the end of the heap goes back to the system above a threshold, and
    comes again page by page: with 8.7 MB of gradients 450 to 730 faults and 0.8 ms a step. glibc
    raises that threshold to twice the largest block that it got from the system by itself and gave
    back, so this makes such a block; nothing touches it.
    """
    on_cpu = [parameter for parameter in parameters if parameter.device.type == "cpu"]
    num_bytes = 2 * sum(parameter.numel() * parameter.element_size() for parameter in on_cpu)
    torch.empty(min(num_bytes, _MAX_ADAPTED_BYTES), dtype=torch.uint8, device="cpu")


def _allocate(
    parameters: list[nn.Parameter], carries_wish: bool
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """The memory of a bucket, the parameters' views, and the place for the wish at the end."""
    first = parameters[0]
    numel = sum(parameter.numel() for parameter in parameters) + int(carries_wish)
    # Not touched before it is filled: a group that is alone never needs it.
    memory = torch.empty(numel, dtype=first.dtype, device=first.device)
    if carries_wish:
        memory[-1:].zero_()
    views = []
    offset = 0
    for parameter in parameters:
        views.append(_view(memory, offset, parameter))
        offset += parameter.numel()
    return memory, views, memory[-1:] if carries_wish else None


def _view(memory: torch.Tensor, offset: int, parameter: nn.Parameter) -> torch.Tensor:
    """A view with the parameter's memory layout if that is dense, like autograd's gradients."""
    if _is_dense(parameter):
        return memory.as_strided(parameter.size(), parameter.stride(), offset)
    return memory[offset : offset + parameter.numel()].view(parameter.size())


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() > 0 and one.data_ptr() == other.data_ptr()
