"""The program of the fork server that has imported torch; a fork carries collectives.

It never uses a device, so the forks may. Each request carries the socket to the fork.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection

from torchft_svc.client.process.fork_server import serve
from torchft_svc.client.process_groups.isolated.child import Child


def main() -> None:
    """``fork_server_main DESCRIPTOR PID``: the socket to the trainer, and its process id."""
    descriptor, trainer_pid = map(int, sys.argv[1:])
    fork = serve(descriptor, trainer_pid)
    if fork is None:
        return
    status = 1
    try:
        _, (connection,) = fork
        Child(Connection(connection)).run(trainer_pid)
        status = 0
    except Exception:  # noqa: BLE001 - the process exits and prints why
        traceback.print_exc()
    finally:
        os._exit(status)  # a hanging operation would block an ordinary exit


if __name__ == "__main__":
    main()
