"""Starts workers in milliseconds: a server has imported their trainer, and forks for each."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.chaos.hosts import move_to
from tools.chaos.options import WorkerOptions, decode
from torchft_svc.host.fork_server import ForkServer, serve

ROOT = Path(__file__).parents[2]

Run = Callable[[WorkerOptions], None]


@contextlib.contextmanager
def worker_server(trainer: str = "tools.chaos.trainer", **variables: str) -> Iterator[ForkServer]:
    """A server of workers, by their `WorkerOptions`; all of them are killed with the block.

    ``trainer`` is the module whose ``run`` is a worker's life, and whose ``warm_up`` is called once
    before the first fork. ``variables`` are added to the environment that its workers inherit.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        # torch looks up the name of whoever connects; a lost answer must not cost 5 s.
        "RES_OPTIONS": "timeout:1 attempts:1",
        "PYTHONPATH": str(ROOT),
        # torch looks for devices without CUDA, which a process must not initialize before it forks.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    server = ForkServer(
        "tools.chaos.fork_server",
        "workers",
        trainer,
        environment=os.environ | environment | variables,
    )
    server.start()
    try:
        yield server
    finally:
        server.close()


def main(descriptor: str, owner_pid: str, module: str) -> None:
    """Run the server, and in its forks the workers."""
    trainer = importlib.import_module(module)
    trainer.warm_up()
    fork = serve(int(descriptor), int(owner_pid))
    if fork is None:
        return
    status = 1
    try:
        fork.lead_session(signal.SIGINT, signal.SIGTERM)
        status = _run_worker(trainer.run, decode(fork.request.decode()))
    finally:
        os._exit(status)


def _run_worker(run: Run, options: WorkerOptions) -> int:
    """Run a worker as a process like one that was started by itself; return its exit status."""
    output = os.open(options.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(output, target)
    try:
        if options.host:
            move_to(options.host, options.namespace)
        run(options)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - a process ends here
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
