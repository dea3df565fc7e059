"""Nodes that torchrun starts: real agents and workers, forked from a process that knows torch."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from support.fork_server import Forked, Program
from support.running import SCRIPTS, environment, eventually, lives

# torchrun and its workers have to start, on a machine that is busy.
WAIT_S = 90.0

Worker = Mapping[str, Any]


class Launch:
    """Agents whose workers write what they were told into ``folder``; leaving the block ends all.

    ``flags`` are those of all nodes.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        module: str = "torch.distributed.run",
        script: str = "launched_worker.py",
        **variables: str,
    ) -> None:
        self.folder = folder
        self._flags = flags
        self._module = module
        self._script = str(SCRIPTS / script)
        self._variables = variables
        self.agents: list[Forked] = []

    def node(self, *flags: str) -> Forked:
        """Start an agent."""
        command = [*self._flags, *flags, self._script, str(self.folder)]
        arguments = ["-W", "ignore", "-m", self._module, *command]
        program = Program(
            arguments, environment(OMP_NUM_THREADS="1", **self._variables), str(self.folder), True
        )
        errors = os.open(self._log(len(self.agents)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            agent = Forked(program, (errors, errors, errors))
        finally:
            os.close(errors)
        self.agents.append(agent)
        return agent

    def _log(self, number: int) -> Path:
        return self.folder / f"agent-{number}.log"

    def log(self, agent: Forked) -> str:
        """What it and its workers have said."""
        return self._log(self.agents.index(agent)).read_text()

    def workers(self) -> list[Worker]:
        """Those that live and have told their ranks, by rank."""
        told = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        living = [each for each in told if psutil.pid_exists(each["pid"])]
        living = [each for each in living if _lives(each["pid"])]
        return sorted(living, key=lambda each: int(each["RANK"]))

    def await_world(
        self, *num_workers: int, holds: Callable[[Worker], bool] = bool
    ) -> list[Worker]:
        """Wait until the workers of one world are there, so many on each node."""
        size = sum(num_workers)

        def found() -> list[Worker]:
            workers = self.workers()
            ranks = [int(each["RANK"]) for each in workers]
            is_one = {each["WORLD_SIZE"] for each in workers} == {str(size)}
            if not (is_one and ranks == list(range(size)) and all(map(holds, workers))):
                return []
            counts = sorted(
                sum(each["agent"] == agent for each in workers)
                for agent in {each["agent"] for each in workers}
            )
            return workers if counts == sorted(num_workers) else []

        try:
            workers: list[Worker] = eventually(found, WAIT_S)
        except AssertionError:
            logs = [self._log(number).read_text()[-2000:] for number in range(len(self.agents))]
            raise AssertionError("\n".join([str(self.workers()), *logs])) from None
        return workers

    def end(self) -> list[int]:
        """Let all workers end; the exit statuses of the agents that are left."""
        (self.folder / "end").touch()
        return [agent.wait(WAIT_S) for agent in self.agents]

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        started = [psutil.Process(agent.pid) for agent in self.agents if agent.poll() is None]
        workers = [worker for agent in started for worker in agent.children(recursive=True)]
        for agent in self.agents:
            agent.kill()
        for worker in workers:
            if lives(worker):
                worker.send_signal(signal.SIGKILL)
        for agent in self.agents:
            agent.wait(WAIT_S)


def _lives(pid: int) -> bool:
    try:
        return lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
