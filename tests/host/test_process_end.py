"""Tests how the end of another process is noticed, with and without process descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torchft_svc.host.process_end import ProcessEnd, lives

pytestmark = pytest.mark.processes

WAIT_S = 20.0


@pytest.fixture(params=["descriptor", "none"])
def sleeper(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps, on a system that has process descriptors or has none."""
    if request.param == "none":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("this system has no process descriptors")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_an_end_is_noticed(sleeper: subprocess.Popen[bytes]) -> None:
    end = ProcessEnd(sleeper.pid)
    assert not end.has_ended()
    assert not end.wait(0.05)
    sleeper.kill()
    if end.descriptor is None:  # a process that nobody has waited for still has its number
        sleeper.wait()
    assert end.wait(WAIT_S)
    assert end.has_ended()
    sleeper.wait()
    end.close()
    end.close()
    assert end.descriptor is None


def test_a_process_that_is_gone_has_ended(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    assert not lives(sleeper.pid)
    end = ProcessEnd(sleeper.pid)
    assert end.descriptor is None
    assert end.has_ended()
    assert end.wait()
