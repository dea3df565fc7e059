"""Tests replicated models, with our wrapper and torch's: groups start and end at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.files import complete_lines
from support.forked import Group, ending
from support.running import eventually, lighthouse_process
from support.scripts import replicated_trainer

# The first group of all waits until torch is imported, on a machine that may be busy.
WITHIN_S = 120.0


@pytest.mark.timeout(4 * WITHIN_S)
@pytest.mark.parametrize("wrapper", ["ours", "torch's"])
@pytest.mark.processes
def test_i3_groups_that_start_at_different_times(tmp_path: Path, wrapper: str) -> None:
    """One waits for a second, a third comes late, one is killed and comes back.

    All of them begin with weights of their own.
    """
    groups: list[Group] = []

    def lines_of(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in complete_lines(tmp_path / name)]

    def meet(*names: str, since: int = 0) -> None:
        """Wait until all have trained together for a while."""

        def common_steps() -> set[int]:
            steps = [
                {line["step"] for line in lines_of(name) if line["groups"] == len(names)}
                for name in names
            ]
            return {step for step in set.intersection(*steps) if step > since}

        eventually(lambda: len(common_steps()) >= 5, WITHIN_S, f"{names} do not train together")

    with lighthouse_process("--min-replicas=2") as lighthouse, ending(groups):

        def start(name: str) -> Group:
            group = Group(
                name=name,
                run=replicated_trainer.run,
                arguments=(wrapper, tmp_path / name),
                num_workers=1,
                log=tmp_path / f"{name}.log",
                lighthouse=lighthouse.address,
            )
            groups.append(group.start())
            return group

        start("a")
        eventually(lambda: "1 of at least 2 groups ask" in lighthouse.errors(), WITHIN_S, "no wait")
        victim = start("b")
        meet("a", "b")
        start("c")
        meet("a", "b", "c")
        victim.kill(group_rank=0)
        killed_at = max(line["step"] for name in "abc" for line in lines_of(name))
        start("b")
        meet("a", "b", "c", since=killed_at)
    hashes = [{line["step"]: line["hash"] for line in lines_of(name)} for name in "abc"]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        common = hashes[one].keys() & hashes[other].keys()
        assert len(common) >= 5
        assert all(hashes[one][step] == hashes[other][step] for step in common)
