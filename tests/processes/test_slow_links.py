"""Groups that train alone between synchronizations are killed, and stay bitwise equal."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest
from support.programs import Program
from support.running import lighthouse_process

pytestmark = pytest.mark.processes

# More kills than in the suite: TORCHFT_TEST_KILLS=30 pytest tests/processes/test_slow_links.py
KILLS = int(os.environ.get("TORCHFT_TEST_KILLS", "2"))
GROUPS = ("a", "b", "c")
SYNCS_BETWEEN_KILLS = 8


@contextlib.contextmanager
def group(address: str, name: str, algorithm: str) -> Iterator[Program]:
    command = [sys.executable, "tests/support/scripts/slow_link_worker.py", algorithm, "1000000"]
    variables = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": name}
    with Program(command, variables, warm=True) as program:
        yield program


def agreed(program: Program) -> dict[int, tuple[str, float]]:
    """Digest and loss after each synchronization of a process."""
    found = {}
    for line in list(program.read_so_far()):
        if line.startswith("agreed "):
            _, step, digest, loss, _ = line.split()
            found[int(step)] = digest, float(loss)
    return found


@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("algorithm", ["local_sgd", "diloco", "streaming", "quantized"])
def test_kills_at_random_moments(algorithm: str) -> None:
    chance = random.Random(algorithm)
    with lighthouse_process("--min-replicas=2") as lighthouse, contextlib.ExitStack() as stack:
        living = {
            name: stack.enter_context(group(lighthouse.address, name, algorithm)) for name in GROUPS
        }
        all_of_them = list(living.values())
        victims = set()
        for _ in range(KILLS):
            for program in living.values():
                program.wait_for("agreed ")
            step = max(max(agreed(program)) for program in living.values())
            for program in living.values():
                program.wait_until(
                    lambda line, step=step: (
                        line.startswith("agreed ")
                        and int(line.split()[1]) >= step + SYNCS_BETWEEN_KILLS
                    ),
                    "more synchronizations",
                )
            time.sleep(chance.uniform(0.0, 0.15))  # about two synchronizations
            victim = chance.choice(GROUPS)
            victims.add(victim)
            living[victim].signal(signal.SIGKILL)
            survivors = [program for name, program in living.items() if name != victim]
            living[victim] = stack.enter_context(group(lighthouse.address, victim, algorithm))
            all_of_them.append(living[victim])
            last = max(max(agreed(program)) for program in survivors)
            for program in survivors:
                program.wait_until(
                    lambda line, last=last: (
                        line.startswith("agreed ") and int(line.split()[1]) > last
                    ),
                    "synchronizations without the victim",
                )
        for name, program in living.items():
            program.wait_for("agreed ")
            if name in victims:
                program.wait_for("healed to step")
        found: dict[int, set[str]] = defaultdict(set)
        losses: dict[int, float] = {}
        for program in all_of_them:
            steps = agreed(program)
            assert list(steps) == list(range(min(steps), max(steps) + 1)), "none is lost"
            text = "\n".join(program.lines)
            assert "Traceback" not in text, text
            assert "was refused: the weights are" not in text, "nobody lost inner steps"
            for step, (digest, loss) in steps.items():
                found[step].add(digest)
                losses[step] = loss
        different = {step: digests for step, digests in found.items() if len(digests) > 1}
        assert not different
        assert sum(map(losses.get, list(losses)[-3:])) < 0.7 * sum(map(losses.get, [1, 2, 3]))  # type: ignore[arg-type]


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
