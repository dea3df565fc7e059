"""Runs a program, with the rest of the command line, as the only one of a host with one GPU.

    python own_host.py SCRIPT ARGUMENTS

NCCL refuses two ranks on one device of one host, so this process names a host of its own.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ |= {
        "NCCL_HOSTID": f"host-{os.getpid()}",
        "NCCL_SOCKET_IFNAME": "lo",
        "LOCAL_RANK": "0",
    }
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
