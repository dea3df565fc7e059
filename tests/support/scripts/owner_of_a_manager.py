"""A trainer, as far as its manager's life depends on it: run by test_sidecar.py.

Arguments: the lighthouse's address, and `forks` to leave a forked child behind. Prints the
manager's pid and address and the forked child's pid (0: none), then waits for its end.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from torchft_svc.manager_server.child import ManagerProcess
from torchft_svc.manager_server.config import ManagerConfig

LIFE_S = 60.0


def main() -> None:
    config = ManagerConfig(
        lighthouse_address=sys.argv[1],
        replica_name="owned",
        group_world_size=1,
        store_address="127.0.0.1:1",
        bind="127.0.0.1:0",
    )
    with ManagerProcess.start(config) as manager:
        forked = 0
        if "forks" in sys.argv:
            forked = os.fork()
            if forked == 0:
                time.sleep(LIFE_S)
                os._exit(0)
        print(manager.pid, manager.address, forked, flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        number = signal.sigtimedwait([signal.SIGTERM], LIFE_S)
        sys.exit(40 if number else 41)


main()
