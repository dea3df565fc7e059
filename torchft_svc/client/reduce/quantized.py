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
# The sign, the lowest 4 of 5 bits of the exponent, and the first 3 of the mantissa.
_FLOAT16_BITS = 0xBF80 - (1 << 16)
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


def encode(
    values: torch.Tensor,
    out: torch.Tensor,
    kind: Quantization,
    errors: torch.Tensor | None = None,
) -> None:
    """Encode ``values``, float32 of shape (chunk,), into the bytes ``out``.

    A block with a number that is not finite is decoded as numbers that are not finite.
    ``errors``: gets what ``out`` leaves out; may be ``values``.
    """
    chunk = values.numel()
    numbers = out[:chunk].view(kind.dtype)
    scales = out[chunk:].view(torch.float32)
    for start in range(0, chunk, _SLICE):
        blocks = values[start : start + _SLICE].view(-1, BLOCK)
        largest = blocks.abs().amax(dim=1)  # a norm takes 20 times as long on CPUs
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
        rounded = numbers[start : start + blocks.numel()].view(-1, BLOCK).copy_(scaled)
        if errors is not None:
            decoded = _as_float32(rounded, kind).mul_(scale.unsqueeze(1))
            torch.sub(blocks, decoded, out=errors[start : start + _SLICE].view(-1, BLOCK))


def decode(encoded: torch.Tensor, out: torch.Tensor, kind: Quantization, *, add: bool) -> None:
    """Decode the bytes of a chunk into ``out``, float32 of shape (chunk,), or add them to it."""
    chunk = out.numel()
    numbers = encoded[:chunk].view(kind.dtype)
    scales = encoded[chunk:].view(torch.float32)
    for start in range(0, chunk, _SLICE):
        target = out[start : start + _SLICE].view(-1, BLOCK)
        scale = scales[start // BLOCK : (start + target.numel()) // BLOCK].unsqueeze(1)
        block = _as_float32(numbers[start : start + target.numel()].view(-1, BLOCK), kind)
        if add:  # rounded twice everywhere, while some CPUs and devices would fuse both
            target.add_(block.mul_(scale))
        else:
            torch.mul(block, scale, out=target)


def _as_float32(numbers: torch.Tensor, kind: Quantization) -> torch.Tensor:
    """Convert 8-bit numbers to float32.

    Torch's conversion of float8 takes ten times as long on CPUs. What is no number becomes 480; it
    is only in blocks whose scale is not finite.
    """
    if kind is Quantization.INT8 or numbers.is_cuda:
        return numbers.float()
    # The bits as those of float16, whose exponent has another bias.
    bits = numbers.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(7).bitwise_and_(_FLOAT16_BITS)
    return bits.view(torch.float16).float().mul_(256.0)


def encode_chunks(
    values: torch.Tensor,
    num_members: int,
    kind: Quantization,
    errors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode ``values``, of any shape, as one row of bytes for each member.

    ``errors``: float32 of shape (numel,), gets what the bytes leave out; may be ``values`` itself.
    """
    flat = values.detach().reshape(-1)
    chunk = chunk_length(flat.numel(), num_members)
    rows = torch.empty(num_members, encoded_bytes(chunk), dtype=torch.uint8, device=flat.device)
    if (fused := _fused(flat.device, kind)) is not None:
        fused.encode(flat.float().contiguous(), rows, kind, errors)
        return rows
    for number, row in enumerate(rows):
        of_row = slice(number * chunk, (number + 1) * chunk)
        part, left_out = flat[of_row].float(), None if errors is None else errors[of_row]
        if len(part) == chunk:
            encode(part, row, kind, left_out)
            continue
        padded = torch.zeros(chunk, dtype=torch.float32, device=flat.device)
        padded[: len(part)] = part
        encode(padded, row, kind, None if left_out is None else padded)
        if left_out is not None:
            left_out.copy_(padded[: len(part)])
    return rows


def sum_chunks(
    rows: torch.Tensor, chunk: int, kind: Quantization, errors: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the chunks that the members have sent, in their order, and encode the sum.

    ``errors``: float32 of at most the chunk's length, gets what the encoded sum leaves out.
    """
    encoded = torch.empty_like(rows[0])
    if (fused := _fused(rows.device, kind)) is not None:
        fused.add(rows, encoded, kind, errors)
        return encoded
    total = torch.empty(chunk, dtype=torch.float32, device=rows.device)
    for number, row in enumerate(rows):
        decode(row, total, kind, add=number > 0)
    encode(total, encoded, kind, None if errors is None else total)
    if errors is not None:
        errors.copy_(total[: errors.numel()])
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
    flat = out.view(-1) if out.is_contiguous() else out.new_empty(out.numel())
    for number, row in enumerate(rows):
        part = flat[number * chunk : (number + 1) * chunk]
        if len(part) == chunk and part.dtype is torch.float32:
            decode(row, part, kind, add=False)
            continue
        values = torch.empty(chunk, dtype=torch.float32, device=out.device)
        decode(row, values, kind, add=False)
        part.copy_(values[: len(part)])
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


@functools.cache
def _fused(device: torch.device, kind: Quantization) -> ModuleType | None:
    """Return `triton_blocks` if its kernels run on ``device``; compiles them on the first call."""
    if device.type != "cuda" or not importlib.util.find_spec("triton"):
        return None
    try:
        from torchft_svc.client.reduce import triton_blocks
    except ImportError as error:  # another version of it, or a part is missing
        log.warning(_NOT_FUSED, device, type(error).__name__, error)
        return None
    try:
        triton_blocks.check(device, kind)
    except (RuntimeError, OSError, subprocess.SubprocessError, triton_blocks.TritonError) as error:
        log.warning(_NOT_FUSED, device, type(error).__name__, error)
        return None
    return triton_blocks
