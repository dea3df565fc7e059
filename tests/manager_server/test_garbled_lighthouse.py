"""A lighthouse that answers with garbage is left alone for a moment, and then asked again; one that
does not trust the group is believed."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest
from support.running import (
    Line,
    eventually,
    failure,
    grpc_server,
    line_to,
    manager_process,
    refusing,
    start_manager,
)

from torchft_svc.coordination import ManagerClient
from torchft_svc.errors import RequestRefused
from torchft_svc.proto import torchft_pb2 as pb

GARBAGE = b"\xff" * 9


class Sessions(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The methods of a lighthouse that a manager calls."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def service(self, details: Any) -> Any:
        if details.method.endswith("/Session"):
            return grpc.stream_stream_rpc_method_handler(self._session)
        return None

    def _session(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        raise NotImplementedError


class Garbler(Sessions):
    """Sessions whose first news are garbage: the welcome, or what comes after it."""

    def __init__(self, *first: bytes) -> None:
        super().__init__()
        self._first = first
        self.num_sessions = 0

    def _session(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self.num_sessions += 1
        yield from self._first
        self.goes_on.wait(10)


class Distrustful(Sessions):
    """Refuses every session, after a while."""

    def _session(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self.goes_on.wait(10)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "nobody is known here")
        yield b""


WELCOME = pb.SessionNews(welcome=pb.SessionWelcome()).SerializeToString()


@pytest.mark.processes
@pytest.mark.parametrize("first", [(GARBAGE,), (WELCOME, GARBAGE)], ids=["welcome", "news"])
def test_it_is_asked_again(first: tuple[bytes, ...]) -> None:
    garbler = Garbler(*first)
    with (
        grpc_server(garbler, garbler.goes_on.set) as address,
        manager_process(address, "--connect-timeout-ms=300") as manager,
    ):
        eventually(lambda: garbler.num_sessions >= 3)
        with line_to(manager.address) as line:
            check_failure(line)
        assert "Traceback" not in manager.errors(), manager.errors()


def check_failure(line: Line) -> None:
    """The worker receives the reason instead of waiting."""
    _, reason = failure(line.ask_manager(worker_id="w", timeout_s=20))
    assert "lighthouse" in reason


@pytest.mark.processes
def test_who_asks_before_the_lighthouse_refuses_the_group_is_refused_at_once() -> None:
    distrustful = Distrustful()
    with (
        grpc_server(distrustful, distrustful.goes_on.set) as address,
        manager_process(address, "--connect-timeout-ms=60000") as manager,
        line_to(manager.address) as line,
    ):
        asked = line.ask_manager(worker_id="w", timeout_s=60)
        line.flush()
        distrustful.goes_on.set()
        code, reason = failure(asked)
        assert code is grpc.StatusCode.UNAUTHENTICATED, reason
        assert "nobody is known here" in reason


def test_the_lighthouse_that_does_not_know_a_request_is_named() -> None:
    """The manager is at the second one of its list."""
    old = Garbler(WELCOME)
    with (
        refusing() as nowhere,
        grpc_server(old, old.goes_on.set) as address,
        start_manager(f"{nowhere},{address}") as manager,
        ManagerClient(manager.address(), timedelta(seconds=10)) as client,
        pytest.raises(RequestRefused, match=re.escape(f"the service at {address} is no")),
    ):
        client.members_and_copies(timedelta(seconds=10))
