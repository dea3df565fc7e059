"""Measures what the survivors of a launched run lose: beside torchrun, which restarts them."""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from tools.benchmarks.courses import Course
from tools.benchmarks.options import json_option
from tools.benchmarks.processes import (
    Child,
    ChildError,
    lighthouse_address,
    printed_lines,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over

NUM_NODES = 3
_STEP_S = 0.02
_START_S = 150.0
_CALM_S = (0.5, 1.0)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
# Of the rendezvous of torchrun, as if on a host of its own: no kill hits it.
_STORE = """
import time
from torch.distributed import TCPStore
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1e6)
"""
_COLUMNS = (
    Column("launcher", "launcher"),
    Column("killed", "hit"),
    Column("kills", "kills", 0),
    Column("ended", "ended by a kill", 0),
    Column("pause_s", "next step, s", 3),
    Column("pause_worst_s", "worst", 3),
    Column("intake_s", "taken in, s", 3),
    Column("intake_worst_s", "worst", 3),
    Column("lost_s", "lost together, s", 3),
    Column("back_s", "all back, s", 1),
)


@dataclass(frozen=True, slots=True)
class Side:
    """A launcher: ``arguments`` go before torchrun's own."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    survives: bool = False


TORCHRUN = "torch.distributed.run"
OURS = "torchft_svc.elastic.run"
SIDES = (
    Side("torchft-run, soft", OURS, ("--restart-policy=soft",), survives=True),
    Side("torchft-run, hard, lighthouse", OURS, ("--restart-policy=hard",)),
    Side("torchrun", TORCHRUN),
    Side(
        "torchrun, stores not shared",
        TORCHRUN,
        environment=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),
    ),
)
_NAMES = [side.name for side in SIDES]
_KINDS = {"worker": "a worker", "node": "a node", "frozen": "a node, frozen"}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of node ``node``; ``world`` is another for each process group of a process."""

    node: int
    world: tuple[int, int]
    world_size: int
    at_ns: int


@dataclass(slots=True)
class Job:
    """Nodes of one worker each; all but two of them may be killed."""

    side: Side
    init_s: float
    is_idle: bool
    stack: ExitStack
    endpoint: str
    agents: dict[int, Child] = field(default_factory=dict)
    last: dict[int, Step] = field(default_factory=dict)

    def start_agent(self, node: int) -> None:
        backend = "lighthouse" if self.side.module == OURS else "c10d"
        options = [
            *self.side.arguments,
            f"--nnodes={NUM_NODES - 1}:{NUM_NODES}",
            "--nproc-per-node=1",
            "--max-restarts=1000",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={self.endpoint}",
            *(["--rdzv-conf=is_host=0"] if self.side.module == TORCHRUN else []),
            "--rdzv-id=benchmark",
            "--local-addr=localhost",
            "-m",
            "tools.benchmarks.children.launched_worker",
            f"--init-s={self.init_s}",
            f"--step-s={_STEP_S}",
            *(["--survives"] if self.side.survives else []),
            *(["--idle"] if self.is_idle else []),
        ]
        command = [sys.executable, "-W", "ignore", "-m", self.side.module, *options]
        child = Child(command, {**_ENVIRONMENT, **dict(self.side.environment)})
        self.agents[node] = self.stack.enter_context(child)

    def steps(self, timeout_s: float) -> Iterator[Step]:
        """Yield steps as workers print them, for ``timeout_s``."""
        for node, line in printed_lines(self.agents, timeout_s):
            kind, *words = line.split()
            if kind == "step":
                pid, world, world_size, _, at_ns = map(int, words)
                yield Step(node, (pid, world), world_size, at_ns)

    def train_for(self, seconds: float) -> None:
        for step in self.steps(seconds):
            self.last[step.node] = step

    def all_step(
        self, world_size: int | None, before: dict[int, Step], patience_s: float
    ) -> tuple[float, float]:
        """All nodes of ``before`` are in another world than there, of ``world_size`` (None: any).

        Returns when the last of them took its first step there (ns), and the longest time (s) that
        a node took none before that step.
        """
        arrived: dict[int, int] = {}
        gaps = [0.0]
        for step in self.steps(patience_s):
            last = self.last.get(step.node)
            self.last[step.node] = step
            fits = world_size in (None, step.world_size)
            if step.node in arrived or step.node not in before or not fits:
                continue
            if step.world == before[step.node].world:
                continue
            arrived[step.node] = step.at_ns
            if last is not None:
                gaps.append((step.at_ns - last.at_ns) / 1e9)
            if arrived.keys() == before.keys():
                return max(arrived.values()), max(gaps)
        missing = sorted(before.keys() - arrived.keys())
        raise ChildError(f"nodes {missing} took no step within {patience_s:g} s")

    def hit(self, kind: str, node: int) -> int:
        """Kill or freeze the node, or kill its worker; returns when (ns)."""
        if kind == "frozen":
            return self._signal_node(node, signal.SIGSTOP)
        if kind == "node":
            killed_ns = self._signal_node(node, signal.SIGKILL)
            del self.agents[node]
            return killed_ns
        killed_ns = time.monotonic_ns()
        psutil.Process(self.last[node].world[0]).send_signal(signal.SIGKILL)
        return killed_ns

    def bring_back(self, kind: str, node: int) -> None:
        """The node that was hit; the agent of a worker has started another one by itself."""
        if kind == "frozen":
            self._signal_node(node, signal.SIGCONT)
        if kind == "node":
            self.start_agent(node)

    def _signal_node(self, node: int, number: int) -> int:
        agent = self.agents[node]
        processes = [psutil.Process(agent.pid), *agent.children()]
        at_ns = time.monotonic_ns()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return at_ns


@dataclass(slots=True)
class LaunchedCourse(Course[Job]):
    """One launcher and one kind of kill, and what was measured."""

    side: Side
    kind: str
    init_s: float
    is_idle: bool
    heartbeat_timeout_s: float
    patience_s: float
    dice: random.Random
    pauses_s: list[float] = field(default_factory=list)
    intakes_s: list[float] = field(default_factory=list)
    backs_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.side.name}, {_KINDS[self.kind]}"

    @contextlib.contextmanager
    def start(self) -> Iterator[Job]:
        """All nodes work together."""
        with ExitStack() as stack:
            if self.side.module == OURS:
                timeout_ms = round(1000 * self.heartbeat_timeout_s)
                lighthouse = start_lighthouse(min_replicas=1, heartbeat_timeout_ms=timeout_ms)
                stack.enter_context(lighthouse)
                endpoint = lighthouse_address(lighthouse)
            else:
                store = stack.enter_context(Child([sys.executable, "-c", _STORE], _ENVIRONMENT))
                endpoint = f"localhost:{store.read_line(_START_S)}"
            job = Job(self.side, self.init_s, self.is_idle, stack, endpoint)
            for node in range(NUM_NODES):
                job.start_agent(node)
            nowhere = {node: Step(node, (0, 0), 0, 0) for node in range(NUM_NODES)}
            job.all_step(NUM_NODES, nowhere, _START_S)
            yield job

    def wait(self, job: Job) -> None:
        job.train_for(self.dice.uniform(*_CALM_S))

    def hit(self, job: Job) -> str:
        """Kill once, and wait until all nodes are in one world again."""
        # The first one may host the store of the rendezvous.
        victim = self.dice.randrange(1, NUM_NODES)
        before = {node: step for node, step in job.last.items() if node != victim}
        killed_ns = job.hit(self.kind, victim)
        paused_ns, _ = job.all_step(None, before, self.patience_s)
        pause_s = (paused_ns - killed_ns) / 1e9
        intake_s = 0.0
        job.bring_back(self.kind, victim)
        whole_ns = paused_ns
        if any(job.last[node].world_size < NUM_NODES for node in before):
            smaller = {node: job.last[node] for node in before}
            whole_ns, intake_s = job.all_step(NUM_NODES, smaller, self.patience_s)
        self.pauses_s.append(pause_s)
        self.intakes_s.append(intake_s)
        self.backs_s.append((whole_ns - killed_ns) / 1e9)
        return f"{pause_s:.3f} s, then {intake_s:.3f} s"

    def row(self) -> dict[str, Any]:
        init = f", {self.init_s:g} s of initialization" if self.init_s else ""
        row: dict[str, Any] = {
            "launcher": self.side.name + init + (", idle" if self.is_idle else ""),
            "killed": _KINDS[self.kind],
            "kills": self.num_hits,
            "ended": self.num_ended,
        }
        if self.pauses_s:
            lost_s = [sum(both) for both in zip(self.pauses_s, self.intakes_s, strict=True)]
            row |= {
                "pause_s": statistics.median(self.pauses_s),
                "pause_worst_s": max(self.pauses_s),
                "intake_s": statistics.median(self.intakes_s),
                "intake_worst_s": max(self.intakes_s),
                "lost_s": statistics.median(lost_s),
                "back_s": statistics.median(self.backs_s),
                "pauses_s": self.pauses_s,
                "intakes_s": self.intakes_s,
            }
        return row


@click.command(context_settings={"show_default": True})
@click.option("--kills", type=click.IntRange(1), default=20, help="Kills of each kind.")
@click.option("--init-kills", type=click.IntRange(0), default=3,
              help="Kills of workers that need --init-s to initialize.")  # fmt: skip
@click.option("--init-s", type=click.FloatRange(0), default=10.0)
@click.option("--side", "sides", type=click.Choice(_NAMES), multiple=True, default=_NAMES)
@click.option(
    "--killed",
    "kinds",
    type=click.Choice(list(_KINDS)),
    multiple=True,
    default=list(_KINDS),
    help="frozen: a node gets SIGSTOP; with torchft-run only.",
)
@click.option("--idle", is_flag=True, help="Workers take steps without a collective.")
@click.option(
    "--heartbeat-timeout-s",
    type=click.FloatRange(0.1),
    default=5.0,
    help="Of the lighthouse, after which it misses a frozen node.",
)
@click.option(
    "--patience-s",
    type=click.FloatRange(1),
    default=100.0,
    help="A job that takes no step for so long after a kill has ended by it.",
)
@click.option("--seed", type=int, default=0, help="Draws the victims and the moments.")
@json_option
def main(
    kills: int, init_kills: int, init_s: float, sides: tuple[str, ...], kinds: tuple[str, ...],
    idle: bool, heartbeat_timeout_s: float, patience_s: float, seed: int, json_file: Path | None,
) -> None:  # fmt: skip
    """Kill a worker of a launched run, or kill or freeze a node: what do the other nodes lose?"""
    result = Result(
        name="launcher",
        title=f"What survivors lose: {NUM_NODES} nodes of one worker, 2 are enough",
        columns=_COLUMNS,
        settings={
            "kills": kills,
            "init_kills": init_kills,
            "init_s": init_s,
            "idle": idle,
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "patience_s": patience_s,
            "seed": seed,
        },
        notes=[
            "next step: from the kill until the workers of all other nodes have taken one in "
            "another world",
            "frozen: from SIGSTOP to all processes of a node; the lighthouse misses it after the "
            f"heartbeat timeout, {heartbeat_timeout_s:g} s; it gets SIGCONT when the others have "
            "taken that step",
            "taken in: how long they stand still when the node that was hit comes back; 0: it is "
            "in that world already",
            f"ended by a kill: so many kills ended the job, or it took no step for {patience_s:g} "
            "s; it was started again, and times are those of the others",
        ],
    )
    dice = random.Random(seed)
    chosen = [side for side in SIDES if side.name in sides]
    plan = [
        (side, kind, 0.0, kills)
        for kind in kinds
        for side in chosen
        if kind != "frozen" or side.module == OURS
    ]
    plan += [(side, "worker", init_s, init_kills) for side in chosen if init_kills]
    courses = [
        LaunchedCourse(
            num_kills, side, kind, each_init_s, idle, heartbeat_timeout_s, patience_s, dice
        )
        for side, kind, each_init_s, num_kills in plan
    ]
    for course in courses:
        course.run()
    result.rows = [course.row() for course in courses]
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
