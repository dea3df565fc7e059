"""Stands for the agents of a run: hosts the stores of its worlds, and sends workers events."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import TCPStore

from support.files import complete_lines
from support.fork_server import Call, Forked
from support.running import ROOT, eventually
from support.warm import Warm
from torchft_svc.core.launch.worker_events import WorkerState, WorldChangeEvent
from torchft_svc.elastic.channel import ChannelRoot, FileChannel
from torchft_svc.elastic.messages import WorkerAck, WorkerLeft, WorkerMessage, worker_message
from torchft_svc.elastic.runtime import WorkerEvent, WorkerInfo

STARTED_S = 60.0
HOST = "127.0.0.1"


class FakeWorker:
    """A worker of a node of its own; ``log`` has what it prints."""

    def __init__(self, process: Forked, channel: FileChannel, log: Path) -> None:
        self.process, self.channel, self.log = process, channel, log
        self.pid = process.pid
        self.said: list[WorkerMessage] = []

    def listen(self) -> list[WorkerMessage]:
        """All that it has said so far."""
        while (message := self.channel.receive(0)) is not None:
            self.said.append(worker_message(message))
        return self.said

    def reached(self, round_: int) -> bool:
        return WorkerAck(round_) in self.listen()

    def left(self, round_: int) -> bool:
        return WorkerLeft(round_) in self.listen()

    def lines(self) -> list[str]:
        return complete_lines(self.log)

    def says(self, *words: str) -> str:
        """Wait for a line that has all these words."""

        def found() -> str:
            assert self.process.poll() is None or self._has(words), self.log.read_text()
            return self._has(words)

        return str(eventually(found, STARTED_S, f"no line with {words} in {self.lines()}"))

    def _has(self, words: Sequence[str]) -> str:
        return next((line for line in self.lines() if all(word in line for word in words)), "")

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STARTED_S)


class FakeAgents:
    """All of a run; a context manager that ends its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.round = 0
        self.stores: list[Any] = []
        self._root = ChannelRoot(folder)
        self._workers: list[FakeWorker] = []
        self._paths = contextlib.ExitStack()

    def __enter__(self) -> FakeAgents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.kill()
            worker.channel.close()
            print(f"--- {worker.log.name}", *worker.lines()[-40:], sep="\n", file=sys.stderr)
        self._root.close()

    def start(
        self, run: Callable[..., object] | Path, *arguments: Any, first: WorkerEvent | None = None
    ) -> FakeWorker:
        """A worker that has no world yet, unless ``first`` is another event.

        ``run``: a function, or a script with the command line ``arguments``.
        """
        index = len(self._workers)
        channel = self._root.channel(0, index)
        channel.send((first or paused(0, 1)).to_message())
        log = self.folder / f"worker{index}.log"
        variables = {"TORCHFT_WORKER_CHANNEL": str(channel.directory)}
        process: Forked
        if isinstance(run, Path):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
            with log.open("w") as output:
                process = Warm(
                    [sys.executable, str(run), *map(str, arguments)],
                    env=environment | variables | {"OMP_NUM_THREADS": "1"},
                    stdout=output.fileno(),
                    stderr=output.fileno(),
                )
        else:
            process = Forked(Call(run, arguments, variables, log))
        worker = FakeWorker(process, channel, log)
        self._workers.append(worker)
        return worker

    def world(
        self,
        *workers: FakeWorker,
        change: WorldChangeEvent | None = None,
        port: int | None = None,
    ) -> int:
        """Send all of these workers a new world of them; return its round."""
        self.round += 1
        if port is None:
            store: Any = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            self.stores.append(store)
            port = store.port
        for rank, worker in enumerate(workers):
            event = healthy(self.round, rank, len(workers), port, change)
            worker.channel.send(event.to_message())
        return self.round

    def pause(self, *workers: FakeWorker, change: WorldChangeEvent) -> None:
        """Inform them that another world is on its way."""
        for rank, worker in enumerate(workers):
            worker.channel.send(paused(rank, len(workers), self.round, change).to_message())


def healthy(
    round_: int, rank: int, world_size: int, port: int, change: WorldChangeEvent | None = None
) -> WorkerEvent:
    info = WorkerInfo(0, rank, rank, 1, world_size, world_size, HOST, port, round_)
    return WorkerEvent(int(time.time()), info, WorkerState.HEALTHY, change)


def paused(
    rank: int, world_size: int, round_: int = 0, change: WorldChangeEvent | None = None
) -> WorkerEvent:
    info = WorkerInfo(0, rank, rank, 1, world_size, world_size, HOST, 0, round_)
    return WorkerEvent(int(time.time()), info, WorkerState.PAUSED, change)
