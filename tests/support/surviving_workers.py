"""A group of the sharded example loses one worker after the other, and trains on in the others."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed import TCPStore

from support.launched import agent, worker_variables
from support.programs import Program
from support.running import lighthouse_process

EXAMPLE = ("examples/train_hsdp.py", "--steps=1000000", "--print-every=2")
_STEP = re.compile(r"step (\d+) loss [\d.]+ groups (\d) rank (\d) pid (\d+) digest ([0-9a-f]{8})$")
PRELOAD = "torch,torch._dynamo,torch.distributed.fsdp,torchft_svc.client"
# The first workers import torch, on few cores that may be busy with other work.
REPLACED_S = 120.0
# Of a step, while others need the processors to import torch.
PACE_S = 0.5


@dataclass(frozen=True)
class Step:
    """What a worker prints now and then."""

    step: int
    groups: int
    rank: int
    pid: int
    digest: str


def step_in(line: str) -> Step | None:
    match = _STEP.search(line)
    return match and Step(*map(int, match.groups()[:4]), match[5])


def steps_of(*programs: Program) -> list[Step]:
    lines = (line for program in programs for line in program.read_so_far())
    return [step for line in lines if (step := step_in(line))]


def await_step(program: Program, rank: int, after: int) -> Step:
    """A step of both groups that the worker with this rank prints, later than ``after``."""

    def holds(line: str) -> bool:
        found = step_in(line)
        return found is not None and (found.groups, found.rank) == (2, rank) and found.step > after

    step = step_in(program.wait_until(holds, f"rank {rank} after step {after}", REPLACED_S))
    assert step is not None
    return step


def survive_each_loss(
    before: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> None:
    """Kill each worker of a group once; assert that the other one keeps its process, that the group
    heals from the other group, and that the bits of both are the same.

    ``before``: what stands before the example on the command line of a worker.
    """
    with lighthouse_process("--min-replicas=1") as lighthouse, contextlib.ExitStack() as stack:
        environment = {"TORCHFT_LIGHTHOUSE": lighthouse.address, **(variables or {})}
        example = [*before, *EXAMPLE]
        options = ["--standalone", "--restart-policy=soft-replace", "--nproc-per-node=2"]
        options += ["--warm-start", f"--warm-start-preload={PRELOAD}"]
        group = stack.enter_context(
            agent(
                *[*options, "--max-restarts=9", *example, "--survive"],
                environment={**environment, "REPLICA_GROUP_ID": "1"},
            )
        )
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        others = [
            stack.enter_context(worker_of_two(rank, store.port, example, environment))
            for rank in range(2)
        ]
        for rank, other in enumerate(others):
            await_step(other, rank, 0)
        now = {rank: await_step(group, rank, 0) for rank in range(2)}
        for victim in (1, 0):
            survivor = now[1 - victim]
            os.kill(now[victim].pid, signal.SIGKILL)
            seen = steps_of(*others)[-1].step
            now = {rank: await_step(group, rank, seen) for rank in range(2)}
            # Its rank is that of the worker that it replaces: they are those of one node.
            assert now[1 - victim].pid == survivor.pid
            assert now[victim].pid != survivor.pid
        for rank, other in enumerate(others):
            await_step(other, rank, max(each.step for each in now.values()))
            discarded = [line for line in other.read_so_far() if "is discarded" in line]
            assert len(discarded) <= 4, "two for each loss"
        check_digests([*steps_of(group), *steps_of(*others)])


def check_digests(steps: list[Step]) -> None:
    """The same bits in both groups, rank by rank."""
    digests = defaultdict(set)
    for each in steps:
        digests[each.step, each.rank].add(each.digest)
    assert not {where: found for where, found in digests.items() if len(found) > 1}


def worker_of_two(
    rank: int, port: int, example: Sequence[str], environment: Mapping[str, str]
) -> Program:
    """A worker of the other group, which has no launcher."""
    settings = {"REPLICA_GROUP_ID": "0", **worker_variables(rank, port)}
    return Program(
        [sys.executable, *example], {**environment, **settings}, warm=True, pace_s=PACE_S
    )
