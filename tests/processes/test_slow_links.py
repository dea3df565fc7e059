"""Groups that train alone between synchronizations are killed, and stay bitwise equal."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.launched import worker_variables
from support.programs import Program
from support.running import lighthouse_process
from torch.distributed import TCPStore

pytestmark = pytest.mark.processes

# More kills than in the suite: TORCHFT_TEST_KILLS=30 pytest tests/processes/test_slow_links.py
KILLS = int(os.environ.get("TORCHFT_TEST_KILLS", "2"))
GROUPS = ("a", "b", "c")
SYNCS_BETWEEN_KILLS = 8


@contextlib.contextmanager
def group(
    address: str, name: str, algorithm: str, of_worker: Mapping[str, str] | None = None
) -> Iterator[Program]:
    command = [sys.executable, "tests/support/scripts/slow_link_worker.py", algorithm, "1000000"]
    variables = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": name, **(of_worker or {})}
    with Program(command, variables, warm=True) as program:
        yield program


@dataclass(frozen=True)
class Agreed:
    """What a process shows after a synchronization; ``tokens``: merged, and its own of them."""

    digest: str
    loss: float
    tokens: tuple[int, ...] = ()


def agreed(program: Program) -> dict[int, Agreed]:
    """What a process has shown so far, by the number of synchronizations."""
    found = {}
    for line in list(program.read_so_far()):
        if line.startswith("agreed "):
            _, step, digest, loss, _, *tokens = line.split()
            found[int(step)] = Agreed(digest, float(loss), tuple(map(int, tokens)))
    return found


@dataclass
class Killed:
    """Groups of which one after the other was killed, and started again.

    ``lives``: all processes; ``epochs``: those that lived between two kills, and the number of
    synchronizations at the kill that followed.
    """

    lives: list[Program]
    epochs: list[tuple[list[Program], int]]

    def check_bits(self) -> None:
        """Check for equal bits after equal synchronizations, and a loss that falls."""
        found: dict[int, set[str]] = defaultdict(set)
        losses: dict[int, float] = {}
        for program in self.lives:
            for step, shown in agreed(program).items():
                found[step].add(shown.digest)
                losses[step] = shown.loss
        different = {step: digests for step, digests in found.items() if len(digests) > 1}
        assert not different
        in_order = [losses[step] for step in sorted(losses)]
        assert sum(in_order[-3:]) < 0.7 * sum(in_order[:3])

    def check_tokens(self) -> None:
        """Check that each token of a living learner is in one merge, and that none goes back."""
        began_at = 0
        lost = 0  # what the dead have contributed
        for living, ended_at in self.epochs:
            shown = [agreed(program) for program in living]
            for steps in shown:
                assert list(steps) == sorted(steps)
            together = [
                step
                for step in sorted(set.intersection(*map(set, shown)))
                if began_at < step <= ended_at
            ]
            assert together, "learners that live together show the same merges"
            for step in together:
                merged = {steps[step].tokens[0] for steps in shown}
                assert len(merged) == 1
                by_the_dead = merged.pop() - sum(steps[step].tokens[1] for steps in shown)
                if step == together[0]:
                    assert by_the_dead >= lost
                    lost = by_the_dead
                assert by_the_dead == lost, f"merge {step} of those up to {ended_at}"
            began_at = ended_at


@contextlib.contextmanager
def killed_groups(algorithm: str) -> Iterator[Killed]:
    """Three groups of ``algorithm`` after the kills."""
    chance = random.Random(algorithm)
    with lighthouse_process("--min-replicas=2") as lighthouse, contextlib.ExitStack() as stack:
        living = {
            name: stack.enter_context(group(lighthouse.address, name, algorithm)) for name in GROUPS
        }
        killed = Killed(list(living.values()), [])
        victims = set()
        for _ in range(KILLS):
            for program in living.values():
                program.wait_for("agreed ")
            step = max(max(agreed(program)) for program in living.values())
            for program in living.values():
                wait_until_after(program, step + SYNCS_BETWEEN_KILLS - 1, "more synchronizations")
            time.sleep(chance.uniform(0.0, 0.15))  # about two synchronizations
            victim = chance.choice(GROUPS)
            victims.add(victim)
            living[victim].signal(signal.SIGKILL)
            last = max(max(agreed(program)) for program in living.values())
            killed.epochs.append((list(living.values()), last))
            survivors = [program for name, program in living.items() if name != victim]
            living[victim] = stack.enter_context(group(lighthouse.address, victim, algorithm))
            killed.lives.append(living[victim])
            for program in survivors:
                wait_until_after(program, last, "synchronizations without the victim")
        for name, program in living.items():
            program.wait_for("agreed ")
            if name in victims:
                program.wait_for("healed to step")
        for program in killed.lives:
            text = "\n".join(program.lines)
            assert "Traceback" not in text, text
        yield killed


def wait_until_after(program: Program, step: int, what: str) -> None:
    program.wait_until(
        lambda line: line.startswith("agreed ") and int(line.split()[1]) > step, what
    )


@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("algorithm", ["local_sgd", "diloco", "streaming", "quantized"])
def test_kills_at_random_moments(algorithm: str) -> None:
    with killed_groups(algorithm) as killed:
        killed.check_bits()
        for program in killed.lives:
            steps = agreed(program)
            assert list(steps) == list(range(min(steps), max(steps) + 1)), "none is lost"
            text = "\n".join(program.lines)
            assert "was refused: the weights are" not in text, "nobody lost inner steps"


@pytest.mark.timeout(120 + 60 * KILLS)
def test_kills_of_decoupled_learners() -> None:
    with killed_groups("decoupled") as killed:
        killed.check_bits()
        killed.check_tokens()


@pytest.mark.timeout(240)
def test_a_worker_of_a_learner_is_late_and_killed(tmp_path: Path) -> None:
    """The other learner merges on beside a late worker, and when that is killed.

    Its learner's other worker ends then, and their next life heals all shards.
    """
    late = tmp_path / "late"
    with lighthouse_process("--min-replicas=1") as lighthouse, contextlib.ExitStack() as stack:

        def start(name: str) -> list[Program]:
            """Two workers that shard the model."""
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            stack.callback(lambda: store)  # it lives as long as they
            programs = []
            for rank in range(2):
                variables = worker_variables(rank, store.port)
                if (name, rank) == ("b", 1):
                    variables["LATE_WHILE"] = str(late)
                one = group(lighthouse.address, name, "decoupled", variables)
                programs.append(stack.enter_context(one))
            return programs

        def train_together(programs: list[Program]) -> int:
            """The newest merge, after some with all of ``programs``."""
            for program in programs:
                program.wait_for("agreed ")
            step = max(max(agreed(program)) for program in programs)
            for program in programs:
                wait_until_after(program, step + SYNCS_BETWEEN_KILLS, "more merges")
            return max(max(agreed(program)) for program in programs)

        first, second = start("a"), start("b")
        last = train_together(first + second)
        late.touch()
        for program in first:
            wait_until_after(program, last + SYNCS_BETWEEN_KILLS, "merges beside a late worker")
        late.unlink()
        train_together(first + second)
        second[1].signal(signal.SIGKILL)
        assert second[0].wait() != 0, "a lone worker would train nothing"
        last = train_together(first)
        epochs = [(first + second, last)]
        again = start("b")
        epochs.append((first + again, train_together(first + again)))
        assert min(agreed(again[0])) > max(agreed(second[0])), "it begins with what is merged"
        assert list(agreed(again[0])) == list(agreed(again[1])), "they adopt at the same steps"
        for rank in range(2):
            living = [first[rank], again[rank]]
            assert all("Traceback" not in "\n".join(each.lines) for each in living)
            Killed([*living, second[rank]], []).check_bits()
        Killed([], epochs).check_tokens()


def test_the_examples_learn() -> None:
    names = ("train_local_sgd", "train_diloco", "train_streaming_diloco")
    with lighthouse_process() as lighthouse, contextlib.ExitStack() as stack:
        programs = {}
        for name in names:
            for group_id in ("0", "1"):
                command = [
                    sys.executable,
                    f"examples/{name}.py",
                    "--syncs=12",
                    "--sync-every=18",
                ]
                variables = {
                    "TORCHFT_LIGHTHOUSE": lighthouse.address,
                    "REPLICA_GROUP_ID": group_id,
                    "TORCHFT_JOB_ID": name,
                    "TORCHFT_MIN_REPLICAS": "2",
                }
                program = stack.enter_context(Program(command, variables, warm=True))
                programs[name, group_id] = program
        for (name, _), program in programs.items():
            assert program.wait() == 0, "\n".join(program.lines)
            shown = [line.split() for line in program.lines if line.startswith("synchronization ")]
            losses = [float(words[3]) for words in shown]
            assert len(losses) == 12, program.lines
            assert losses[-1] < losses[0] - 0.5, (name, losses)
