"""Tests each side of the wire against the public torchft release, in real processes.

Needs TORCHFT_PEER_PYTHON, a python that has the public release.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from support.running import END_S, SCRIPTS, environment, lighthouse_process

from torchft_svc.coordination import ManagerClient, ManagerServer
from torchft_svc.rpc.probing import accepts_client_blocking
from torchft_svc.rpc.security import PLAIN

pytestmark = [pytest.mark.peer, pytest.mark.processes]

PEER = os.environ.get("TORCHFT_PEER_PYTHON", "")
LINE_S = 60.0
LONG = timedelta(seconds=30)


@pytest.fixture(scope="module", autouse=True)
def _peer_is_there() -> None:
    if not PEER:
        pytest.skip("TORCHFT_PEER_PYTHON names no python that has the public release")
    result = subprocess.run([PEER, "-c", "import torchft"], capture_output=True, timeout=100)
    if result.returncode != 0:
        pytest.skip("the public release cannot be imported there")


class Script:
    """One of the scripts of the tests, in a process of its own, and the lines it prints."""

    def __init__(self, python: str, name: str, *arguments: str) -> None:
        variables = environment(OMP_NUM_THREADS="1")
        if python == PEER:
            del variables["PYTHONPATH"]
        self.popen = subprocess.Popen(
            [python, "-W", "ignore", SCRIPTS / name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
        )
        self._unread = b""

    def line(self) -> str:
        """Read the next line of its output; empty at its end."""
        assert self.popen.stdout is not None
        deadline = time.monotonic() + LINE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                assert selector.select(max(0.0, deadline - time.monotonic())), "it says nothing"
                more = os.read(self.popen.stdout.fileno(), 65536)
                if not more:
                    return ""
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def steps(self, until: int) -> list[dict[str, Any]]:
        """What it printed about its steps up to ``until``."""
        steps: list[dict[str, Any]] = []
        while not steps or steps[-1]["step"] < until:
            line = self.line()
            assert line, f"it ended with status {self.popen.wait(END_S)} after {steps}"
            steps.append(json.loads(line))
        return steps

    def close(self) -> None:
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(1.0)
        self.popen.kill()
        self.popen.wait(END_S)


@contextlib.contextmanager
def script(python: str, name: str, *arguments: str) -> Iterator[Script]:
    running = Script(python, name, *arguments)
    try:
        yield running
    finally:
        running.close()


def test_a_trainer_of_the_public_release_trains_against_our_lighthouse() -> None:
    with (
        lighthouse_process("--join-timeout-ms=1000") as lighthouse,
        script(
            PEER, "interop_trainer.py", "public", f"http://{lighthouse.address}", "public", "12"
        ) as trainer,
    ):
        printed = trainer.steps(until=12)
        assert "Traceback" not in lighthouse.errors()
    assert [each["step"] for each in printed] == list(range(1, 13))
    assert printed[-1]["loss"] < printed[0]["loss"] / 4
    assert {each["groups"] for each in printed} == {1}


def test_two_trainers_of_the_public_release_train_together_on_our_lighthouse() -> None:
    flags = ("--min-replicas=2", "--join_timeout_ms=1000")
    with lighthouse_process(*flags) as lighthouse, contextlib.ExitStack() as stack:
        address = f"http://{lighthouse.address}"
        trainers = [
            stack.enter_context(script(PEER, "interop_trainer.py", "public", address, name, "6"))
            for name in ("public-a", "public-b")
        ]
        printed = [trainer.steps(until=6) for trainer in trainers]
    assert printed[0][-1]["groups"] == printed[1][-1]["groups"] == 2
    assert printed[0][-1]["loss"] < printed[0][0]["loss"]


def test_a_group_of_the_public_release_and_one_of_ours_are_in_one_quorum() -> None:
    with lighthouse_process("--min-replicas=2") as lighthouse:
        address = f"http://{lighthouse.address}"
        with (
            script(PEER, "public_services.py", "member", address) as peer,
            ManagerServer(
                replica_id="ours",
                lighthouse_addr=address,
                hostname="127.0.0.1",
                bind="127.0.0.1:0",
                store_addr="127.0.0.1:2",
                world_size=1,
                heartbeat_interval=timedelta(milliseconds=100),
                connect_timeout=LONG,
                quorum_retries=0,
            ) as manager,
            ManagerClient(manager.address(), LONG) as client,
        ):
            ours = client._quorum(0, 7, "", False, LONG, init_sync=False)
            theirs = json.loads(peer.line())
    assert ours.quorum_id == theirs["quorum_id"]
    assert list(ours.replica_ids) == theirs["replica_ids"]
    assert [name.partition(":")[0] for name in ours.replica_ids] == ["ours", "public"]
    assert (ours.replica_rank, theirs["replica_rank"]) == (0, 1)
    assert ours.replica_world_size == theirs["replica_world_size"] == 2
    assert ours.store_address == theirs["store_address"]
    assert (ours.max_step, ours.heal) == (theirs["max_step"], theirs["heal"]) == (7, False)


def test_our_lighthouse_passes_on_the_handles_of_a_nightly() -> None:
    """Handles are in field 9 of a member, which is unknown here."""
    with lighthouse_process("--min-replicas=2") as lighthouse, contextlib.ExitStack() as stack:
        address = f"http://{lighthouse.address}"
        members = [
            stack.enter_context(
                script(PEER, "public_services.py", "member", address, name, f"handle of {name}")
            )
            for name in ("public-a", "public-b")
        ]
        answers = [json.loads(each.line()) for each in members]
    if answers[0]["reconfigure_handles"] is None:
        pytest.skip("that python has a release without handles")
    for answer in answers:
        assert answer["reconfigure_handles"] == ["handle of public-a", "handle of public-b"]


def test_our_manager_trains_against_the_public_releases_lighthouse() -> None:
    """Two groups; one is killed; the other goes on. Our extra requests are unknown there."""
    with (
        script(PEER, "public_services.py", "lighthouse") as lighthouse,
        contextlib.ExitStack() as stack,
    ):
        address = f"http://127.0.0.1:{lighthouse.line()}"
        assert accepts_client_blocking(address, "job", PLAIN, LONG.total_seconds())
        killed, survivor = [
            stack.enter_context(
                script(sys.executable, "interop_trainer.py", "ours", address, name, "1000000")
            )
            for name in ("ours-a", "ours-b")
        ]
        printed = survivor.steps(until=5)
        while printed[-1]["groups"] < 2:
            printed += survivor.steps(until=printed[-1]["step"] + 1)
        assert killed.steps(until=1)
        killed.popen.kill()
        while printed[-1]["groups"] > 1:
            printed += survivor.steps(until=printed[-1]["step"] + 1)
        alone_at = printed[-1]["step"]
        printed += survivor.steps(until=printed[-1]["step"] + 10)
        survivor.popen.kill()
    assert printed[-1]["loss"] < printed[0]["loss"] / 4
    steps = [each["step"] for each in printed]
    assert steps == sorted(set(steps)), "no step twice"
    # That lighthouse waits 200 ms for a slow group: until the kill, one may be left behind.
    after = [step for step in steps if step >= alone_at]
    assert after == list(range(alone_at, alone_at + len(after))), "every step after the kill"
