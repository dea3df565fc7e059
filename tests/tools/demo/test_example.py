"""Tests the examples as a user starts them: alone, beside others, resumed, by a launcher."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.documents import code_blocks
from support.launched import worker_variables
from support.papers import TOKEN, papers, variables
from support.programs import Program
from support.running import ROOT, lighthouse_process
from torch.distributed import TCPStore

pytestmark = pytest.mark.processes

EXAMPLE = "examples/train_ddp.py"
SHARDED = "examples/train_hsdp.py"
# Of a guess among all characters. What is learnt differs by the Python whose sources are read.
UNTRAINED = math.log(128)
# Six processes import torch, on few cores that may be busy with other work.
SHARDED_S = 180.0
# A step of those that wait for processes which import torch: these need the processors.
PACE_S = 0.5
# A step of those that wait for forked processes.
LITTLE_S = 0.02


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """What a trainer has to know: the address of a running lighthouse."""
    with lighthouse_process() as lighthouse:
        yield {"TORCHFT_LIGHTHOUSE": lighthouse.address}


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[3]) for line in lines if line.startswith("step")]


def test_the_loss_falls_and_a_checkpoint_is_resumed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "latest.pt"
    flags = ["--checkpoint", str(file), "--save-every", "20"]
    begin = [sys.executable, EXAMPLE, "--steps", "120", *flags]
    with Program(begin, environment, warm=True) as first:
        assert first.wait() == 0, first.lines
    assert losses(first.lines)[-1] < UNTRAINED - 1
    assert list(tmp_path.iterdir()) == [file]
    again = [sys.executable, EXAMPLE, "--steps", "160", *flags]
    with Program(again, environment, warm=True) as second:
        assert second.wait() == 0, second.lines
    steps = [line.split()[1] for line in second.lines if line.startswith("step")]
    assert steps == ["140", "160"]
    assert losses(second.lines)[0] < UNTRAINED - 1


def test_a_launcher_may_start_it(environment: dict[str, str]) -> None:
    """The launcher and its worker have imported torch before they are started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    start = [*command, EXAMPLE, "--steps", "20"]
    with Program(start, environment, warm=True, forks_programs=True) as launcher:
        assert launcher.wait() == 0, launcher.lines
    assert any(line.startswith("step 20 ") for line in launcher.lines)


def page_commands(script: str) -> tuple[dict[str, str], list[tuple[dict[str, str], list[str]]]]:
    """What the page exports before it starts ``script``, and each start: variables, command."""
    page = ROOT / "docs" / "worker-groups.md"
    (block,) = (
        block.text for block in code_blocks(page) if block.language == "sh" and script in block.text
    )
    exported, starts = {}, []
    for line in block.splitlines():
        words = shlex.split(line.removesuffix(" &"))
        named = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        if words[0] == "export":
            exported |= named
        elif script in line:
            starts.append((named, words[len(named) :]))
    return exported, starts


@pytest.mark.timeout(3 * SHARDED_S + 60)
def test_sharded_groups_heal_with_the_commands_of_their_page(environment: dict[str, str]) -> None:
    """One of its two commands, which are alike; of the other, the workers alone, in no time."""
    exported, starts = page_commands(SHARDED)
    (names, command), (name, same) = starts
    assert (names.keys(), command) == (name.keys(), same)
    settings = (
        exported | environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    )
    steps = ("--steps", "100000", "--print-every", "1")
    with ExitStack() as stack:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        survivors = [
            stack.enter_context(
                Program(
                    [sys.executable, SHARDED, *steps],
                    settings | names | worker_variables(rank, store.port),
                    warm=True,
                    forks_programs=True,
                    pace_s=PACE_S,
                )
            )
            for rank in range(2)
        ]
        # The launcher and its workers have imported torch before they are started.
        assert command[0] == "torchrun"
        launcher = [sys.executable, "-m", "torch.distributed.run", *command[1:], *steps]
        victim = stack.enter_context(
            Program(launcher, settings | name, warm=True, forks_programs=True)
        )
        survivors[0].wait_for("groups 2", SHARDED_S)
        line = victim.wait_for("groups 2", SHARDED_S)
        workers_of(victim)[-1].kill()
        victim.wait_for("exitcode: -9", SHARDED_S)  # says the launcher, before it starts them again
        victim.lines.clear()
        again = victim.wait_for("groups 2", SHARDED_S)
        assert int(again.split()[1]) > int(line.split()[1])
        workers_of(victim)[0].terminate()
        assert victim.wait(SHARDED_S) == 0, victim.lines
        survivors[0].signal(signal.SIGTERM)
        for worker in survivors:
            assert worker.wait(SHARDED_S) == 0, worker.lines


def workers_of(launcher: Program) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(launcher.pid).children()
        if any(word.endswith(SHARDED) for word in child.cmdline())
    ]


def test_a_training_with_mutual_tls_and_a_token_heals(tmp_path: Path) -> None:
    """The environment is the only difference, in every process."""
    settings = variables(replace(papers(tmp_path).local, token=TOKEN))
    with ExitStack() as stack:

        def start(*command: str, **more: str) -> Program:
            program = Program(
                [sys.executable, *command], settings | more, warm=True, pace_s=LITTLE_S
            )
            return stack.enter_context(program)

        lighthouse = start("-m", "torchft_svc.lighthouse_server", "--bind", "127.0.0.1:0")
        settings["TORCHFT_LIGHTHOUSE"] = lighthouse.wait_for("listening on").rsplit(" ", 1)[1]
        example = (EXAMPLE, "--steps", "100000")
        first = start(*example, REPLICA_GROUP_ID="0")
        second = start(*example, REPLICA_GROUP_ID="1")
        first.wait_for("groups 2")
        second.signal(signal.SIGKILL)
        first.lines.clear()  # before the second came, the first was alone
        first.wait_for("groups 1")
        again = start(*example, REPLICA_GROUP_ID="1")
        line = again.wait_for("groups 2")
        assert int(line.split()[1]) > 20, "it began anew instead of being healed"
