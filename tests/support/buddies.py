"""A job whose states are copied: holders and groups of real processes, of which each line is kept.

They are forked from a process that has imported torch, and killed with all that they have started.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO

from torch.distributed import TCPStore

from support.fork_server import TORCH
from support.running import ROOT, SCRIPTS, environment, eventually
from support.warm import Warm
from torchft_svc.coordination import LighthouseClient
from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.errors import PeerError
from torchft_svc.rpc.security import PLAIN, Security

# Steps between two copies; and how far back a job may begin: a copy is fetched while others pass.
EVERY = 5
BACK = 2 * EVERY
LONG_S = 60.0
CALL = timedelta(seconds=5)
_BEGINS = re.compile(r"BEGINS (\d+) ([0-9a-f]{16})\b")
# Steps, group ranks, and digests of the state.
States = set[tuple[int, int, str]]


class Child:
    """A process of which each line is kept; `kill` is a SIGKILL to all that it has started."""

    def __init__(self, *command: str, **variables: str) -> None:
        self.lines: list[list[str]] = []
        self._process = Warm(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1", **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            loaded=TORCH,
            drops_memory=True,
        )
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line.split())

    def send(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it at once; may be called twice."""
        self.send(signal.SIGKILL)
        self._process.wait(LONG_S)
        self._reader.join(LONG_S)

    def end(self) -> int:
        """Ask it to end on purpose, and return its status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(LONG_S)

    def text(self) -> str:
        return "\n".join(" ".join(line) for line in self.lines)

    def begins(self) -> list[tuple[int, str]]:
        """The steps that it has begun, with the digests of its state."""
        found = _BEGINS.finditer(self.text())  # also behind a line of the log that has no end yet
        return [(int(each[1]), each[2]) for each in found]

    def last_step(self) -> int:
        begun = self.begins()
        return begun[-1][0] if begun else 0


@dataclass
class Group:
    """One life of a replica group: its workers, by rank."""

    workers: list[Child]
    store: TCPStore | None = None

    def kill(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGKILL)
        for worker in self.workers:
            worker.kill()

    def last_step(self) -> int:
        """The step that all workers have begun."""
        return min(worker.last_step() for worker in self.workers)

    def states(self) -> States:
        """What its workers had at each step that they have begun."""
        return {
            (step, rank, digest)
            for rank, worker in enumerate(self.workers)
            for step, digest in worker.begins()
        }

    def first(self) -> tuple[int, States]:
        """The first step above 0 that all workers have begun, and what they had there.

        A worker whose group heals may show the step before its peers do.
        """
        step = max(worker.begins()[0][0] for worker in self.workers)
        return step, {each for each in self.states() if each[0] == step}

    def text(self) -> str:
        return "\n".join(worker.text() for worker in self.workers)


@dataclass
class CopiedJob:
    """A job at ``lighthouse``; leave its block to end all of its processes."""

    lighthouse: str
    variables: dict[str, str] = field(default_factory=dict)
    security: Security = PLAIN
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> CopiedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, *command: str, **variables: str) -> Child:
        child = Child(*command, **{**self.variables, **variables})
        self._stack.callback(child.kill)
        return child

    def hold(self, beside: str, *flags: str, **variables: str) -> Child:
        """Start a holder."""
        where = [f"--lighthouse={self.lighthouse}", f"--beside={beside}"]
        module = ("-m", "torchft_svc.buddy")
        return self.start(*module, *where, "--advertise-host=127.0.0.1", *flags, **variables)

    def train(
        self, name: str, seed: int, every: int = EVERY, step_s: float = 0.02, **variables: str
    ) -> Group:
        """Start a group of one worker, whose weights begin with ``seed``."""
        numbers = map(str, (seed, every, step_s))
        script = str(SCRIPTS / "buddy_trainer.py")
        return Group([self.start(script, self.lighthouse, name, *numbers, **variables)])

    def train_shards(self, name: str, seed: int, layout: str, num_workers: int = 2) -> Group:
        """Start a group of several workers, which hold shards of a model and odd contents."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        script = (str(SCRIPTS / "buddy_shards.py"), layout, str(seed), str(EVERY))
        workers = [
            self.start(
                *script,
                TORCHFT_LIGHTHOUSE=self.lighthouse,
                REPLICA_GROUP_ID=name,
                RANK=str(rank),
                WORLD_SIZE=str(num_workers),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the launcher's: ours
            )
            for rank in range(num_workers)
        ]
        return Group(workers, store)

    def status(self) -> JobStatus:
        """The status of the job; an empty one if there is no job, or nobody answers."""
        empty = JobStatus(job="none")
        try:
            with LighthouseClient(self.lighthouse, CALL, security=self.security) as client:
                return next(iter(client.status()), empty)
        except PeerError:
            return empty

    def until(self, holds: Callable[[JobStatus], bool], what: str = "") -> JobStatus:
        """Wait for a status of which this holds."""
        found: list[JobStatus] = []

        def look() -> bool:
            found[:] = [self.status()]
            return holds(found[0])

        eventually(look, LONG_S, what)
        return found[0]

    def until_copied(self, above: int = 0) -> int:
        """Wait for a whole copy of a step above ``above``, and return the step."""
        return self.until(
            lambda status: status.copy_step > above, f"no copy above step {above}"
        ).copy_step

    def steps_held(self) -> list[int]:
        """Return the steps of all copies, of each holder its own."""
        with LighthouseClient(self.lighthouse, CALL, security=self.security) as client:
            return [each.step for each in client.report_copies("probe", [], CALL).copies]


def kill_all(*groups: Group) -> tuple[int, States]:
    """Kill groups; returns the last step that one of them has begun, and all of their states."""
    for group in groups:
        for worker in group.workers:
            worker.send(signal.SIGKILL)
    for group in groups:
        group.kill()
    # The groups of `buddy_trainer.py` differ in the statistics of their data.
    states = set().union(*(group.states() for group in groups))
    return max(group.last_step() for group in groups), states


def until_begun(*groups: Group) -> int:
    """Wait until all groups have begun a step above 0, and return the first such step of them."""
    workers = [worker for group in groups for worker in group.workers]
    try:
        eventually(lambda: all(worker.begins() for worker in workers), LONG_S)
        eventually(lambda: all(len(each.first()[1]) == len(each.workers) for each in groups))
    except AssertionError as error:
        last_words = "\n\n".join(worker.text()[-2000:] for worker in workers)
        raise AssertionError(f"the groups do not begin:\n{last_words}") from error
    return min(group.first()[0] for group in groups)


@contextlib.contextmanager
def copied_job(lighthouse: str, **parts: object) -> Iterator[CopiedJob]:
    with CopiedJob(lighthouse, **parts) as job:  # type: ignore[arg-type]
        yield job
