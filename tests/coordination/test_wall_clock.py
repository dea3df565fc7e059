"""A wall clock jumps ahead while a call begins: to gRPC the call is over, to nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from support.running import Line, line_to, members

from torchft_svc.coordination import LighthouseClient, LighthouseServer

HOUR_S = 3600.0


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=2) as server:
        yield server


@pytest.fixture
def line(lighthouse: LighthouseServer) -> Iterator[Line]:
    with line_to(lighthouse.address()) as line:
        yield line


def test_before_the_caller_has_handed_its_call_over(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    showed_before, true_time = [time.time() - HOUR_S], time.time

    def show() -> float:
        is_caller = threading.current_thread().name == "torchft-call"
        return showed_before.pop() if is_caller and showed_before else true_time()

    with LighthouseClient(lighthouse.address(), timedelta(seconds=20)) as client:
        monkeypatch.setattr(time, "time", show)
        assert client.status() == []
    assert not showed_before


def test_before_the_service_has_looked_at_it(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    true_time, caller = time.time, threading.get_ident()

    def show() -> float:
        return true_time() + (0 if threading.get_ident() == caller else HOUR_S)

    monkeypatch.setattr(time, "time", show)
    first = line.quorum("a:1")
    line.await_askers("a:1")
    assert members(line.quorum("b:1").result()) == ["a:1", "b:1"]
    assert members(first.result()) == ["a:1", "b:1"]
