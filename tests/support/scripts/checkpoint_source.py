"""A process that offers a state of step 1 and serves it until it is killed.

Prints its metadata, and with ``--fork`` the id of a child that outlives it, holding whatever it
inherited.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch

from torchft_svc.client.checkpointing import HTTPTransport

NUM_FLOATS = 4 << 20
_LIFE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--floats", type=int, default=NUM_FLOATS)
    parser.add_argument("--chunk-bytes", type=int)
    flags = parser.parse_args()
    transport: HTTPTransport[Any] = HTTPTransport(
        hostname="127.0.0.1", chunk_bytes=flags.chunk_bytes
    )
    state = {"w": torch.arange(float(flags.floats))}
    transport.send_checkpoint([1], 1, state, timedelta(seconds=_LIFE_S))
    child = os.fork() if flags.fork else os.getpid()
    if child:
        print(transport.metadata(), child, flush=True)
    else:
        os.close(1)
    time.sleep(_LIFE_S)


if __name__ == "__main__":
    main()
