"""Maps a state's tensors to ranges of bytes, and creates tensors from received bytes.

A *blob* is one range of bytes that is sent. A tensor is a view of one blob: dtype, shape, strides
and offset. Tensors whose bytes overlap share a blob, so tied weights are sent once and stay tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchft_svc.client.checkpointing.encoding.values import DTYPES, BadTree
from torchft_svc.errors import ConfigError

MAX_DIMS = 64  # torch's own limit
MAX_DIM = 1 << 48
# Every blob starts at a multiple of this, as torch's own allocator does.
ALIGNMENT = 64
NO_BLOB = -1  # of a tensor without elements


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A view of a blob; ``strides`` count elements, ``offset`` bytes from the blob's start."""

    blob: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def to_json(self) -> list[Any]:
        name = str(self.dtype).removeprefix("torch.")
        return [self.blob, name, list(self.shape), list(self.strides), self.offset]

    @property
    def span(self) -> int:
        """Bytes from the first to the last element."""
        return _span(self.shape, self.strides, self.dtype.itemsize)


class TensorTable:
    """Collects a state's tensors, and assigns them to blobs."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []  # by number; kept, because their ids are the keys
        self._numbers: dict[int, int] = {}

    def number_of(self, tensor: torch.Tensor, path: str) -> int:
        """Return a number for ``tensor``; the same object always gets the same one.

        Raises:
            ConfigError: a kind of tensor that cannot be sent.
        """
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        if reason := why_not(tensor):
            raise ConfigError(field=path, value=type(tensor).__name__, reason=reason)
        number = len(self.tensors)
        self.tensors.append(tensor)
        self._numbers[id(tensor)] = number
        return number

    def estimate_bytes(self) -> int:
        """About the total size of the blobs; tensors that overlap may be counted twice."""
        by_storage: dict[tuple[str, int], tuple[int, int]] = {}
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            key = (str(tensor.device), storage.data_ptr())
            in_storage, _ = by_storage.get(key, (0, 0))
            by_storage[key] = (in_storage + tensor.nbytes, storage.nbytes())
        return sum(min(sizes) for sizes in by_storage.values())

    def layout(self) -> tuple[list[TensorSpec], list[torch.Tensor]]:
        """The specs by number, and the blobs: one-dimensional uint8 tensors, each on its device.

        A blob shares the memory of a dense tensor; otherwise it is a copy.
        """
        plain = [_plain(tensor) for tensor in self.tensors]
        specs = [
            TensorSpec(NO_BLOB, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)
            for tensor in plain
        ]
        blobs: list[torch.Tensor] = []
        for run in _runs(plain):
            for number in run.numbers:
                tensor = plain[number]
                offset = _start(tensor) - run.start
                specs[number] = TensorSpec(
                    len(blobs), tensor.dtype, tuple(tensor.shape), tensor.stride(), offset
                )
            blobs.append(_bytes_of(plain[run.numbers[0]], run.start, run.stop))
        return specs, blobs


@dataclass(slots=True)
class _ByteRange:
    """Tensors of one storage whose bytes overlap, and the range that covers them."""

    start: int
    stop: int
    numbers: list[int] = field(default_factory=list)


def why_not(tensor: torch.Tensor) -> str:
    """Why ``tensor`` cannot be sent; empty if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"{type(tensor).__name__} tensors cannot be sent"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"only dense tensors can be sent, this one is {tensor.layout}"
    if tensor.is_quantized:
        return f"quantized tensors cannot be sent, this one is {tensor.dtype}"
    if tensor.device.type == "meta":
        return "a meta tensor has no data"
    return ""


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's data, with separate memory for each element."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() * tensor.itemsize > _span(tensor.shape, tensor.stride(), tensor.itemsize):
        return tensor.contiguous()  # expanded: several elements share memory
    return tensor


def _runs(tensors: Sequence[torch.Tensor]) -> list[_ByteRange]:
    """Ranges of storage that cover all tensors; those with gaps are replaced by dense copies.

    ``tensors`` must be a list that may be changed for that.
    """
    assert isinstance(tensors, list)
    by_storage: dict[tuple[str, int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            key = (str(tensor.device), tensor.untyped_storage().data_ptr())
            by_storage.setdefault(key, []).append(number)
    runs: list[_ByteRange] = []
    for numbers in by_storage.values():
        for run in _overlapping(tensors, numbers):
            first = tensors[run.numbers[0]]
            if len(run.numbers) == 1 and first.nbytes < run.stop - _start(first):
                dense = first.contiguous()
                tensors[run.numbers[0]] = dense
                run.start, run.stop = _start(dense), _start(dense) + dense.nbytes
            runs.append(run)
    return runs


def _overlapping(tensors: Sequence[torch.Tensor], numbers: list[int]) -> list[_ByteRange]:
    runs: list[_ByteRange] = []
    for number in sorted(numbers, key=lambda n: _start(tensors[n])):
        tensor = tensors[number]
        start = _start(tensor)
        stop = start + _span(tensor.shape, tensor.stride(), tensor.itemsize)
        if runs and start < runs[-1].stop:
            runs[-1].stop = max(runs[-1].stop, stop)
            runs[-1].numbers.append(number)
        else:
            # Aligned, so that offsets are valid for every dtype in the run.
            runs.append(
                _ByteRange(start - start % 16 if len(numbers) > 1 else start, stop, [number])
            )
    return runs


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    if 0 in shape:
        return 0
    return (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * itemsize


def _bytes_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    storage = tensor.untyped_storage()
    with torch.inference_mode(tensor.is_inference()):
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return raw.set_(storage, start, (stop - start,), (1,))


def parse_spec(entry: Any, blob_sizes: Sequence[int]) -> TensorSpec:
    """Check one entry of a received table against the blobs.

    Raises:
        BadTree: it is malformed, or exceeds its blob.
    """
    if not isinstance(entry, list) or len(entry) != 5:
        raise BadTree("an entry of the tensor table is malformed")
    blob, name, shape, strides, offset = entry
    if not isinstance(name, str) or name not in DTYPES:
        raise BadTree(f"this build of torch has no dtype {str(name)[:40]!r}")
    if not (_are_counts(shape) and _are_counts(strides) and len(shape) == len(strides)):
        raise BadTree("a tensor's shape or strides are not lists of sizes")
    if not _are_counts([offset]) or type(blob) is not int:
        raise BadTree("a tensor's place is not a number")
    spec = TensorSpec(blob, DTYPES[name], tuple(shape), tuple(strides), offset)
    if 0 in shape:
        return spec
    if not 0 <= blob < len(blob_sizes):
        raise BadTree("a tensor lies in a blob that does not exist")
    num_elements = 1
    for size in shape:
        num_elements *= size
    itemsize = spec.dtype.itemsize
    if offset % itemsize or offset + spec.span > blob_sizes[blob]:
        raise BadTree("a tensor reaches outside of its blob")
    if num_elements * itemsize > blob_sizes[blob]:
        raise BadTree("a tensor claims more elements than its blob has")
    return spec


def _are_counts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(type(item) is int and 0 <= item <= MAX_DIM for item in value)
    )


def make_tensor(spec: TensorSpec, blobs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that ``spec`` describes, as a view of its blob."""
    if spec.blob == NO_BLOB or 0 in spec.shape:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    start = spec.offset // spec.dtype.itemsize
    empty = torch.empty(0, dtype=spec.dtype, device=blobs[spec.blob].device)
    return empty.set_(blobs[spec.blob].untyped_storage(), start, spec.shape, spec.strides)
