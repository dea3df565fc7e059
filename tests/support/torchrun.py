"""Nodes that torchrun starts (or we), and the workers of them all: real agents, one by one."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from support.launched import TORCHS, agent
from support.programs import Program
from support.running import SCRIPTS, eventually, is_alive

needs_entry_point = pytest.mark.skipif(
    "lighthouse" not in entry_points(group="torchrun.handlers").names,
    reason="the package was installed before it had this entry point: install it again",
)
# torchrun and its workers have to start, on a machine that is busy.
WAIT_S = 90.0

Worker = Mapping[str, Any]


class Nodes:
    """Agents whose workers record their ranks in ``folder``; leaving the block ends all.

    ``flags`` are those of all nodes, ``variables`` is their environment; ``of``: whose agents.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        script: str = "torchrun_worker.py",
        of: str = TORCHS,
        **variables: str,
    ) -> None:
        self.folder = folder
        self._flags = flags
        self._script = str(SCRIPTS / script)
        self._of = of
        self._variables = variables
        self._stack = contextlib.ExitStack()
        self.agents: list[Program] = []

    def start(self, *flags: str) -> Program:
        """Start an agent."""
        line = [*self._flags, *flags, self._script, str(self.folder)]
        started = agent(*line, of=self._of, environment=self._variables)
        self.agents.append(self._stack.enter_context(started))
        return started

    def workers(self) -> list[Worker]:
        """The workers that live and have recorded their ranks, by rank."""
        records = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return sorted(
            (each for each in records if is_alive(each["pid"])), key=lambda each: int(each["RANK"])
        )

    def await_world(
        self, *num_workers: int, holds: Callable[[Worker], bool] = bool
    ) -> list[Worker]:
        """The workers of one world, when they are there: so many on each node."""
        size = str(sum(num_workers))

        def found() -> list[Worker]:
            workers = self.workers()
            places = [(int(each["RANK"]), each["WORLD_SIZE"]) for each in workers]
            counts = Counter(each["agent"] for each in workers)
            is_there = places == [(rank, size) for rank in range(int(size))]
            is_there = is_there and sorted(counts.values()) == sorted(num_workers)
            return workers if is_there and all(map(holds, workers)) else []

        try:
            workers: list[Worker] = eventually(found, WAIT_S)
        except AssertionError:
            lines = [line for each in self.agents for line in each.read_so_far()[-20:]]
            raise AssertionError("\n".join([str(self.workers()), *lines])) from None
        return workers

    def statuses(self) -> list[int]:
        """The statuses with which the agents end."""
        return [each.wait(WAIT_S) for each in self.agents]

    def finish(self) -> list[int]:
        """Let all workers end well; the agents' exit statuses."""
        (self.folder / "end").touch()
        return self.statuses()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
