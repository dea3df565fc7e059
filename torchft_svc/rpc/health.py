"""The gRPC health protocol: does the process live, and is its service ready (rule F5)?"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchft_svc.errors import TorchFTError

# Health needs no token, and each watcher costs some 10 KB: a load balancer has a few.
MAX_WATCHERS = 1000

HEALTH_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
Response = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[Any, Any]


class Readiness(Protocol):
    """Whether a service takes requests now."""

    def check(self) -> None:
        """Raise the `TorchFTError` for callers, if the service takes no requests."""

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` whenever the answer of `check` changes."""


class _AlwaysReady:
    """The readiness of a service that takes requests for as long as it runs."""

    def check(self) -> None:
        """Return, as the service is always ready."""

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Do nothing, as readiness never changes."""


ALWAYS_READY = _AlwaysReady()


class _Watcher:
    """One call; ``peer`` is gRPC's name for its connection."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.host = peer.rpartition(":")[0]
        self.changed = asyncio.Event()
        self.is_evicted = False


async def _write(context: Context, response: Any) -> None:
    try:
        await context.write(response)
    except Exception as error:  # whatever gRPC calls it, the watcher has gone
        raise asyncio.CancelledError from error


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped
    """The empty name stands for the process, which serves until `stop`; ``service`` serves while it
    is ready. To be used on one event loop.

    The library's own servicer forgets all watchers of a name when one of them leaves, keeps any
    number of them, and has no reason for an unknown name: none of its methods can stay.
    """

    def __init__(self, service: str, readiness: Readiness) -> None:
        self._service = service
        self._readiness = readiness
        self._stopping = False
        self._watchers: dict[_Watcher, None] = {}  # the oldest first
        readiness.subscribe(self._notify_watchers)

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802 - gRPC's name
        status = self._status(request.service)
        if status == Response.SERVICE_UNKNOWN:
            known = f"the process, {''!r}, and its service, {self._service!r}, are known"
            await context.abort(grpc.StatusCode.NOT_FOUND, known)
        return Response(status=status)

    async def Watch(self, request: Any, context: Context) -> None:  # noqa: N802 - gRPC's name
        watcher = _Watcher(context.peer())
        if len(self._watchers) >= MAX_WATCHERS:
            self._make_room()
        self._watchers[watcher] = None
        sent = None
        try:
            while not watcher.is_evicted:
                watcher.changed.clear()
                status = self._status(request.service)
                if status != sent:
                    await _write(context, Response(status=status))
                    sent = status
                if self._stopping:
                    return
                await watcher.changed.wait()
        finally:
            self._watchers.pop(watcher, None)
        reason = f"{MAX_WATCHERS} others watch this service, and many of them are yours"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    def _make_room(self) -> None:
        """Evict the oldest watcher of the busiest connection of the host with the most watchers.

        Whoever watches a thousand times must not keep out those that watch once.
        """
        of_hosts = Counter(each.host for each in self._watchers)
        of_peers = Counter(each.peer for each in self._watchers)
        # The first of several is the oldest.
        last = max(self._watchers, key=lambda each: (of_hosts[each.host], of_peers[each.peer]))
        del self._watchers[last]
        last.is_evicted = True
        last.changed.set()

    def stop(self) -> None:
        """Report from now on that nothing is served, to all watchers, too."""
        self._stopping = True
        self._notify_watchers()

    def _notify_watchers(self) -> None:
        for watcher in self._watchers:
            watcher.changed.set()

    def _status(self, name: str) -> Any:
        if name not in ("", self._service):
            return Response.SERVICE_UNKNOWN
        if self._stopping:
            return Response.NOT_SERVING
        if name:
            try:
                self._readiness.check()
            except TorchFTError:
                return Response.NOT_SERVING
        return Response.SERVING
