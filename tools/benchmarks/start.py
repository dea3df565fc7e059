"""Measures how long processes take until they are ready, and which part of that is ours."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from tools.benchmarks.options import before_option, json_option
from tools.benchmarks.processes import (
    ROOT,
    START_TIMEOUT_S,
    Child,
    lighthouse_address,
    program,
    root_with_package_of,
    start_lighthouse,
)
from tools.benchmarks.table import Column, Result, hand_over

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHFT_LOG": "error",
}
_STEP_S = 0.02
# A trainer's stages in their order; "client" is gRPC alone in a plain one.
_STAGES = ("torch", "client", "model", "manager", "quorum", "commit")
_NOT_OURS = ("torch", "model")
_COLUMNS = (
    Column("what", "start of"),
    Column("starts", "starts", 0),
    Column("ready_s", "ready", 2),
    Column("worst_s", "worst", 2),
    *(Column(f"{stage}_s", stage, 2) for stage in _STAGES),
    Column("own_s", "our part", 2),
    Column("over_plain_s", "over plain", 2),
    Column("ratio", "ratio", 2),
    Column("cpu_s", "CPU", 2),
    Column("cpu_over_plain_s", "over plain", 2),
)


@dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds: the time until it was ready, its stages in between, and CPU time."""

    ready_s: float
    cpu_s: float
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def own_s(self) -> float:
        """What a trainer took beside importing torch and making its model and optimizer."""
        return self.ready_s - sum(self.stages_s[stage] for stage in _NOT_OURS)


@dataclass(slots=True)
class Course:
    """One kind of start; ``plain``: what it is compared with, measured in turns."""

    what: str
    start: Callable[[], Start]
    plain: Course | None = None
    starts: list[Start] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "what": self.what,
            "starts": len(self.starts),
            "ready_s": statistics.median(each.ready_s for each in self.starts),
            "worst_s": max(each.ready_s for each in self.starts),
            "cpu_s": statistics.median(each.cpu_s for each in self.starts),
            "all_ready_s": [each.ready_s for each in self.starts],
            "all_cpu_s": [each.cpu_s for each in self.starts],
        }
        for stage in self.starts[0].stages_s:
            row[f"{stage}_s"] = statistics.median(each.stages_s[stage] for each in self.starts)
        if row.keys() >= {f"{stage}_s" for stage in _NOT_OURS}:
            row["own_s"] = statistics.median(each.own_s for each in self.starts)
        if self.plain is not None:
            pairs = list(zip(self.starts, self.plain.starts, strict=True))
            row["over_plain_s"] = statistics.median(a.ready_s - b.ready_s for a, b in pairs)
            row["ratio"] = statistics.median(a.ready_s / b.ready_s for a, b in pairs)
            row["cpu_over_plain_s"] = statistics.median(a.cpu_s - b.cpu_s for a, b in pairs)
        return row


def staged(command: list[str], last_stage: str, root: Path = ROOT) -> Start:
    """Start a program that prints its stages; kill it after the last one."""
    began_ns = at_ns = time.monotonic_ns()
    stages_s: dict[str, float] = {}
    with Child(command, _ENVIRONMENT, root=root) as child:
        stage = ""
        while stage != last_stage:
            kind, *words = child.read_line(START_TIMEOUT_S).split()
            if kind != "stage":
                continue
            stage, printed_ns = words[0], int(words[1])
            stages_s[stage] = (printed_ns - at_ns) / 1e9
            at_ns = printed_ns
        cpu_s = _cpu_s(child)
        child.kill()
    return Start((at_ns - began_ns) / 1e9, cpu_s, stages_s)


def listening(command: list[str], root: Path = ROOT) -> Start:
    """Start a service, until it says that it listens."""
    began = time.monotonic()
    with Child(command, _ENVIRONMENT, root=root) as child:
        child.read_line(START_TIMEOUT_S)
        start = Start(time.monotonic() - began, _cpu_s(child))
        child.kill()
    return start


def _cpu_s(child: Child) -> float:
    """CPU time so far of a program and of what it has started, in seconds."""
    total = child.cpu_s()
    for process in child.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def trainers(address: str, stack: ExitStack, roots: dict[str, Path]) -> list[Course]:
    """Trainers that are alone in their job, and some that come back to one that trains."""
    plain = Course(
        "plain trainer", lambda: staged(program("tools.benchmarks.children.start_plain"), "model")
    )
    courses = [plain]
    for side, root in roots.items():

        def start(job: str, name: str, participants: int, *more: str) -> list[str]:
            return program(
                "tools.benchmarks.children.start_ours",
                f"--lighthouse={address}",
                f"--job={job}",
                f"--name={name}",
                f"--participants={participants}",
                f"--step-s={_STEP_S}",
                *more,
            )

        def alone(*more: str, start: Any = start, root: Path = root) -> Start:
            return staged(start(f"job-{uuid.uuid4().hex}", "alone", 1, *more), "quorum", root)

        job = f"job-{uuid.uuid4().hex}"
        survivor = stack.enter_context(Child(start(job, "survivor", 1), _ENVIRONMENT, root=root))
        while not survivor.read_line(START_TIMEOUT_S).startswith("stage commit"):
            pass

        def again(start: Any = start, root: Path = root, job: str = job) -> Start:
            return staged(start(job, "restarted", 2), "commit", root)

        courses.append(Course(f"trainer{side}", alone, plain))
        if (root / "torchft_svc" / "manager_server" / "early.py").exists():
            early = functools.partial(alone, "--early")
            courses.append(Course(f"trainer, early manager{side}", early, plain))
        courses.append(Course(f"killed trainer{side}", again, plain))
    return courses


def commands(address: str, roots: dict[str, Path]) -> list[Course]:
    """The services until they listen, and the launchers until their worker runs."""
    courses = []
    for side, root in roots.items():
        flags = {
            "lighthouse": ["--bind=127.0.0.1:0"],
            "manager": [
                f"--lighthouse={address}",
                "--bind=127.0.0.1:0",
                "--replica-name=started",
                "--store-address=127.0.0.1:1",
                "--job-id=started",
            ],
        }
        for service, options in flags.items():
            command = program(f"torchft_svc.{service}_server", *options, "--log-level=error")

            def start(command: list[str] = command, root: Path = root) -> Start:
                return listening(command, root)

            courses.append(Course(f"{service}{side}", start))
    worker = ["--standalone", "--nproc-per-node=1", "-m", "tools.benchmarks.children.start_worker"]
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *worker]
    plain = Course("torchrun", lambda: staged(torchrun, "worker"))
    courses.append(plain)
    for side, root in roots.items():
        command = [sys.executable, "-W", "ignore", "-m", "torchft_svc.elastic.run", *worker]

        def launch(command: list[str] = command, root: Path = root) -> Start:
            return staged(command, "worker", root)

        courses.append(Course(f"torchft-run{side}", launch, plain))
    return courses


@contextlib.contextmanager
def all_courses(before: Path | None) -> Iterator[list[Course]]:
    """The courses; what they need beside them runs as long as this block."""
    with ExitStack() as stack:
        root_before = stack.enter_context(root_with_package_of(before))
        roots = {"": ROOT}
        if root_before is not None:
            roots[", before"] = root_before
        lighthouse = stack.enter_context(start_lighthouse(min_replicas=1))
        address = lighthouse_address(lighthouse)
        yield [*trainers(address, stack, roots), *commands(address, roots)]


@click.command(context_settings={"show_default": True})
@click.option("--starts", type=click.IntRange(1), default=9, help="Starts of each kind.")
@click.option("--only", default="", help="Measure only kinds that contain this text.")
@before_option
@json_option
def main(starts: int, only: str, before: Path | None, json_file: Path | None) -> None:
    """Start trainers, services and launchers, in turns, and look when each is ready."""
    result = Result(
        name="start",
        title="Seconds from the start of a process until it is ready, and in which stage",
        columns=_COLUMNS,
        settings={"starts": starts},
        notes=[
            "plain trainer: imports torch and grpc, makes a model and an optimizer; trainer: until "
            "its first quorum; early manager: started before torch is imported; killed trainer: "
            "until it has healed and committed with another; a service: until it listens; a "
            "launcher: until its worker runs",
            "our part: without the stages torch and model; it varies less than the difference of "
            "two starts",
            "CPU: user and system, of the process and what it has started; over plain, ratio: "
            "medians over the plain trainer (torchrun) of the same turn",
        ],
    )
    with all_courses(before) as courses:
        chosen = [course for course in courses if only in course.what]
        chosen = [c for c in courses if c in chosen or any(c is each.plain for each in chosen)]
        for course in chosen:
            course.start()  # compiles what has not been compiled yet
        for turn in range(starts):
            for course in chosen if turn % 2 == 0 else chosen[::-1]:
                course.starts.append(course.start())
        result.rows = [course.row() for course in chosen]
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
