"""A short digest of what all groups must have alike: parameters, optimizers, settings (rule C2)."""

from __future__ import annotations

import logging
import numbers
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from torchft_svc.client.reduce.reduction import CurrentParameter, Reducing, Walking
from torchft_svc.core.quorum.worker.state_check import MAX_ITEMS, Part, Row

log = logging.getLogger(__name__)

# How an optimizer computes its update; may differ by device.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
# Elements that a device sums at once: 8 MB of factors, and as much for the products.
_BLOCK = 1 << 20
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio, as int64
_BLOCK_FACTOR = 0x2545F4914F6CDD1D
# Integers of an element's size, to read its bytes by.
_WORDS = {1: torch.uint8, 2: torch.int16}
_Items = list[tuple[int, int]]  # a digest of a name, and a number


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The items of each part, and their ``names`` in this group."""

    items: Mapping[Part, _Items]
    names: Mapping[Part, list[str]]

    def row(self, since: int) -> Row:
        """The row that the other groups receive; ``since``: see `CheckSchedule`."""
        digests = [
            _digest(struct.pack(f"<{2 * len(items)}q", *(n for item in items for n in item)))
            for items in (self.items[part] for part in Part)
        ]
        return Row(1, since, tuple(digests), tuple(len(self.items[part]) for part in Part))

    def name(self, part: Part, digest: int) -> str:
        """Return the name of an item by its digest; empty: it is not one of this group."""
        names = zip(self.items[part], self.names[part], strict=True)
        return next((name for (key, _), name in names if key == digest), "")


def take_fingerprint(
    reducers: Sequence[Reducing], optimizers: Sequence[torch.optim.Optimizer]
) -> Fingerprint:
    """The fingerprint of the present state; reads all parameters, and changes nothing.

    Parameters are those that the models of ``reducers`` train now. A reducer that does not know its
    parameters, such as that of torch's own wrapper, has those of ``optimizers``.
    """
    present = _without_replaced(optimizers)
    known = [list(_parameters_of(reducer)) for reducer in reducers]
    parameters = [each for part in known for each in part]
    if parameters:
        names = list(_names_of(known))
    else:
        parameters = list(_parameters_of_optimizers(present))
        names = [each.name for each in parameters]
    tensors = [each.parameter for each in parameters]
    keys = [_digest(name.encode()) for name in names]
    places = {id(tensor): index for index, tensor in enumerate(tensors)}
    present = [each for each in present if _first_place(each, places) < len(places)] or present
    present.sort(key=lambda each: _first_place(each, places))
    owned = list(_describe_optimizers(present, places))
    settings = list(_settings_of(present))
    items: dict[Part, _Items] = {
        Part.LAYOUT: list(zip(keys, map(_digest_of_kind, tensors), strict=True)),
        Part.OBJECTS: list(zip(keys, [int(each.is_wrapped) for each in parameters], strict=True)),
        Part.OPTIMIZERS: [(_digest(name.encode()), number) for name, number in owned],
        Part.SETTINGS: [(_digest(name.encode()), number) for name, number in settings],
        Part.VALUES: list(zip(keys, digest_values(tensors), strict=True)),
    }
    names_of: dict[Part, list[str]] = {
        Part.LAYOUT: [f"parameter {name}" for name in names],
        Part.OBJECTS: [f"parameter {name}" for name in names],
        Part.OPTIMIZERS: [name for name, _ in owned],
        Part.SETTINGS: [name for name, _ in settings],
        Part.VALUES: [f"parameter {name}" for name in names],
    }
    return Fingerprint(items, names_of)


def show_setting(number: int) -> str:
    """A number of `Part.SETTINGS` for people."""
    (value,) = struct.unpack("<d", struct.pack("<q", number))
    return repr(value)


def _parameters_of(reducer: Reducing) -> Iterable[CurrentParameter]:
    if isinstance(reducer, Walking):
        return reducer.walk_parameters()
    return [
        CurrentParameter(f"number {index} of its wrapper", parameter, is_wrapped=True)
        for index, parameter in enumerate(reducer.parameters)
    ]


def _names_of(known: Sequence[Sequence[CurrentParameter]]) -> Iterator[str]:
    """The names of the parameters of all wrappers; those of two may have one name."""
    num_known = sum(bool(part) for part in known)
    for wrapper, part in enumerate(known):
        whose = f" of wrapper {wrapper}" if num_known > 1 else ""
        yield from (f"{each.name!r}{whose}" for each in part)


def _parameters_of_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[CurrentParameter]:
    for place, group in _groups_of(optimizers):
        for index, parameter in enumerate(group["params"]):
            yield CurrentParameter(f"number {index} of {place}", parameter, is_wrapped=True)


def _without_replaced(
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return ``optimizers`` without those whose parameters all belong to later ones.

    A program may have replaced them, and one that joins has only the later ones.
    """
    left: list[torch.optim.Optimizer] = []
    owned: set[int] = set()
    for optimizer in reversed(optimizers):
        mine = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if not mine <= owned:
            left.append(optimizer)
        owned |= mine
    return left[::-1]


def _first_place(optimizer: torch.optim.Optimizer, places: Mapping[int, int]) -> int:
    """The first of its parameters in the models' order, which is the same in all groups."""
    owned = (each for group in optimizer.param_groups for each in group["params"])
    return min((places.get(id(each), len(places)) for each in owned), default=len(places))


def _groups_of(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            yield f"optimizer {number} ({type(optimizer).__name__}), group {index}", group


def _describe_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], places: Mapping[int, int]
) -> Iterator[tuple[str, int]]:
    """Return which parameters are in each group of parameters; -1: none of a wrapped model."""
    for place, group in _groups_of(optimizers):
        indices = [places.get(id(each), -1) for each in group["params"]]
        yield place, _digest(struct.pack(f"<{len(indices)}q", *indices))


def _settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, int]]:
    """All numbers in the groups of parameters, as the bits of a float64."""
    for place, group in _groups_of(optimizers):
        for key in sorted(set(map(str, group)) - _IMPLEMENTATION):
            for name, number in _numbers_in(key, group.get(key)):
                what = "the learning rate" if name == "lr" else repr(name)
                yield f"{what} of {place}", _bits(number)


def _numbers_in(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, numbers.Real):
        try:
            yield name, float(value)
        except OverflowError:
            yield name, float("inf")
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _numbers_in(f"{name}[{index}]", each)


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _digest(data: Any) -> int:
    """Return 63 bits, since they travel as int64; never 0, which is no digest."""
    return int(xxhash.xxh3_64_intdigest(data)) >> 1 or 1


def _digest_of_kind(tensor: torch.Tensor) -> int:
    return _digest(f"{tuple(tensor.shape)} {tensor.dtype}".encode())


# -- values ----------------------------------------------------------------------------------------


def digest_values(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A digest of the bytes of each tensor; of a sharded one, those of this worker's part.

    Memory of a CPU is read in place, unless it is not contiguous. Other devices sum the bytes with
    factors that depend on their place, in blocks, and are waited for once. Tensors without memory
    of their own kind (meta, sparse layouts that torch cannot read) count as equal.
    """
    digests = [0] * len(tensors)
    on_devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    factors: dict[torch.device, torch.Tensor] = {}
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            words = _words_of(tensor)
            if words is None or not words.numel():
                continue
            if words.device.type == "cpu":
                digests[index] = _digest(words.numpy())
                continue
            if words.device not in factors:
                factors[words.device] = _factors(words.device)
            sum_ = _sum_with_factors(words, factors[words.device])
            on_devices.setdefault(words.device, []).append((index, sum_))
        for sums in on_devices.values():
            numbers_ = torch.stack([sum_ for _, sum_ in sums]).tolist()
            for (index, _), number in zip(sums, numbers_, strict=True):
                digests[index] = int(number) & ((1 << 62) - 1)
    return digests


def _words_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's bytes as flat integers; None: it has none that can be read."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if local.is_meta:
        return None
    if local.layout != torch.strided:
        local = _values_of_sparse(local)
        if local is None:
            return None
    try:
        flat = local.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.device.type == "cpu":
            return flat.view(torch.uint8)
        return flat.view(_WORDS.get(flat.element_size(), torch.int32))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        log.debug("the values of a %s cannot be compared", type(tensor).__name__, exc_info=error)
        return None


def _values_of_sparse(tensor: torch.Tensor) -> Any:
    if tensor.layout != torch.sparse_coo:
        return tensor.values() if hasattr(tensor, "values") else None
    whole = tensor.coalesce()
    places = whole.indices().to(torch.float64)
    return torch.cat([places.reshape(-1), whole.values().to(torch.float64).reshape(-1)])


def _factors(device: torch.device) -> torch.Tensor:
    """An odd number for each place of a block."""
    places = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device) * _MULTIPLIER
    return (places ^ (places >> 29)) | 1


def _sum_with_factors(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in torch.split(words, _BLOCK):
        products = block.to(torch.int64).mul_(factors[: block.numel()])
        total = total * _BLOCK_FACTOR + products.sum()
    return total


def pack_items(items: _Items, num_items: int) -> list[int]:
    """Return ``num_items`` items as a list of numbers, two for each."""
    packed = [number for item in items[: min(num_items, MAX_ITEMS)] for number in item]
    return packed + [0] * (2 * num_items - len(packed))


def unpack_items(numbers_: Sequence[int]) -> _Items:
    """The inverse of `pack_items`."""
    return list(zip(numbers_[::2], numbers_[1::2], strict=True))
