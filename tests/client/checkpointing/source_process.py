"""A process that offers a state of step 1 and serves it until it is killed.

Prints its metadata, and with ``--fork`` the id of a child that outlives it, holding whatever it
inherited.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from torchft_svc.client.checkpointing import HTTPTransport

NUM_FLOATS = 4 << 20
_LIFE_S = 60.0


def main() -> None:
    transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1")
    transport.send_checkpoint(
        [1], 1, {"w": torch.arange(float(NUM_FLOATS))}, timedelta(seconds=_LIFE_S)
    )
    child = os.fork() if "--fork" in sys.argv else os.getpid()
    if child:
        print(transport.metadata(), child, flush=True)
    else:
        os.close(1)
    time.sleep(_LIFE_S)


if __name__ == "__main__":
    main()
