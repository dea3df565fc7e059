"""What both clients are: blocking calls with deadlines, and errors in our words."""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import grpc

from torchft_svc.core.limits import check_name, limited_s
from torchft_svc.errors import ConfigError, RequestRefused, Unreachable
from torchft_svc.host.address import parse_address
from torchft_svc.rpc.caller import Caller
from torchft_svc.rpc.channel import KEEPALIVE_MS, MAX_CONNECTING_MS, open_channel
from torchft_svc.rpc.codec import JOB_KEY
from torchft_svc.rpc.descriptors import limit_error, shortage
from torchft_svc.rpc.security import Security, security_or_environment
from torchft_svc.rpc.status import came_early, to_error

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Self = TypeVar("Self", bound="Client")

# A service that starts is asked again after so long.
RETRY_S = 0.05

_SERVICES = {"lighthouse": "LighthouseService", "manager": "ManagerService"}


class Client:
    """A blocking client of one service: calls with deadlines, errors in our words."""

    def __init__(
        self,
        peer: str,
        addr: str,
        connect_timeout: timedelta,
        job_id: str,
        security: Security | None,
        keepalive_ms: int = KEEPALIVE_MS,
    ) -> None:
        _check_job(job_id)
        security = security_or_environment(security)
        self._peer = peer
        self._addr = addr
        self._connect_timeout_s = limited_s(connect_timeout)
        self._metadata = ((JOB_KEY, job_id), *security.metadata)
        self.security = security
        self._keepalive_ms = keepalive_ms
        self._caller = Caller()
        self._channel = self._open(addr)
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Cancel what is under way and close the connection; may be called twice."""
        with self._lock:
            self._closed = True
            self._caller.call(self._channel.close)
            self._caller.close()

    def _open(self, addr: str) -> grpc.Channel:
        return self._caller.call(lambda: open_channel(addr, self.security, self._keepalive_ms))

    def _move(self, addr: str) -> None:
        """Go on at ``addr``; calls that are under way elsewhere fail as `Unreachable`."""
        with self._lock:
            if self._closed or addr == self._addr:
                return
            left = self._channel
            self._channel = self._open(addr)
            self._addr = addr
        log.warning("the %s is at %s now", self._peer, addr)
        self._caller.call(left.close)

    def _lost_contact(self) -> None:
        """A call could not reach the service."""

    def _use_next_address(self, failed: str, leader: str = "") -> bool:
        """Use another address, because ``failed`` does not answer or names the ``leader``.

        False: there is none that has not been tried.
        """
        return False

    def _connect(self) -> None:
        """Find out now whether somebody listens; gRPC's own way to ask takes 0.2 s to end."""
        timeout_s = self._connect_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            addr, where = self._addr, parse_address(self._addr)
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                socket.create_connection(
                    (where.host, where.port), min(left_s, MAX_CONNECTING_MS / 1000)
                ).close()
                return
            except OSError as error:
                if reason := shortage():
                    self.close()
                    raise limit_error(reason) from None
                if time.monotonic() + RETRY_S > deadline:
                    self.close()
                    reason = f"no connection within {timeout_s:g} s ({error})"
                    raise Unreachable(self._peer, addr, reason) from None
            if not self._use_next_address(addr):
                time.sleep(RETRY_S)

    def _method(self, name: str, answer: Callable[[bytes], Answer]) -> Callable[..., Answer]:
        path = f"/torchft.{_SERVICES[self._peer]}/{name}"

        @functools.lru_cache(maxsize=1)
        def method_of(channel: grpc.Channel) -> Callable[..., Answer]:
            method: Callable[..., Answer] = channel.unary_unary(
                path, request_serializer=_serialize, response_deserializer=answer
            )
            return method

        method_of(self._channel)  # now, not when the first call is in a hurry

        def invoke(request: Any, timeout: timedelta) -> Answer:
            channel, addr, timeout_s = self._channel, self._addr, limited_s(timeout)
            deadline = time.monotonic() + timeout_s
            try:
                return self._call(method_of(channel), request, deadline)
            except ValueError:  # that is how gRPC says that the channel is closed
                if self._closed:
                    raise RequestRefused(f"this client is closed: {self._peer}") from None
                if channel is self._channel:
                    raise
                raise Unreachable(self._peer, addr, "it is elsewhere now") from None
            except grpc.RpcError as error:
                failure = to_error(
                    error,
                    peer=self._peer,
                    address=addr,
                    action=f"{self._peer}'s {name}",
                    timeout_s=timeout_s,
                )
            if isinstance(failure, Unreachable) and failure.peer == self._peer:
                self._lost_contact()
            raise failure

        return invoke

    def _call(self, method: Callable[..., Answer], request: Any, deadline: float) -> Answer:
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                if not self._caller.hands_calls_over:
                    return method(request, timeout=left_s, metadata=self._metadata)
                call: _CancellableCall[Answer] = _CancellableCall(
                    method, request, left_s, self._metadata
                )
                return self._caller.call(call.run, call.cancel)
            except grpc.RpcError as error:
                if not came_early(error, deadline - time.monotonic()):
                    raise

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _CancellableCall(Generic[Answer]):
    """One call of ``method`` that another thread can cancel, so that a vote is withdrawn."""

    def __init__(self, method: Any, request: Any, timeout_s: float, metadata: Any) -> None:
        self._start = functools.partial(
            method.future, request, timeout=timeout_s, metadata=metadata
        )
        self._lock = threading.Lock()
        self._future: Any = None
        self._is_cancelled = False

    def run(self) -> Answer:
        """Wait for the answer; raises what the call raises."""
        with self._lock:
            if self._is_cancelled:
                raise RequestRefused("the call was interrupted before it began")
            self._future = self._start()
        answer: Answer = self._future.result()
        return answer

    def cancel(self) -> None:
        """End the call; the service learns that nobody waits for its answer."""
        with self._lock:
            self._is_cancelled = True
            if self._future is not None:
                self._future.cancel()


def _check_job(job_id: str) -> None:
    """Raise `ConfigError` for a name that cannot travel as the metadata of a call."""
    try:
        check_name("job_id", job_id)
    except RequestRefused as error:
        raise ConfigError("job_id", job_id[:40], str(error)) from None
    if not job_id.isascii():
        raise ConfigError("job_id", job_id, "use ASCII characters")


def _serialize(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
