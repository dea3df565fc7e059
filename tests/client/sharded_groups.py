"""Groups of several workers that train a sharded model, and one of which is killed and heals."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked import Group, ending
from running import eventually, lighthouse_process

from . import sharded_trainer

# Eight workers, on few cores that may be busy with other work.
WITHIN_S = 120.0
# Of a test that does all of this.
LIMIT_S = 2 * WITHIN_S + 30


@dataclass
class Cluster:
    """Groups of several workers, and what they told."""

    lighthouse: str
    folder: Path
    layout: str
    num_workers: int
    device: str
    groups: list[Group] = field(default_factory=list)

    def start(self, name: str) -> Group:
        group = Group(
            name=name,
            run=sharded_trainer.run,
            arguments=(self.layout, self.folder / name, self.device),
            num_workers=self.num_workers,
            log=self.folder / f"{name}.log",
            lighthouse=self.lighthouse,
        )
        self.groups.append(group.start())
        return group

    def told(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def last_step(self, name: str) -> int:
        return max((line["step"] for line in self.told(name)), default=0)

    def has_healed(self, name: str, since: int) -> bool:
        """Whether all workers of the group's second life contribute, some steps after ``since``."""
        pids = {line["pid"] for line in self.told(name)}
        last = [line for line in self.told(name) if line["groups"] == 2 and line["step"] > since]
        return len(pids) == 2 * self.num_workers and len(last) > 5 * self.num_workers


def heal_part_by_part(folder: Path, layout: str, num_workers: int, device: str = "cpu") -> None:
    """Kill a worker of one of two groups; assert that its next life heals, bit for bit.

    ``layout`` and ``device`` are for `sharded_trainer.run`.
    """
    with lighthouse_process() as lighthouse:
        cluster = Cluster(lighthouse.address, folder, layout, num_workers, device)
        with ending(cluster.groups):
            victim = [cluster.start(name) for name in ("a", "b")][1]
            eventually(
                lambda: min(cluster.last_step(name) for name in ("a", "b")) > 3,
                WITHIN_S,
                "no start",
            )
            victim.kill(group_rank=1)
            killed_at = cluster.last_step("a")
            cluster.start("b")
            eventually(
                lambda: cluster.has_healed("b", killed_at), WITHIN_S, "the group did not come back"
            )
    hashes = {
        name: {(line["step"], line["group_rank"]): line["hash"] for line in cluster.told(name)}
        for name in ("a", "b")
    }
    common = hashes["a"].keys() & hashes["b"].keys()
    assert all(hashes["a"][key] == hashes["b"][key] for key in common)
    assert {rank for step, rank in common if step > killed_at} == set(range(num_workers))
    assert cluster.told("a")[-1]["loss"] < cluster.told("a")[0]["loss"]
