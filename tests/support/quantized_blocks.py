"""Numbers for tests of 8-bit blocks, and the comparison of two ways to make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchft_svc.client.reduce import quantized
from torchft_svc.client.reduce.quantized import BLOCK, Quantization


def numbers(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def all_bit_patterns(numel: int, seed: int) -> torch.Tensor:
    """Any float32: denormal ones, huge ones, infinite ones, and some that are no number."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator)
    return patterns.to(torch.int32).view(torch.float32)


def halves() -> torch.Tensor:
    """Blocks with scale 1, whose numbers are halfway between two of either format."""
    whole = torch.arange(-127.0, 128.0, 0.5)
    eighths = torch.cat([torch.arange(0.0, 1.0, 2**-10), torch.arange(1.0, 448.0, 0.25)])
    parts = []
    for largest, part in ((127.0, whole), (448.0, eighths), (448.0, -eighths)):
        for each in part.split(BLOCK - 1):
            parts += [torch.tensor([largest]), each, torch.zeros(BLOCK - 1 - len(each))]
    return torch.cat(parts)


def cases() -> Iterator[tuple[str, torch.Tensor]]:
    yield "one number", numbers(1)
    yield "an odd tail", numbers(5 * BLOCK + 77)
    yield "whole blocks", numbers(16 * BLOCK)
    yield "halfway", halves()
    yield "zeros of both signs", torch.tensor([0.0, -0.0] * 300)
    yield "zeros of both signs beside a number", torch.tensor([0.0, -0.0] * 127 + [1.0])
    tiny = numbers(8 * BLOCK)
    for exponent in (-45, -42, -39, -37, -36, -35, -34):
        yield f"about 1e{exponent}", tiny * 10.0**exponent
    yield "huge", numbers(3 * BLOCK).clamp(-3, 3) * 1e38
    for bad in (float("nan"), float("inf"), -float("inf")):
        some = numbers(4 * BLOCK)
        some[[3, 700]] = bad
        yield f"some {bad}", some
    yield "any bits", all_bit_patterns(64 * BLOCK, 1)
    yield "each of another size", numbers(9 * BLOCK) * torch.logspace(-30, 30, 9 * BLOCK)
    for dtype in (torch.bfloat16, torch.float16):
        yield f"{dtype}", numbers(3 * BLOCK + 5).to(dtype)
    yield "a matrix that is transposed", numbers(60 * 70).view(60, 70).t()


def _assert_same_rows(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """All bits are equal, where a block is finite; elsewhere it is finite in neither."""
    assert found.shape == wanted.shape
    for mine, theirs in zip(found.cpu(), wanted.cpu(), strict=True):
        chunk = len(mine) // (BLOCK + 4) * BLOCK
        scales = mine[chunk:].view(torch.float32), theirs[chunk:].view(torch.float32)
        is_finite = scales[0].isfinite()
        assert torch.equal(is_finite, scales[1].isfinite())
        # As whole numbers: zeros of both signs are equal otherwise.
        assert torch.equal(
            mine[chunk:].view(torch.int32)[is_finite], theirs[chunk:].view(torch.int32)[is_finite]
        )
        blocks = mine[:chunk].view(-1, BLOCK), theirs[:chunk].view(-1, BLOCK)
        assert torch.equal(blocks[0][is_finite], blocks[1][is_finite])


def _assert_same_numbers(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    found, wanted = found.cpu(), wanted.cpu()
    assert torch.equal(found.isfinite(), wanted.isfinite())
    whole = {4: torch.int32, 2: torch.int16}[found.element_size()]
    pairs = [each.contiguous()[wanted.isfinite()].view(whole) for each in (found, wanted)]
    assert torch.equal(*pairs)


class Reduced(NamedTuple):
    """What a sum of quantized numbers makes: on its way, and at its end."""

    sent: list[torch.Tensor]
    sums: torch.Tensor
    result: torch.Tensor
    errors: list[torch.Tensor]  # of each member's numbers, then of each chunk's sum


def reduce(values: list[torch.Tensor], kind: Quantization) -> Reduced:
    """Sum the ``values`` of all members, as they do together."""
    num_members, device = len(values), values[0].device
    own = [each.reshape(-1).float().clone() for each in values]
    errors = [torch.empty_like(each) for each in own]
    sent = [
        quantized.encode_chunks(each, num_members, kind, errors=error)
        for each, error in zip(values, errors, strict=True)
    ]
    plain = [quantized.encode_chunks(each, num_members, kind) for each in values]
    in_place = quantized.encode_chunks(own[0], num_members, kind, errors=own[0])
    for mine, theirs in [*zip(sent, plain, strict=True), (in_place, sent[0])]:
        _assert_same_rows(mine, theirs)
    _assert_same_numbers(own[0], errors[0])
    chunk = quantized.chunk_length(values[0].numel(), num_members)
    sums = []
    for member in range(num_members):
        received = torch.stack([rows[member] for rows in sent])
        errors.append(torch.empty(chunk - 5 * member, device=device))  # the last one may be shorter
        sums.append(quantized.sum_chunks(received, chunk, kind, errors=errors[-1]))
        _assert_same_rows(sums[-1][None], quantized.sum_chunks(received, chunk, kind)[None])
    result = torch.empty_like(values[0])
    quantized.decode_chunks(torch.stack(sums), result, kind)
    return Reduced(sent, torch.stack(sums), result, errors)


def assert_same_bits(found: Reduced, wanted: Reduced) -> None:
    for mine, theirs in zip(found.sent, wanted.sent, strict=True):
        _assert_same_rows(mine, theirs)
    _assert_same_rows(found.sums, wanted.sums)
    _assert_same_numbers(found.result, wanted.result)
    for mine, theirs in zip(found.errors, wanted.errors, strict=True):
        _assert_same_numbers(mine, theirs)
