"""Blocks of 8-bit numbers on a CUDA device, each pass fused into one Triton kernel.

The kernels make the same bits as the vectorized torch of `quantized`, for which every operation is
spelled out: IEEE divisions, no fused multiply-add, and conversions made of whole numbers, so that
they are the same on all devices. Only what is not a number may be another one.

A row of bytes is a member's chunk: its numbers, then its scales (see `quantized.encoded_bytes`).
"""

# Without postponed annotations: Triton reads `tl.constexpr`.
import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from triton.errors import TritonError as TritonError

from torchft_svc.client.reduce.quantized import BLOCK, Quantization, encoded_bytes

_BLOCK_BYTES = encoded_bytes(BLOCK)
# Blocks of one program: large enough to fill its threads, small enough for their registers.
_BLOCKS_OF_A_PROGRAM = 8
_WARPS = 4
# Sizes are not specialized: each tensor of another size could be compiled again, within a step.


def encode(
    values: torch.Tensor, rows: torch.Tensor, kind: Quantization, errors: torch.Tensor | None
) -> None:
    """Encode ``values``, float32 of shape (numel,), into ``rows``, zeros behind its end.

    ``errors``: gets what ``rows`` leave out; may be ``values``.
    """
    num_blocks = rows.numel() // _BLOCK_BYTES
    with _on_device(rows):
        _encode[_grid(num_blocks)](
            values,
            rows.view(torch.int8),
            rows.view(torch.float32),
            errors,
            values.numel(),
            num_blocks,
            num_blocks // len(rows),
            **_options(kind),
        )


def add(
    rows: torch.Tensor, encoded: torch.Tensor, kind: Quantization, errors: torch.Tensor | None
) -> None:
    """Add up ``rows`` in float32 and in their order, and write the encoded sum to ``encoded``.

    ``errors``: gets what ``encoded`` leaves out.
    """
    num_blocks = encoded.numel() // _BLOCK_BYTES
    with _on_device(rows):
        _add[_grid(num_blocks)](
            rows.view(torch.int8),
            rows.view(torch.float32),
            encoded.view(torch.int8),
            encoded.view(torch.float32),
            errors,
            0 if errors is None else errors.numel(),
            len(rows),
            num_blocks,
            **_options(kind),
        )


def decode(rows: torch.Tensor, out: torch.Tensor, kind: Quantization) -> None:
    """Decode ``rows`` into ``out``, float32 of shape (numel,)."""
    num_blocks = rows.numel() // _BLOCK_BYTES
    with _on_device(rows):
        _decode[_grid(num_blocks)](
            rows.view(torch.int8),
            rows.view(torch.float32),
            out,
            out.numel(),
            num_blocks,
            num_blocks // len(rows),
            **_options(kind),
        )


def check(device: torch.device, kind: Quantization) -> None:
    """Compile and run the kernels of ``kind`` once.

    Raises:
        RuntimeError, OSError, subprocess.SubprocessError, TritonError: Triton does not work here,
            for example without a C compiler.
    """
    values = torch.ones(BLOCK, device=device)
    rows = torch.empty(1, _BLOCK_BYTES, dtype=torch.uint8, device=device)
    encode(values, rows, kind, None)
    add(rows, rows[0].clone(), kind, None)
    decode(rows, values, kind)


def _grid(num_blocks: int) -> tuple[int]:
    return (triton.cdiv(num_blocks, _BLOCKS_OF_A_PROGRAM),)


def _options(kind: Quantization) -> dict[str, Any]:
    return {
        "is_float8": kind is Quantization.FLOAT8,
        "size": BLOCK,
        "tile": _BLOCKS_OF_A_PROGRAM,
        "num_warps": _WARPS,
        "enable_fp_fusion": False,
    }


def _on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's device the current one, on which Triton launches.

    In its interpreter, for tests, tensors are on the CPU.
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@triton.jit(do_not_specialize=["numel", "num_blocks", "per_row"])
def _encode(
    values,
    numbers,
    scales,
    errors,
    numel,
    num_blocks,
    per_row,
    is_float8: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    place = block[:, None] * size + tl.arange(0, size)[None, :]
    read = tl.load(values + place, mask=place < numel, other=0.0)
    encoded, scale = _quantize(read, is_float8)
    _store(numbers, scales, block, num_blocks, per_row, encoded, scale, size)
    if errors is not None:
        left = read - _to_float32(encoded, is_float8) * scale[:, None]
        tl.store(errors + place, left, mask=place < numel)


@triton.jit(do_not_specialize=["num_errors", "num_rows", "num_blocks"])
def _add(
    numbers,
    scales,
    sum_numbers,
    sum_scales,
    errors,
    num_errors,
    num_rows,
    num_blocks,
    is_float8: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    is_there = block < num_blocks
    total = _load(numbers, scales, block, is_there, num_blocks, is_float8, size)
    row = 1
    while row < num_rows:  # a range of a number that is not constant fails in the interpreter
        of_row = block + row * num_blocks
        total += _load(numbers, scales, of_row, is_there, num_blocks, is_float8, size)
        row += 1
    encoded, scale = _quantize(total, is_float8)
    _store(sum_numbers, sum_scales, block, num_blocks, num_blocks, encoded, scale, size)
    if errors is not None:
        left = total - _to_float32(encoded, is_float8) * scale[:, None]
        place = block[:, None] * size + tl.arange(0, size)[None, :]
        tl.store(errors + place, left, mask=place < num_errors)


@triton.jit(do_not_specialize=["numel", "num_blocks", "per_row"])
def _decode(
    numbers,
    scales,
    out,
    numel,
    num_blocks,
    per_row,
    is_float8: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    decoded = _load(numbers, scales, block, block < num_blocks, per_row, is_float8, size)
    place = block[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(out + place, decoded, mask=place < numel)


@triton.jit
def _places(block, per_row, size: tl.constexpr):
    """Return where the blocks' first numbers are, in bytes, and their scales, in 4 bytes each."""
    row, within = block // per_row, block % per_row
    row_scales = row * per_row * (size // 4 + 1)
    return row_scales * 4 + within * size, row_scales + per_row * (size // 4) + within


@triton.jit
def _store(numbers, scales, block, num_blocks, per_row, encoded, scale, size: tl.constexpr):
    is_there = block < num_blocks
    first, of_scale = _places(block, per_row, size)
    place = first[:, None] + tl.arange(0, size)[None, :]
    tl.store(numbers + place, encoded, mask=is_there[:, None])
    tl.store(scales + of_scale, scale, mask=is_there)


@triton.jit
def _load(numbers, scales, block, is_there, per_row, is_float8: tl.constexpr, size: tl.constexpr):
    first, of_scale = _places(block, per_row, size)
    place = first[:, None] + tl.arange(0, size)[None, :]
    read = tl.load(numbers + place, mask=is_there[:, None], other=0)
    scale = tl.load(scales + of_scale, mask=is_there, other=0.0)
    return _to_float32(read, is_float8) * scale[:, None]


@triton.jit
def _to_float32(numbers, is_float8: tl.constexpr):
    return _from_float8(numbers) if is_float8 else numbers.to(tl.float32)


@triton.jit
def _quantize(values, is_float8: tl.constexpr):
    """Return the numbers of the blocks that are the rows of ``values``, and their scales."""
    # As whole numbers, among which what is not a number is the largest one.
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, axis=1).to(tl.float32, bitcast=True)
    scale = largest * (1.0 / 448.0 if is_float8 else 1.0 / 127.0)
    is_normal = scale >= 1.1754943508222875e-38
    inverse = tl.where(is_normal, tl.div_rn(1.0, tl.where(is_normal, scale, 1.0)), 0.0)
    scaled = values * inverse[:, None]
    if is_float8:
        numbers = _to_float8(scaled)
    else:
        # Adding 1.5 * 2^23 rounds to the nearest whole number, and to the even one of two.
        rounded = (scaled + 12582912.0) - 12582912.0
        numbers = tl.where(rounded == rounded, rounded, 0.0).to(tl.int8)
    return numbers, scale


@triton.jit
def _to_float8(values):
    """Round to e4m3, to the nearest one, and to the even one of two."""
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Above 448 is what was rounded up before; above infinity is no number.
    magnitude = tl.where(magnitude <= 0x7F800000, tl.minimum(magnitude, 0x43E00000), 0x43F00000)
    # Adding 2^14 rounds to a multiple of 2^-9, the step of the smallest numbers.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    # 20 bits of the mantissa are dropped, and the exponent's bias is 7 instead of 127.
    normal = (magnitude + ((magnitude >> 20) & 1) + 0x7FFFF - (120 << 23)) >> 20
    number = tl.where(magnitude < 0x3C800000, small - 0x46800000, normal)
    return (number | sign).to(tl.int8)


@triton.jit
def _from_float8(numbers):
    bits = numbers.to(tl.int32)
    magnitude = bits & 0x7F
    # Below the eighth number they are multiples of 2^-9.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    # A minus sign would lose that of a zero.
    return (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
