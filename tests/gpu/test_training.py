"""Tests whole training runs of two groups on a GPU: losses, identity, a kill and a heal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from support.gpu.ranks import HERE, START_S, needs_gpu, variables
from support.training import make_manager
from torch import nn

from tools.benchmarks.processes import Child, lighthouse_address, start_lighthouse
from torchft_svc.client import ProcessGroup, ProcessGroupBabyNCCL, ProcessGroupNCCL
from torchft_svc.client.algorithms import DecoupledDiLoCo
from torchft_svc.errors import ConfigError

pytestmark = [pytest.mark.gpu, pytest.mark.processes, needs_gpu, pytest.mark.timeout(180)]

STEP_S = 30.0
# From the kill to the survivor's next update: the report is immediate, the abort takes a moment.
RECOVERY_S = 2.0


@dataclass
class Trainer:
    """What a trainer has committed: by step, the number of participants, the loss, the digest."""

    child: Child
    commits: dict[int, tuple[int, float, str]] = field(default_factory=dict)

    def next_commit(self) -> int:
        while True:
            word, *rest = self.child.read_line(STEP_S).split()
            if word == "commit":
                step = int(rest[0])
                self.commits[step] = int(rest[1]), float(rest[2]), rest[3]
                return step

    def train_until(self, step: int) -> None:
        while self.next_commit() < step:
            pass


@contextlib.contextmanager
def trainer(lighthouse: str, name: int, *flags: str, steps: int) -> Iterator[Trainer]:
    command = [sys.executable, "-W", "ignore", str(HERE / "trainer.py")]
    command += [f"--lighthouse={lighthouse}", f"--name={name}", f"--steps={steps}", *flags]
    with Child(command, variables(str(name))) as child:
        assert child.read_line(START_S) == "ready"
        yield Trainer(child)


@contextlib.contextmanager
def lighthouse(min_replicas: int) -> Iterator[str]:
    with start_lighthouse(min_replicas=min_replicas) as child:
        yield lighthouse_address(child)


def assert_identical(*trainers: Trainer) -> None:
    """I3: groups that committed the same step hold the same state, bit for bit."""
    shared = set.intersection(*(set(t.commits) for t in trainers))
    assert shared
    for step in shared:
        assert len({t.commits[step][2] for t in trainers}) == 1, f"step {step} differs"


ISOLATED = "--backend=isolated"
GRAPHED = "--graphed"  # of torch.cuda.make_graphed_callables
COMPILED = "--compile=default"
COMPILED_TO_GRAPHS = "--compile=reduce-overhead"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--side-stream"],
        ["--backend=gloo"],
        [ISOLATED],
        [COMPILED],
        [COMPILED_TO_GRAPHS],
        [GRAPHED],
    ],
    ids=str,
)
def test_i3_two_groups_learn_and_stay_identical(flags: list[str]) -> None:
    with (
        lighthouse(2) as where,
        trainer(where, 0, *flags, steps=60) as a,
        trainer(where, 1, *flags, steps=60) as b,
    ):
        for group in (a, b):
            group.train_until(60)
            losses = [loss for _, loss, _ in group.commits.values()]
            assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
            assert {num for num, _, _ in group.commits.values()} == {2}
        assert_identical(a, b)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_two_groups_learn_from_sums_in_8_bit_numbers(kind: str) -> None:
    with (
        lighthouse(2) as where,
        trainer(where, 0, f"--quantize={kind}", steps=30) as a,
        trainer(where, 1, f"--quantize={kind}", steps=30) as b,
    ):
        for group in (a, b):
            group.train_until(30)
            losses = [loss for _, loss, _ in group.commits.values()]
            assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
        assert_identical(a, b)


def averages(group: Trainer, num: int) -> list[tuple[bool, str, str]]:
    """Whether each of the next steps was committed, its average's digest, and its error."""
    found = []
    for _ in range(num):
        _, committed, seen, error = group.child.read_line(STEP_S).split(maxsplit=3)
        found.append((committed == "1", seen, error))
    return found


@pytest.mark.parametrize("backend", ["nccl", "isolated"])
@pytest.mark.parametrize("others", [("int8", "float8"), ("int8", "float32"), ("float32", "float8")])
def test_groups_that_average_in_other_formats_commit_nothing(
    backend: str, others: tuple[str, str]
) -> None:
    """The rows of all 8-bit numbers have one size, so only a comparison finds it."""
    same = ["int8"] * 3
    flags = [f"--formats={','.join([*same, each, each])}" for each in others]
    with (
        lighthouse(2) as where,
        trainer(where, 0, flags[0], f"--backend={backend}", steps=0) as a,
        trainer(where, 1, flags[1], f"--backend={backend}", steps=0) as b,
    ):
        before = [averages(group, 3) for group in (a, b)]
        after = [averages(group, 2) for group in (a, b)]
    assert before[0] == before[1]
    assert all(committed for committed, *_ in before[0])
    assert not any(committed for steps in after for committed, *_ in steps)
    errors = [steps[-1][-1] for steps in after]
    assert all("at different operations of the step" in error for error in errors), errors


@pytest.mark.parametrize("kind", [ProcessGroupNCCL, ProcessGroupBabyNCCL])
def test_decoupled_diloco_is_refused_where_only_devices_are_summed(
    kind: type[ProcessGroup],
) -> None:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        lighthouse(1) as where,
        make_manager(where, "a", pg=kind(), use_async_quorum=False) as manager,
        pytest.raises(ConfigError, match="give the manager ProcessGroupGloo"),
    ):
        DecoupledDiLoCo(manager, [model], sgd, lambda weights: torch.optim.SGD(weights, 0.7), 2)


@pytest.mark.parametrize("flags", [[], ["--side-stream"], [ISOLATED], [GRAPHED]], ids=str)
def test_a_killed_group_costs_a_moment_and_heals(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    forever = 1_000_000
    with lighthouse(1) as where, trainer(where, 0, *flags, steps=forever) as a:
        with trainer(where, 1, *flags, steps=forever) as b:
            while a.next_commit() < 20 or a.commits[max(a.commits)][0] < 2:
                pass
            b.train_until(max(a.commits))
            assert_identical(a, b)
            b.child.kill()
            killed_at = time.monotonic()
            while a.commits[a.next_commit()][0] == 2:
                pass
            took_s = time.monotonic() - killed_at
        with capsys.disabled():
            print(f"\n[kill of 1 of 2 groups, {flags}: next commit after {1000 * took_s:.0f} ms]")
        assert took_s < RECOVERY_S
        with trainer(where, 1, *flags, steps=forever) as b:
            while a.commits[a.next_commit()][0] < 2:
                pass
            together = max(a.commits)
            a.train_until(together + 10)
            b.train_until(together + 10)
            assert_identical(a, b)
