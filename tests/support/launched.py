"""Launches agents as processes that have imported torch: ours, and torchrun's."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.agents import runs_at
from support.files import complete_lines
from support.programs import Program
from support.running import SCRIPTS, eventually, is_alive
from torchft_svc.coordination import LighthouseServer

OURS, TORCHS = "torchft_svc.elastic.run", "torch.distributed.run"
# A program that ends by itself, or something that an agent does, on a machine that may stall.
LAUNCH_S = 60.0


def agent(
    *arguments: str,
    of: str = OURS,
    environment: Mapping[str, str] | None = None,
    forks_programs: bool = False,
) -> Program:
    """An agent of this host, as the command line ``arguments`` start it."""
    command = [sys.executable, "-m", of, *arguments]
    return Program(command, environment, warm=True, forks_programs=forks_programs)


def worker_variables(group_rank: int, port: int) -> dict[str, str]:
    """What an agent sets for one of the two workers of a group, whose store is at ``port``."""
    return {
        "RANK": str(group_rank),
        "LOCAL_RANK": str(group_rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextlib.contextmanager
def agents(*command_lines: list[str], of: str = OURS) -> Iterator[list[Program]]:
    """One agent for each command line; they are killed with the block."""
    with contextlib.ExitStack() as started:
        yield [started.enter_context(agent(*each, of=of)) for each in command_lines]


@dataclass
class Worker:
    """A worker that `patient_worker` runs, and what it has noted."""

    pid: int
    notes: list[dict[str, Any]]

    @property
    def world(self) -> tuple[int, int] | None:
        """The worker's rank and the world's size, if it works in one."""
        last = self.notes[-1]
        return (last["rank"], last["world_size"]) if last.get("state") == "HEALTHY" else None

    @property
    def num_worlds(self) -> int:
        return len({note["round"] for note in self.notes if note.get("state") == "HEALTHY"})

    @property
    def attempt(self) -> int:
        """How many restarts its agent had used when it was started."""
        return int(self.notes[0]["attempt"])


@dataclass
class Launch:
    """A run of several agents on one lighthouse, each of them a node with a name."""

    folder: Path
    lighthouse: str
    options: tuple[str, ...]
    nodes: dict[str, Program] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(
        self, node: str, *options: str, traits: Sequence[str] = (), script: Sequence[str] = ()
    ) -> Program:
        """Start an agent, with more options than those of the run.

        ``script``: what its workers run (default: `patient_worker` with these ``traits``).
        """
        line = [
            "--rdzv-backend=lighthouse",
            f"--rdzv-endpoint={self.lighthouse}",
            "--rdzv-id=run",
            f"--log-dir={self.folder / 'logs'}",
            "--monitor-interval=0.05",
            *self.options,
            *options,
        ]
        script = script or [str(SCRIPTS / "patient_worker.py"), str(self.folder), *traits]
        temporary = self.folder / "temporary"  # an agent that is killed leaves its channels there
        temporary.mkdir(exist_ok=True)
        environment = {"NODE": node, "TMPDIR": str(temporary)}
        program = agent(*line, *script, environment=environment)
        self.nodes[node] = self.stack.enter_context(program)
        return program

    def workers(self, node: str = "") -> list[Worker]:
        """The workers that live, of one node or of all."""
        found = []
        for path in self.folder.glob("*.events"):
            notes = [json.loads(line) for line in complete_lines(path)]
            if notes and is_alive(int(path.stem)) and node in ("", notes[0]["node"]):
                found.append(Worker(int(path.stem), notes))
        return sorted(found, key=lambda worker: (worker.notes[-1]["rank"], worker.pid))

    def await_world(self, **sizes: int) -> dict[str, list[int]]:
        """Return when exactly these nodes work together, with so many workers each; their pids."""
        size = sum(sizes.values())

        def is_there() -> bool:
            workers = {node: self.workers(node) for node in self.nodes}
            if any(len(found) != sizes.get(node, 0) for node, found in workers.items()):
                return False
            places = [worker.world for found in workers.values() for worker in found]
            return sorted(map(str, places)) == sorted(str((rank, size)) for rank in range(size))

        self.until(is_there, str(sizes))
        return {node: self.pids(node) for node in sizes}

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """What ``holds`` returns, once it is true."""
        try:
            return eventually(holds, LAUNCH_S)
        except AssertionError:
            notes = {worker.pid: worker.notes[-3:] for worker in self.workers()}
            self.stack.close()
            raise AssertionError(f"not in time: {what}; {notes}; {self.output()}") from None

    def pids(self, node: str = "") -> list[int]:
        return sorted(worker.pid for worker in self.workers(node))

    def finish(self, pid: int | None = None) -> None:
        """Let one worker, or all, end well."""
        (self.folder / ("finish" if pid is None else f"finish-{pid}")).touch()

    def fail(self, pid: int) -> None:
        """Let a worker end with status 5."""
        (self.folder / f"fail-{pid}").touch()

    def leave(self, pid: int) -> None:
        """Let a worker leave its world, as after a broken collective."""
        (self.folder / f"leave-{pid}").touch()

    def statuses(self) -> dict[str, int]:
        """The exit statuses of all agents, which are awaited."""
        return {node: program.wait(LAUNCH_S) for node, program in self.nodes.items()}

    def cut_off(self, pid: int) -> None:
        """Let a worker remove its channel, once its world is reached."""

        def is_reached() -> bool:
            return all(node.reached for run in runs_at(self.lighthouse) for node in run.nodes)

        self.until(is_reached, "a world that is reached")
        (self.folder / f"cut-{pid}").touch()

    def output(self) -> str:
        outputs = {node: "\n".join(program.read_so_far()) for node, program in self.nodes.items()}
        return "\n".join(f"--- {node}\n{lines}" for node, lines in outputs.items())


@contextlib.contextmanager
def launch(
    folder: Path,
    *options: str,
    nnodes: str,
    policy: str = "soft",
    heartbeat_timeout_ms: int | None = None,
) -> Iterator[Launch]:
    """A run whose agents are started one by one, and killed with the block."""
    with LighthouseServer(
        "127.0.0.1:0", 1, heartbeat_timeout_ms=heartbeat_timeout_ms
    ) as lighthouse:
        address = lighthouse.address().removeprefix("http://")
        run = (f"--restart-policy={policy}", f"--nnodes={nnodes}", *options)
        launched = Launch(folder, address, run)
        with launched.stack:
            yield launched


def are_gone(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))
