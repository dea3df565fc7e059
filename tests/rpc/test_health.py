"""Tests who may watch a service's health: anybody, and nobody so often that others cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.running import failure

from torchft_svc.coordination import LighthouseServer
from torchft_svc.rpc import health
from torchft_svc.rpc.channel import open_channel

LIMIT = 20
SERVING = health_pb2.HealthCheckResponse.SERVING


class Watchers:
    """The watchers of one connection."""

    def __init__(self, address: str, count: int) -> None:
        self._channel = open_channel(address)
        stub = health_pb2_grpc.HealthStub(self._channel)
        self.calls = []
        for _ in range(count):  # one after the other: the server may receive them in any order
            self.calls.append(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60))
            assert next(self.calls[-1]).status == SERVING

    def num_left(self) -> int:
        return sum(not call.done() for call in self.calls)

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(health, "MAX_WATCHERS", LIMIT)
    with LighthouseServer(":0", min_replicas=1) as server:
        yield server.address().rpartition(":")[2]


def test_a_host_with_many_connections_keeps_no_other_one_out(port: str) -> None:
    """However few watchers each of them has."""
    honest = Watchers(f"[::1]:{port}", LIMIT // 4)
    greedy = [Watchers(f"127.0.0.1:{port}", LIMIT // 10) for _ in range(LIMIT)]
    assert honest.num_left() == LIMIT // 4
    for each in (honest, *greedy):
        each.close()


def test_many_watchers_keep_nobody_out(port: str) -> None:
    address = f"127.0.0.1:{port}"
    honest = Watchers(address, 1)
    greedy = [Watchers(address, LIMIT - 1), Watchers(address, LIMIT), Watchers(address, LIMIT)]
    late = Watchers(address, 1)
    assert honest.num_left() == late.num_left() == 1
    code, reason = failure(_Ended(greedy[0].calls[0]))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason == f"{LIMIT} others watch this service, and many of them are yours"
    for each in (honest, late, *greedy):
        each.close()


class _Ended:
    """A stream, as `failure` asks a call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def exception(self, timeout: float) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            list(self._call)
        return caught.value
