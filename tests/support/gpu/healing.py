"""A source of 2 GB of CUDA tensors: ``STEP`` is answered with seconds and where to fetch from."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch

from torchft_svc.client.checkpointing import HTTPTransport

DEVICE = torch.device("cuda", 0)
NUM_TENSORS, TENSOR_BYTES = 32, 64 << 20


def make_state(value: float) -> dict[str, Any]:
    shape = (TENSOR_BYTES // 4,)
    return {str(n): torch.full(shape, value * n, device=DEVICE) for n in range(NUM_TENSORS)}


def main() -> None:
    state = make_state(1.0)
    torch.cuda.synchronize()
    timeout = timedelta(seconds=60)
    with HTTPTransport(timeout, hostname="127.0.0.1") as transport:
        print("ready", flush=True)
        for line in sys.stdin:
            began_at = time.perf_counter()
            transport.send_checkpoint([1], int(line), state, timeout)
            print(time.perf_counter() - began_at, transport.metadata(), flush=True)


if __name__ == "__main__":
    main()
