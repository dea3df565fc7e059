"""Groups of several workers that train a sharded model, and one of which is killed and heals."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.files import complete_lines
from support.forked import Group, ending
from support.running import eventually, lighthouse_process
from support.scripts import sharded_trainer

# Eight workers, on few cores that may be busy with other work.
WITHIN_S = 120.0
# Of a test that does all of this.
LIMIT_S = 2 * WITHIN_S + 30


@dataclass
class Cluster:
    """Groups of several workers, and what they reported."""

    lighthouse: str
    folder: Path
    layout: str
    num_workers: int
    device: str
    quorum_timeout_s: float = 40.0
    changes_at: int = 0
    groups: list[Group] = field(default_factory=list)

    def start(self, name: str) -> Group:
        group = Group(
            name=name,
            run=sharded_trainer.run,
            arguments=(
                self.layout,
                self.folder / name,
                self.device,
                self.quorum_timeout_s,
                self.changes_at,
            ),
            num_workers=self.num_workers,
            log=self.folder / f"{name}.log",
            lighthouse=self.lighthouse,
        )
        self.groups.append(group.start())
        return group

    def reports(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in complete_lines(self.folder / name)]

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def last_step(self, name: str) -> int:
        return max((line["step"] for line in self.reports(name)), default=0)

    def has_healed(self, name: str, since: int) -> bool:
        """Whether all workers of the group's second life contribute, some steps after ``since``."""
        pids = {line["pid"] for line in self.reports(name)}
        last = [line for line in self.reports(name) if line["groups"] == 2 and line["step"] > since]
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
        name: {(line["step"], line["group_rank"]): line["hash"] for line in cluster.reports(name)}
        for name in ("a", "b")
    }
    common = hashes["a"].keys() & hashes["b"].keys()
    assert all(hashes["a"][key] == hashes["b"][key] for key in common)
    assert {rank for step, rank in common if step > killed_at} == set(range(num_workers))
    assert cluster.reports("a")[-1]["loss"] < cluster.reports("a")[0]["loss"]


def pause_a_worker(folder: Path, group_rank: int, *, as_a_whole: bool) -> None:
    """One of two workers pauses before it asks for a quorum, for longer than the other one waits.

    The other goes on with the step, and waits for it in FSDP's collectives: assert that both train
    on, in the same processes.
    """
    quorum_timeout_s = 40.0 if as_a_whole else 3.0  # a frozen worker is missed after 4 s
    with lighthouse_process("--min-replicas=1") as lighthouse:
        cluster = Cluster(lighthouse.address, folder, "fsdp", 2, "cpu", quorum_timeout_s)
        with ending(cluster.groups):
            worker = cluster.start("a").workers[group_rank]
            eventually(lambda: cluster.last_step("a") > 3, WITHIN_S, "no start")
            os.kill(worker.pid, signal.SIGUSR2 if as_a_whole else signal.SIGUSR1)
            if as_a_whole:
                eventually(lambda: "worker gone" in cluster.log("a"), WITHIN_S, "not missed")
            before = len(cluster.reports("a"))
            os.kill(worker.pid, signal.SIGCONT)
            eventually(
                lambda: len(cluster.reports("a")) > before + 10,
                WITHIN_S,
                "the group trains no more",
            )
            assert "is discarded" in cluster.log("a")
            assert len({line["pid"] for line in cluster.reports("a")}) == 2


def change_a_part(folder: Path, layout: str) -> None:
    """The part that one of two workers holds of group b's weights is changed: assert that this is
    found, that the whole group heals, and that all parts are equal from then on."""
    changes_at = 6
    with lighthouse_process("--min-replicas=2") as lighthouse:
        cluster = Cluster(lighthouse.address, folder, layout, 2, "cpu", changes_at=changes_at)
        with ending(cluster.groups):
            for name in ("a", "b"):
                cluster.start(name)
            eventually(
                lambda: min(cluster.last_step(name) for name in ("a", "b")) > changes_at + 5,
                WITHIN_S,
                "no progress after the change",
            )
            for name in ("a", "b"):
                found = re.findall(
                    r"is discarded: in the check of step (\d+), (.*)", cluster.log(name)
                )
                assert [int(step) for step, _ in found] == [changes_at], cluster.log(name)
                assert "in group b are not those of group a" in found[0][1]
            assert "healed to step 6" in cluster.log("b")
    lines = {
        name: {(line["step"], line["group_rank"]): line["hash"] for line in cluster.reports(name)}
        for name in ("a", "b")
    }
    common = lines["a"].keys() & lines["b"].keys()
    assert {rank for step, rank in common if step > changes_at} == {0, 1}
    assert all(lines["a"][key] == lines["b"][key] for key in common)
