"""The options with which a worker is started: plain values, sent as one line of JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROCESS_GROUPS = ("gloo", "nccl", "isolated-gloo", "isolated-nccl")


def uses_device(process_group: str) -> bool:
    """Whether workers with this process group train on a CUDA device."""
    return "nccl" in process_group


def is_isolated(process_group: str) -> bool:
    """Whether the collectives of this process group run in a process of their own."""
    return process_group.startswith("isolated-")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """One worker of replica group ``group``, in its ``incarnation``-th life.

    ``folder`` takes its event log, its output and its commands. ``step_s`` is how long the forward
    pass takes, ``ballast`` the bytes of state beyond the model's, for heals that take a while.
    ``manager`` are keywords of `torchft_svc.client.Manager`; those that end in ``_s`` are seconds,
    and ``world_size_mode`` is given by its name. ``program`` is for trainers that can be asked what
    to train: plain values, too. ``process_group``: one of `PROCESS_GROUPS`. ``host``: the address
    of the host that it runs on, and ``namespace``: the network namespace which is that host (empty:
    this machine).
    """

    folder: Path
    group: int
    incarnation: int
    worker: int = 0
    num_workers: int = 1
    lighthouse: str
    job: str = "default"
    seed: int = 0
    steps: int = 10**9
    step_s: float = 0.02
    ballast: int = 0
    manager: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)
    process_group: str = "gloo"
    host: str = ""
    namespace: str = ""

    @property
    def name(self) -> str:
        """The replica group's stable name."""
        return f"group-{self.group}"

    @property
    def group_life(self) -> str:
        """What the workers of one life of the group have in common."""
        return f"{self.name}.{self.incarnation}"

    @property
    def life(self) -> str:
        """Unlike that of any other worker of the run."""
        return f"{self.group_life}.{self.worker}"

    @property
    def events(self) -> Path:
        return self.folder / f"{self.life}.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / f"{self.life}.log"

    @property
    def commands(self) -> Path:
        """A named pipe: commands for the worker, one a line."""
        return self.folder / f"{self.life}.commands"

    @property
    def weights(self) -> Path:
        """The file in which a worker that finishes writes the model's weights."""
        return self.folder / f"{self.life}.weights"

    @property
    def store_port(self) -> Path:
        """The file in which the first worker of a group writes the port of their store."""
        return self.folder / f"{self.group_life}.port"

    def encode(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "folder": str(self.folder)})


def decode(text: str) -> WorkerOptions:
    """The options that `WorkerOptions.encode` wrote."""
    fields = json.loads(text)
    return WorkerOptions(**{**fields, "folder": Path(fields["folder"])})
