"""Starts workers in milliseconds: a process that has imported torch once and forks for each.

As a program it reads the options of a worker from each line of its input, and writes a line for
each worker that was started or has ended. `ForkServer` is its other side.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.options import WorkerOptions, decode
from demo.orphans import die_with_parent

ROOT = Path(__file__).parents[1]
# torch is imported meanwhile, on a machine that may be busy with other work.
START_S = 120.0
FORK_S = 10.0
END_S = 5.0

Run = Callable[[WorkerOptions], None]


class ForkServerError(Exception):
    """The fork server did not start, or has ended."""


class ForkServer:
    """The process that forks; a context manager, which kills all workers at its end.

    ``trainer`` is the module whose ``run`` is a worker's life, and whose ``warm_up`` is called once
    before the first fork. ``variables`` are added to the environment that its workers inherit.
    """

    def __init__(self, trainer: str = "chaos.trainer", **variables: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.fork_server", trainer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                # torch looks up the name of whoever connects; a lost answer must not cost 5 s.
                "RES_OPTIONS": "timeout:1 attempts:1",
                "PYTHONPATH": str(ROOT),
                **variables,
            },
            start_new_session=True,  # Ctrl-C is for the program that started this
            preexec_fn=die_with_parent,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._unread = b""
        self._ended: dict[int, tuple[int, float]] = {}
        try:
            self._await("ready", START_S)
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def start(self, options: WorkerOptions) -> int:
        """The process id of a new worker."""
        self._input.write(options.encode().encode() + b"\n")
        self._input.flush()
        return int(self._await("pid", FORK_S)["pid"])

    def ended(self, pid: int) -> tuple[int, float] | None:
        """Exit status (negative: the signal) and instant, or None while the worker runs."""
        self._read(0.0)
        return self._ended.get(pid)

    def _await(self, key: str, within_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        while (left_s := deadline - time.monotonic()) > 0:
            found = [told for told in self._read(left_s) if key in told]
            if found:
                return found[0]
        raise ForkServerError(f"the fork server did not say {key!r} within {within_s:g} s")

    def _read(self, within_s: float) -> list[dict[str, Any]]:
        """What it has said by then; who has ended is noted."""
        ready, _, _ = select.select([self._output], [], [], within_s)
        if not ready:
            return []
        more = os.read(self._output.fileno(), 65536)
        if not more:
            raise ForkServerError(f"the fork server has ended, status {self._process.wait(END_S)}")
        *lines, self._unread = (self._unread + more).split(b"\n")
        told = [json.loads(line) for line in lines]
        for said in told:
            if "pid" in said:  # which the kernel may have given to an earlier worker before
                self._ended.pop(said["pid"], None)
            elif "ended" in said:
                self._ended[said["ended"]] = said["status"], said["at"]
        return told

    def close(self) -> None:
        """Kill all workers and end; may be called twice."""
        self._input.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- the program ---------------------------------------------------------------------------------


def main(module: str) -> None:
    """Fork for each line of the input, until it ends."""
    # The fork server has torch, and so have those that it forks; who talks to it does not need it.
    trainer = importlib.import_module(module)
    trainer.warm_up()
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: set[int] = set()
    _say(ready=True)
    unread = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap(living)
        if 0 not in ready:
            continue
        more = os.read(0, 65536)
        if not more:
            break
        *lines, unread = (unread + more).split(b"\n")
        for line in lines:
            pid = _fork(trainer.run, decode(line.decode()))
            living.add(pid)
            _say(pid=pid)
    for pid in living:
        os.kill(pid, signal.SIGKILL)


def _reap(living: set[int]) -> None:
    """Tell who has ended; signals of several ends may come as one."""
    for pid in list(living):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            living.discard(pid)
            _say(ended=pid, status=os.waitstatus_to_exitcode(status), at=time.monotonic())


def _say(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _fork(run: Run, options: WorkerOptions) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = _live(run, options)
    finally:
        os._exit(status)


def _live(run: Run, options: WorkerOptions) -> int:
    """In the child: be a process like one that was started by itself; its exit status."""
    die_with_parent()
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(options.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    try:
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
    main(sys.argv[1])
