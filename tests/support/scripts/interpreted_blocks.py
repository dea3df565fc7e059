"""Compares the kernels of 8-bit blocks, in Triton's interpreter, with torch; prints what differs.

A process of its own: Triton reads ``TRITON_INTERPRET`` when it is imported, which torch may do.
"""

from __future__ import annotations

import sys

from support.quantized_blocks import assert_same_bits, cases, reduce
from torchft_svc.client.reduce import quantized, triton_blocks
from torchft_svc.client.reduce.quantized import Quantization


def main() -> None:
    num_compared = 0
    chosen, ways = quantized._fused, {"torch": None, "Triton": triton_blocks}
    for name, values in cases():
        for kind in Quantization:
            for num_members in (1, 2, 3):
                members = [values.roll(7 * number) for number in range(num_members)]
                found = {}
                for way, kernels in ways.items():
                    quantized._fused = lambda *_, kernels=kernels: kernels  # type: ignore[assignment]
                    found[way] = reduce(members, kind)
                quantized._fused = chosen
                try:
                    assert_same_bits(found["Triton"], found["torch"])
                except AssertionError as error:
                    sys.exit(f"{name}, {kind.value}, {num_members} members: {error}")
                num_compared += 1
    print(f"{num_compared} sums are equal")


if __name__ == "__main__":
    main()
