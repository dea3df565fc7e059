"""Tests the examples as a user starts them: alone, beside others, resumed, by a launcher."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from papers import TOKEN, papers, variables
from programs import Program

pytestmark = pytest.mark.processes

EXAMPLE = "examples/train_ddp.py"
SHARDED = "examples/train_hsdp.py"


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """What a trainer has to know: the address of a running lighthouse."""
    with Program(
        [sys.executable, "-m", "torchft_svc.lighthouse_server", "--bind", "127.0.0.1:0"]
    ) as lighthouse:
        address = lighthouse.wait_for("lighthouse listening on").rsplit(" ", 1)[1]
        yield {"TORCHFT_LIGHTHOUSE": address}


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[3]) for line in lines if line.startswith("step")]


def test_groups_train_together(environment: dict[str, str]) -> None:
    with ExitStack() as stack:
        groups = [
            stack.enter_context(
                Program(
                    [sys.executable, EXAMPLE, "--steps", "100000"],
                    environment | {"REPLICA_GROUP_ID": str(number)},
                )
            )
            for number in range(2)
        ]
        for group in groups:
            group.wait_for("groups 2")


def test_the_loss_falls_and_a_checkpoint_is_resumed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "latest.pt"
    flags = ["--checkpoint", str(file), "--save-every", "20"]
    with Program([sys.executable, EXAMPLE, "--steps", "120", *flags], environment) as first:
        assert first.wait() == 0, first.lines
    assert losses(first.lines)[-1] < losses(first.lines)[0] - 0.3
    assert list(tmp_path.iterdir()) == [file]
    with Program([sys.executable, EXAMPLE, "--steps", "160", *flags], environment) as second:
        assert second.wait() == 0, second.lines
    steps = [line.split()[1] for line in second.lines if line.startswith("step")]
    assert steps == ["140", "160"]
    assert losses(second.lines)[0] < losses(first.lines)[0] - 0.3


def test_a_launcher_may_start_it(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    with Program([*command, EXAMPLE, "--steps", "20"], environment) as launcher:
        assert launcher.wait() == 0, launcher.lines
    assert any(line.startswith("step 20 ") for line in launcher.lines)


def test_sharded_groups_train_together(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with ExitStack() as stack:
        groups = [
            stack.enter_context(
                Program(
                    [*command, SHARDED, "--steps", "60"],
                    environment | {"REPLICA_GROUP_ID": str(number), "OMP_NUM_THREADS": "1"},
                )
            )
            for number in range(2)
        ]
        for group in groups:
            assert group.wait() == 0, group.lines
    for group in groups:
        assert any(line.endswith("groups 2") for line in group.lines), group.lines
        assert losses(group.lines)[-1] < losses(group.lines)[0]


def test_a_training_with_mutual_tls_and_a_token_heals(tmp_path: Path) -> None:
    """Nothing but the environment is different, in every process."""
    settings = variables(replace(papers(tmp_path).local, token=TOKEN))
    with ExitStack() as stack:

        def start(*command: str, **more: str) -> Program:
            return stack.enter_context(Program([sys.executable, *command], settings | more))

        lighthouse = start("-m", "torchft_svc.lighthouse_server", "--bind", "127.0.0.1:0")
        settings["TORCHFT_LIGHTHOUSE"] = lighthouse.wait_for("listening on").rsplit(" ", 1)[1]
        example = (EXAMPLE, "--steps", "100000")
        first = start(*example, REPLICA_GROUP_ID="0")
        second = start(*example, REPLICA_GROUP_ID="1")
        first.wait_for("groups 2")
        second.signal(signal.SIGKILL)
        first.wait_for("groups 1")
        again = start(*example, REPLICA_GROUP_ID="1")
        line = again.wait_for("groups 2")
        assert int(line.split()[1]) > 20, "it began anew instead of being healed"
