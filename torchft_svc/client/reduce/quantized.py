"""Sums with a quarter of the bytes: 8-bit numbers with a scale for each block of 256 elements.

A block's scale maps its largest magnitude to the largest 8-bit number; the others are rounded to
the nearest one. Each member owns a chunk of the tensor: it receives that chunk from all members,
adds them in float32 in the order of the ranks, and sends the sum, in 8 bits again, to all. So all
members decode the same bytes, and get the same bits. CUDA devices do it in fused kernels where
Triton is installed (`triton_blocks`).
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import logging
import subprocess
from types import ModuleType

import torch

from torchft_svc.errors import ConfigError

log = logging.getLogger(__name__)

BLOCK = 256
# Elements that are encoded at once, so that intermediate values stay in a cache.
_SLICE = BLOCK * 2048
_SCALE_BYTES = 4
_SMALLEST = torch.finfo(torch.float32).tiny
_NOT_FUSED = (
    "Triton cannot compile for %s (%s: %s): 8-bit numbers are made by torch instead, which gives "
    "the same bits in more time"
)
_NAMES = "True or 'int8', 'float8', or False"


class Quantization(enum.Enum):
    """The 8-bit numbers that travel."""

    INT8 = "int8"
    FLOAT8 = "float8"  # e4m3

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an encoded element."""
        return torch.int8 if self is Quantization.INT8 else torch.float8_e4m3fn

    @property
    def largest(self) -> float:
        """The largest number of that dtype."""
        return 127.0 if self is Quantization.INT8 else 448.0


def resolve_quantization(wanted: bool | str) -> Quantization | None:
    """Return what ``should_quantize`` asks for; None for False.

    Raises:
        ConfigError: it is no such number format.
    """
    if wanted is False:
        return None
    if wanted is True:
        return Quantization.INT8
    try:
        return Quantization(wanted)
    except ValueError:
        raise ConfigError("should_quantize", wanted, _NAMES) from None


def check_quantizable(tensor: torch.Tensor, name: str = "tensor") -> None:
    """Raise `ConfigError` if ``tensor`` cannot be summed in 8 bits; it is not sent otherwise."""
    if not tensor.dtype.is_floating_point:
        reason = "only floating-point numbers can be quantized: use should_quantize=False"
        raise ConfigError(name, tensor.dtype, reason)
    if tensor.dtype is torch.float64:
        reason = "the sums are made in float32: convert the tensor, or use should_quantize=False"
        raise ConfigError(name, tensor.dtype, reason)


def chunk_length(numel: int, num_members: int) -> int:
    """The elements of a member's chunk, in whole blocks."""
    return -(-numel // (num_members * BLOCK)) * BLOCK


def encoded_bytes(chunk: int) -> int:
    """The bytes of an encoded chunk: its elements, then its scales."""
    return chunk + chunk // BLOCK * _SCALE_BYTES


def encode(values: torch.Tensor, out: torch.Tensor, kind: Quantization) -> None:
    """Encode ``values``, float32 of shape (chunk,), into the bytes ``out``.

    A block with a number that is not finite is decoded as numbers that are not finite.
    """
    chunk = values.numel()
    numbers = out[:chunk].view(kind.dtype)
    scales = out[chunk:].view(torch.float32)
    for start in range(0, chunk, _SLICE):
        blocks = values[start : start + _SLICE].view(-1, BLOCK)
        largest = torch.linalg.vector_norm(blocks, ord=float("inf"), dim=1)
        # Devices would divide in another way than CPUs.
        scale = largest * (1.0 / kind.largest)
        scales[start // BLOCK : (start + blocks.numel()) // BLOCK] = scale
        # The reciprocal of a smaller scale is infinite, and would turn zeros into no numbers.
        inverse = torch.where(scale >= _SMALLEST, 1.0 / scale, torch.zeros_like(scale))
        scaled = blocks * inverse.unsqueeze(1)
        if kind is Quantization.INT8:
            scaled.round_()
        else:  # the product may be rounded above the largest number, which would be no number
            scaled.clamp_(-kind.largest, kind.largest)
        numbers[start : start + blocks.numel()].view(-1, BLOCK).copy_(scaled)


def decode(encoded: torch.Tensor, out: torch.Tensor, kind: Quantization, *, add: bool) -> None:
    """Decode the bytes of a chunk into ``out``, float32 of shape (chunk,), or add them to it."""
    chunk = out.numel()
    numbers = encoded[:chunk].view(kind.dtype)
    scales = encoded[chunk:].view(torch.float32)
    for start in range(0, chunk, _SLICE):
        target = out[start : start + _SLICE].view(-1, BLOCK)
        scale = scales[start // BLOCK : (start + target.numel()) // BLOCK].unsqueeze(1)
        block = numbers[start : start + target.numel()].view(-1, BLOCK).float()
        if add:  # rounded twice everywhere, while some CPUs and devices would fuse both
            target.add_(block.mul_(scale))
        else:
            torch.mul(block, scale, out=target)


def encode_chunks(values: torch.Tensor, num_members: int, kind: Quantization) -> torch.Tensor:
    """Encode ``values``, of any shape, as one row of bytes for each member."""
    flat = values.detach().reshape(-1)
    chunk = chunk_length(flat.numel(), num_members)
    rows = torch.empty(num_members, encoded_bytes(chunk), dtype=torch.uint8, device=flat.device)
    if (fused := _fused(flat.device, kind)) is not None:
        fused.encode(flat.float(), rows, kind)
        return rows
    padded = torch.zeros(num_members * chunk, dtype=torch.float32, device=flat.device)
    padded[: flat.numel()] = flat
    for row, values_of_row in zip(rows, padded.view(num_members, chunk), strict=True):
        encode(values_of_row, row, kind)
    return rows


def sum_chunks(rows: torch.Tensor, chunk: int, kind: Quantization) -> torch.Tensor:
    """Add the chunks that the members have sent, in their order, and encode the sum."""
    encoded = torch.empty_like(rows[0])
    if (fused := _fused(rows.device, kind)) is not None:
        fused.add(rows, encoded, kind)
        return encoded
    total = torch.empty(chunk, dtype=torch.float32, device=rows.device)
    for number, row in enumerate(rows):
        decode(row, total, kind, add=number > 0)
    encode(total, encoded, kind)
    return encoded


def decode_chunks(rows: torch.Tensor, out: torch.Tensor, kind: Quantization) -> None:
    """Decode all members' chunks into ``out``, of any shape."""
    if (fused := _fused(rows.device, kind)) is not None:
        is_plain = out.dtype is torch.float32 and out.is_contiguous()
        whole = out if is_plain else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        fused.decode(rows, whole, kind)
        if not is_plain:
            out.copy_(whole)
        return
    chunk = chunk_length(out.numel(), len(rows))
    flat = torch.empty(len(rows) * chunk, dtype=torch.float32, device=rows.device)
    for row, values in zip(rows, flat.view(len(rows), chunk), strict=True):
        decode(row, values, kind, add=False)
    out.copy_(flat[: out.numel()].view(out.shape))


@functools.cache
def _fused(device: torch.device, kind: Quantization) -> ModuleType | None:
    """Return `triton_blocks` if its kernels run on ``device``; compiles them on the first call."""
    if device.type != "cuda" or not importlib.util.find_spec("triton"):
        return None
    from torchft_svc.client.reduce import triton_blocks

    try:
        triton_blocks.check(device, kind)
    except (RuntimeError, OSError, subprocess.SubprocessError, triton_blocks.TritonError) as error:
        log.warning(_NOT_FUSED, device, type(error).__name__, error)
        return None
    return triton_blocks


def round_trip(values: torch.Tensor, kind: Quantization) -> torch.Tensor:
    """Return what a member that receives ``values`` decodes, as float32 of the same shape."""
    found = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    decode_chunks(encode_chunks(values, 1, kind), found, kind)
    return found
