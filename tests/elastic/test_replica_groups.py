"""`torchft-run --replica-groups --spares`: who takes a killed group's place, and who comes back.

Rules G5 and G6 are tested with the machine: tests/core/launch/test_replica_groups.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from support.launched import OURS
from support.programs import Program
from support.running import SCRIPTS, eventually, is_alive, lighthouse_process

from torchft_svc.coordination import LighthouseClient, LighthouseServer
from torchft_svc.core.launch.replica_groups import GroupsRules, GroupsView
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.elastic import run
from torchft_svc.elastic.replica_groups import GroupsConfig, _GroupsLauncher, command_of_group
from torchft_svc.errors import ConfigError

SCRIPT = str(SCRIPTS / "spare_trainer.py")
TOKEN = "a-secret-of-these-tests"  # noqa: S105
# Importing torch takes long on a busy machine: a launcher, and then its worker.
START_S = 120.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--spares=1"], "--spares=1 cannot work: .* give --max-restarts, too"),
        (["--replica-groups=0"], "--replica-groups=0 cannot work: use 1 or more"),
        (["--spares=1", "--max-restarts=1", "--restart-policy=soft"], "started again as a whole"),
        (["--spares=1", "--max-restarts=1", "--nnodes=2"], "REPLICA_GROUP_ID of its own"),
        (["--spares=1", "--max-restarts=1", "--nproc-per-node=gpu"], "use a number"),
        (["--replica-groups=2", "--rdzv-id=x"], "--rdzv-id='x' .* each replica group has its own"),
        (["--replica-groups=2", "--max-node-failures=1"], "each replica group has its own"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run.parse_args([*options, SCRIPT])


def test_a_launcher_of_spares_is_no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_SPARE", "1")
    with pytest.raises(ConfigError, match="decide which groups stand by"):
        run.parse_args(["--replica-groups=2", SCRIPT])


@pytest.mark.processes
@pytest.mark.parametrize(("token", "view"), [(TOKEN, GroupsView()), (TOKEN[::-1], None)])
def test_a_lighthouse_that_refuses_the_token_is_one_that_does_not_answer(
    token: str, view: GroupsView | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups, which have their sessions, train on. Where it answers, no group has come yet."""
    config = GroupsConfig(
        rules=GroupsRules(num_groups=2), command=[], num_workers=1, shutdown_timeout_s=1.0
    )
    with lighthouse_process(TORCHFT_TOKEN=TOKEN) as lighthouse:
        monkeypatch.setenv("TORCHFT_TOKEN", token)
        with _GroupsLauncher(config, lighthouse.address) as launcher:
            assert launcher._request_view() == view


@pytest.mark.parametrize(("given", "expected"), [(None, "2"), ("8", "8")])
def test_the_number_of_groups_may_be_that_of_several_machines(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUM_REPLICA_GROUPS", raising=False)
    if given is not None:
        monkeypatch.setenv("NUM_REPLICA_GROUPS", given)
    rules = GroupsRules(num_groups=2)
    config = GroupsConfig(rules=rules, command=[], num_workers=1, shutdown_timeout_s=1.0)
    with _GroupsLauncher(config, "localhost:1") as launcher:
        assert launcher._variables(0, is_spare=False)["NUM_REPLICA_GROUPS"] == expected


def test_each_group_has_a_launcher_with_one_group() -> None:
    line = ["--spares=1", "--max-restarts=3", "--tee=3", "--", "train.py", "--spares=7"]
    command = command_of_group(line, 2)
    assert command[:2] == ["-m", OURS]
    parsed = run.get_args_parser().parse_args(command[2:])
    assert (parsed.spares, parsed.replica_groups, parsed.max_restarts, parsed.tee) == (0, 1, 0, "3")
    assert (parsed.training_script, parsed.training_script_args) == ("train.py", ["--spares=7"])
    assert GroupsRules(num_groups=1).num_spares == 0


class Groups:
    """A launcher under test, the lines of its workers, and its job at the lighthouse."""

    def __init__(self, program: Program, client: LighthouseClient) -> None:
        self.program, self._client = program, client

    def records(self) -> list[dict[str, Any]]:
        lines = (line[line.find("{") :] for line in list(self.program.read_so_far()))
        return [json.loads(line) for line in lines if line.startswith('{"group"')]

    def steps(self) -> list[dict[str, Any]]:
        return [each for each in self.records() if "step" in each]

    def trainers(self) -> dict[str, int]:
        """The processes of the groups that have committed one of the last steps."""
        steps = self.steps()
        last = max((each["step"] for each in steps), default=0)
        return {each["group"]: each["pid"] for each in steps if each["step"] >= last - 2}

    def trains_with(self, groups: set[str]) -> bool:
        steps = self.steps()[-2 * len(groups) :]
        return {each["group"] for each in steps} == groups and all(
            each["groups"] == len(groups) for each in steps
        )

    def standing_by(self) -> set[str]:
        """The groups that could take a place at once."""
        spares = [each for job in self._client.status() for each in job.prepared_spares]
        return {stable_name(each.replica_id) for each in spares if each.asks}

    def until(self, holds: Callable[[], object], what: str) -> None:
        def look() -> object:
            time.sleep(0.05)
            assert self.program.poll() is None, self.program.read_so_far()
            return holds()

        eventually(look, START_S, what)


@pytest.fixture
def groups() -> Iterator[Groups]:
    lighthouse = LighthouseServer("127.0.0.1:0", 1, startup_wait_ms=1000)
    command = [sys.executable, "-m", OURS, "--replica-groups=2", "--spares=1", "--max-restarts=9"]
    environment = {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
    try:
        with (
            LighthouseClient(lighthouse.address(), timedelta(seconds=5)) as client,
            Program([*command, SCRIPT, "100000"], environment) as program,
        ):
            yield Groups(program, client)
    finally:
        lighthouse.shutdown()


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_g5_a_spare_takes_the_place_and_the_next_one_stands_by(groups: Groups) -> None:
    groups.until(lambda: groups.trains_with({"0", "1"}), "two groups train")
    groups.until(lambda: groups.standing_by() == {"2"}, "a spare stands by")

    groups.until(lambda: groups.steps()[-1]["step"] >= 10, "the loss has gone down")

    victim = groups.trainers()["1"]
    killed_at_step = groups.steps()[-1]["step"]
    os.kill(victim, signal.SIGKILL)
    groups.until(lambda: groups.trains_with({"0", "2"}), "the spare has taken the place")
    groups.until(lambda: groups.standing_by() == {"1"}, "the killed group stands by")

    os.kill(groups.trainers()["0"], signal.SIGKILL)
    groups.until(lambda: groups.trains_with({"1", "2"}), "it takes the next place")
    assert groups.program.poll() is None

    digests = defaultdict(set)
    for each in groups.steps():
        digests[each["step"]].add(each["digest"])
    assert all(len(found) == 1 for found in digests.values())
    assert max(digests) > killed_at_step
    losses = {each["step"]: each["loss"] for each in groups.steps()}
    assert losses[max(losses)] < losses[killed_at_step] < losses[min(losses)]

    pids = {each["pid"] for each in groups.records()}
    groups.program.signal(signal.SIGTERM)
    assert groups.program.wait(START_S) == 1
    assert not any(map(is_alive, pids))
    text = "\n".join(groups.program.read_so_far())
    assert "torchft-run: ended by SIGTERM" in text  # of each group that had handlers by then
    assert "SignalException" not in text
