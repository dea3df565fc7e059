"""Runs on Ray in network namespaces of this machine: a node is cut off, the autoscaler adds one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
from support.running import TESTS, environment, eventually

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.timeout(400)]

HOSTS = ("10.213.7.1", "10.213.7.2")
_IP_S = 10.0
_RUN_S = 300.0


def ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_IP_S)
    return done.stdout


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two, with a link between them; all of their processes are ended."""
    pytest.importorskip("ray")
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"cut-{os.getpid()}-{index}" for index in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        near, far = ("cut", "netns", names[0]), ("cut", "netns", names[1])
        ip("link", "add", *near, "type", "veth", "peer", *far)
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "cut")
            for device in ("lo", "cut"):
                ip("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        end(names)
        pytest.skip(f"no network namespaces here: {error.stderr}")
    yield names
    end(names)


def end(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(subprocess.CalledProcessError):
            eventually(lambda name=name: not killed(name))
            ip("netns", "delete", name)


def killed(name: str) -> list[str]:
    """The processes of a namespace; each has got a SIGKILL."""
    found = ip("netns", "pids", name).split()
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return found


def run(namespace: str, module: str, *arguments: str) -> list[str]:
    """The lines that a program prints in a namespace."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        variables = environment(
            PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)]),
            RAY_AUTH_MODE="disabled",
            RAY_TMPDIR=folder,  # where Ray notes its address for others; paths of sockets are short
            RAY_USAGE_STATS_ENABLED="0",
        )
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=_RUN_S, check=False
        )
    words = ("incident", "retries", "workers")
    lines = [line for line in done.stdout.splitlines() if line.startswith(words)]
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    print(done.stderr[-4000:])  # what the trainer says of it, if the test fails
    return lines


def test_the_run_goes_on_without_the_node_and_grows_when_it_is_back(namespaces: list[str]) -> None:
    lines = run(namespaces[0], "support.cut_off", *namespaces, *HOSTS)
    assert lines == ["incident restart peer 1 0", "incident growth peer 2 0", "retries 1"]


def test_the_autoscaler_makes_room_for_a_missing_worker(namespaces: list[str]) -> None:
    """Run in a namespace, because its head has an address that others may use, too."""
    lines = run(namespaces[0], "support.autoscaled")
    assert lines == ["incident growth peer 2 0", "workers 2 retries 0"]
