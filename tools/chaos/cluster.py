"""The processes of a run: lighthouses, proxies in front of them, and one fleet for each job."""

from __future__ import annotations

import math
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tools.chaos.faults import HANG_TIMEOUT_S, HEARTBEAT_TIMEOUT_S, JOIN_TIMEOUT_S
from tools.chaos.fleet import Fleet, Worker
from tools.chaos.fork_server import worker_server
from tools.chaos.samples import PROGRAM
from tools.demo.orphans import MARK, die_with_parent
from torchft_svc.coordination import LighthouseClient
from torchft_svc.core.quorum.lighthouse.incidents import Goodput
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.errors import TorchFTError
from torchft_svc.host.fork_server import ForkServer
from torchft_svc.testing.proxy import Proxy

LIGHTHOUSE_START_S = 20.0
_OPERATOR_WAITS = timedelta(seconds=10)
_LOOK = timedelta(seconds=0.5)
# Ports below those that the system gives to connections: a restarted lighthouse gets its own again.
_PORTS = range(15_000, 32_000)
_FLAGS = (
    f"--heartbeat-timeout-ms={HEARTBEAT_TIMEOUT_S * 1000:.0f}",
    f"--join-timeout-ms={JOIN_TIMEOUT_S * 1000:.0f}",
    f"--hang-timeout-ms={HANG_TIMEOUT_S * 1000:.0f}",
    "--on-hang=evict",
)


@dataclass(frozen=True, slots=True)
class EventLog:
    """What a lighthouse has written between two of its deaths; the one before it died at
    ``since`` (-inf: there was none)."""

    path: Path
    since: float


class Lighthouse:
    """One lighthouse on a port of its own, which can be killed and started again."""

    def __init__(self, folder: Path, name: str, *flags: str) -> None:
        self._log = folder / f"{name}.log"
        self._flags = flags
        self.address = _steady_address()
        self.event_logs: list[EventLog] = []  # one for each start
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_at = -math.inf

    def start(self, *, wait: bool) -> None:
        """``wait``: until it serves; else at once."""
        path = self._log.with_suffix(f".{len(self.event_logs)}.jsonl")
        self.event_logs.append(EventLog(path, self._killed_at))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torchft_svc.lighthouse_server"),
                    f"--bind={self.address}",
                    f"--event-log={path}",
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the program that started this
                preexec_fn=die_with_parent,
            )
        if wait:
            self._await_line(self._process)

    def _await_line(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(LIGHTHOUSE_START_S) or not process.stdout.readline():
                raise RuntimeError(f"the lighthouse did not start, see {self._log}")

    def kill(self) -> None:
        """SIGKILL, and wait; may be called twice."""
        if self._process is not None:
            self._killed_at = time.monotonic()
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def _steady_address() -> str:
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


@dataclass(slots=True)
class Cluster:
    """Starts all of it; leaving the block ends all of it. ``jobs``: group numbers, by job."""

    folder: Path
    jobs: dict[str, list[int]]
    sizes: dict[int, int]
    seed: int
    mark: str
    num_lighthouses: int = 1
    process_group: str = "gloo"
    fork_server: ForkServer = field(init=False)
    lighthouses: list[Lighthouse] = field(default_factory=list)
    fleets: dict[str, Fleet] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)  # groups that are not restarted
    _proxies: dict[int, list[Proxy]] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Cluster:
        os.environ[MARK] = self.mark  # inherited by every process that is started
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        self.fork_server = self._stack.enter_context(worker_server())
        for number in range(1, self.num_lighthouses + 1):
            lighthouse = Lighthouse(self.folder, f"lighthouse-{number}", *_FLAGS)
            self._stack.callback(lighthouse.kill)
            lighthouse.start(wait=True)
            self.lighthouses.append(lighthouse)
        for job, groups in self.jobs.items():
            settings: dict[str, Any] = {
                "job": job,
                "seed": self.seed,
                "program": PROGRAM,
                "process_group": self.process_group,
            }
            self.fleets[job] = fleet = Fleet(self.fork_server, self.folder, "", settings)
            self._stack.callback(fleet.end)
            for group in groups:
                self._proxies[group] = [
                    self._stack.enter_context(Proxy(lighthouse.address))
                    for lighthouse in self.lighthouses
                ]
                self.start(group)

    def job_of(self, group: int) -> str:
        return next(job for job, groups in self.jobs.items() if group in groups)

    def fleet_of(self, group: int) -> Fleet:
        return self.fleets[self.job_of(group)]

    def start(self, group: int) -> list[Worker]:
        """The next life of a group."""
        addresses = ",".join(proxy.address for proxy in self._proxies[group])
        return self.fleet_of(group).start(
            group, lighthouse=addresses, num_workers=self.sizes[group]
        )

    def workers(self, group: int) -> list[Worker]:
        """Those of the group's latest life."""
        return self.fleet_of(group).lives_of(group)

    def peers(self, group: int) -> list[int]:
        """The other groups of its job, in order."""
        return [each for each in self.jobs[self.job_of(group)] if each != group]

    def command(self, group: int, command: str) -> None:
        """Send a command to all workers of the group."""
        for worker in self.workers(group):
            worker.command(command)

    def signal(self, group: int, number: int) -> None:
        """Send it to all workers of the group and to its manager."""
        for worker in self.workers(group):
            worker.signal_all(number)

    def end_for_good(self, groups: Sequence[int]) -> None:
        """Kill the groups with their managers; nobody starts them again but `bring_back`."""
        self.gone.update(groups)
        for group in groups:
            for worker in self.workers(group):
                if worker.is_running:
                    self.fleet_of(group).kill(worker, with_manager=True)

    def bring_back(self, groups: Sequence[int]) -> None:
        self.gone.difference_update(groups)
        for group in groups:
            self.start(group)

    def accept_loss(self, job: str) -> None:
        """Accept the loss as an operator who knows that the newest state is gone for good.

        Raises:
            RequestRefused: no quorum of the job is held back.
        """
        with self._operator(job, _OPERATOR_WAITS) as operator:
            operator.accept_loss(_OPERATOR_WAITS)

    def lighthouse_knows_all(self) -> bool:
        """Whether all groups that run have reported to the lighthouse, and it answers at once."""
        return all(self._knows_all(job) for job in self.jobs)

    def _knows_all(self, job: str) -> bool:
        running = {
            self.workers(group)[0].options.name
            for group in self.jobs[job]
            if group not in self.gone
        }
        try:
            with self._operator(job) as operator:
                groups = operator.status(job, _LOOK)[0].groups
        except TorchFTError:
            return False
        return running <= {stable_name(group.replica_id) for group in groups}

    def goodput(self, job: str) -> Goodput | None:
        """How much of the job's time ended in committed steps (None: no lighthouse knows now)."""
        for lighthouse in self.lighthouses:
            with (
                suppress(TorchFTError),
                LighthouseClient(lighthouse.address, _LOOK, job_id=job) as operator,
            ):
                return operator.status(job, _LOOK)[0].goodput
        return None

    def _operator(self, job: str, timeout: timedelta = _LOOK) -> LighthouseClient:
        addresses = ",".join(lighthouse.address for lighthouse in self.lighthouses)
        return LighthouseClient(addresses, timeout, job_id=job)

    def cut(self, group: int) -> None:
        for proxy in self._proxies[group]:
            proxy.hold()

    def mend(self, group: int) -> None:
        for proxy in self._proxies[group]:
            proxy.release()

    def events(self) -> Iterator[tuple[str, Any]]:
        """What is new, with the job that it happened in."""
        for job, fleet in self.fleets.items():
            for event in fleet.read():
                yield job, event

    def drain(self) -> None:
        """SIGTERM for every worker."""
        for worker in self._running():
            worker.asked_to_end = True
            worker.signal(signal.SIGTERM)

    def is_empty(self) -> bool:
        """Whether all workers have been seen to end."""
        return not self._running()

    def _running(self) -> list[Worker]:
        return [each for fleet in self.fleets.values() for each in fleet.lives if each.is_running]
