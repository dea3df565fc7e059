"""Tests sharded models over several groups: real workers under torchrun, and a real kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from running import end_tree, environment, eventually, lighthouse_process

TRAINER = Path(__file__).with_name("sharded_trainer.py")
# All workers import torch on few cores, one group twice.
WITHIN_S = 120.0


@dataclass
class Cluster:
    """Groups of several workers, each under a launcher of its own that restarts it."""

    lighthouse: str
    folder: Path
    layout: str
    num_workers: int
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, last_step: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.num_workers}", "--max-restarts=2"]
        command += [str(TRAINER), self.layout, str(last_step), str(self.folder / name)]
        variables = environment(
            TORCHFT_LIGHTHOUSE=self.lighthouse,
            REPLICA_GROUP_ID=name,
            OMP_NUM_THREADS="1",
            # Or a restarted attempt finds the addresses that the last one left in the store.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        with (self.folder / f"{name}.log").open("wb") as log:
            self.launchers.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))

    def told(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def last_step(self, name: str) -> int:
        return max((line["step"] for line in self.told(name)), default=0)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*.log"))


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with lighthouse_process() as server:
        yield server.address


@pytest.mark.timeout(2 * WITHIN_S + 30)
@pytest.mark.parametrize(("layout", "num_workers"), [("fsdp", 2), ("hsdp", 2), ("fsdp+tp", 2)])
def test_i3_a_sharded_group_heals_part_by_part(
    lighthouse: str, tmp_path: Path, layout: str, num_workers: int
) -> None:
    cluster = Cluster(lighthouse, tmp_path, layout, num_workers)
    try:
        for name in ("a", "b"):
            cluster.start(name, last_step=100_000)
        eventually(
            lambda: min(cluster.last_step(name) for name in ("a", "b")) > 3, WITHIN_S, "no start"
        )
        victim = next(line for line in cluster.told("b") if line["group_rank"] == 1)
        os.kill(victim["pid"], signal.SIGKILL)
        killed_at = cluster.last_step("a")

        def healed() -> bool:
            back = [line for line in cluster.told("b") if line["groups"] == 2]
            restarted = {line["pid"] for line in cluster.told("b")}
            if len(restarted) < 2 * num_workers or not back:
                return False
            return bool(back[-1]["step"] > killed_at + 5)

        eventually(healed, WITHIN_S, "the group did not come back")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{cluster.logs()}") from error
    finally:
        for launcher in cluster.launchers:
            end_tree(launcher)
    hashes = {
        name: {(line["step"], line["group_rank"]): line["hash"] for line in cluster.told(name)}
        for name in ("a", "b")
    }
    common = hashes["a"].keys() & hashes["b"].keys()
    assert all(hashes["a"][key] == hashes["b"][key] for key in common)
    assert {step for step, _ in common if step > killed_at}
    assert cluster.told("a")[-1]["loss"] < cluster.told("a")[0]["loss"]
