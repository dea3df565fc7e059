"""A trainer that starts its manager early, leaves a forked child behind, and is killed.

Run by test_early.py. Prints the pids of the manager and of the forked child.
"""

from __future__ import annotations

import os
import signal
import time

from torchft_svc.manager_server.early import Sidecar
from torchft_svc.rpc.security import PLAIN

LIFE_S = 60.0


def main() -> None:
    sidecar = Sidecar.start(PLAIN, None)
    forked = os.fork()
    if forked == 0:
        os.close(1)  # for the end of whoever reads it
        time.sleep(LIFE_S)
        os._exit(0)
    print(sidecar.process.pid, forked, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


main()
