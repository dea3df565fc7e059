"""Hosts a store: prints its port, and ends with its standard input."""

from __future__ import annotations

import sys

from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
