"""Replica groups of several workers, forked from a process that has imported torch: in no time.

A group is started as ``torchrun`` would start it: its store is outside of its workers, who find it
and their ranks in the environment. A killed group is one that the test starts again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore

from support.fork_server import Call, Forked
from support.running import eventually, lives

_END_S = 10.0

Run = Callable[..., None]


@dataclass
class Group:
    """One life of a replica group: ``run(*arguments)`` in each worker."""

    name: str
    run: Run
    arguments: tuple[Any, ...]
    num_workers: int
    log: Path
    lighthouse: str
    workers: list[Forked] = field(default_factory=list)
    _store: TCPStore | None = None
    _managers: list[psutil.Process] = field(default_factory=list)

    def start(self) -> Group:
        """Start all workers."""
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.num_workers):
            variables = {
                "TORCHFT_LIGHTHOUSE": self.lighthouse,
                "REPLICA_GROUP_ID": self.name,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.num_workers),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the launcher's: ours
            }
            self.workers.append(Forked(Call(self.run, self.arguments, variables, self.log)))
        return self

    def kill(self, group_rank: int) -> None:
        """SIGKILL one worker; as its launcher would, end the others then, too."""
        self.workers[group_rank].kill()
        self.end()

    def end(self) -> None:
        """SIGKILL all workers, and wait until they are gone."""
        for worker in self.workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._managers += psutil.Process(worker.pid).children(recursive=True)
            worker.kill()
        for worker in self.workers:
            worker.wait(_END_S)
        self.workers.clear()

    def wait_for_manager(self) -> None:
        """Wait until the manager of an ended group is gone, which takes a second or two."""
        what = "the managers end, whose trainers have"
        eventually(lambda: not any(map(lives, self._managers)), _END_S, what)


@contextlib.contextmanager
def ending(groups: list[Group]) -> Iterator[None]:
    """End all ``groups`` with the block; if it failed, with their last words."""
    try:
        yield
    except AssertionError as error:
        logs = {group.log: group.log.read_text()[-3000:] for group in groups if group.log.exists()}
        raise AssertionError("\n".join(map(str, [error, *logs.values()]))) from error
    finally:
        for group in groups:
            group.end()
        for group in groups:
            group.wait_for_manager()
