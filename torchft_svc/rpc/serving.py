"""Runs one gRPC service with health checking and reflection on an address (rule S6)."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from torchft_svc.errors import AddressError
from torchft_svc.host.address import HostPort
from torchft_svc.proto import torchft_pb2
from torchft_svc.rpc.calls import Calls
from torchft_svc.rpc.channel import KEEPALIVE_MS, keepalive
from torchft_svc.rpc.guard import Refusals, TokenGuard
from torchft_svc.rpc.health import ALWAYS_READY, HEALTH_NAME, Health, Readiness
from torchft_svc.rpc.parsing import parser, refusing_garbage, refusing_garbage_in_stream
from torchft_svc.rpc.security import PLAIN, Security
from torchft_svc.rpc.status import Handler, answering_errors
from torchft_svc.rpc.upkeep import UPKEEP
from torchft_svc.telemetry.rpc_errors import RpcErrors

log = logging.getLogger(__name__)

# The largest request is a quorum request: a few addresses, and at most 16 KB of `data`.
MAX_REQUEST_BYTES = 256 * 1024
# Calls under way on one connection; a manager has two, a proxy in between opens more connections.
# Beyond 1000 new calls in all, gRPC drops some at random, the training's too: who opens calls and
# resets them at once must not come near that by himself.
MAX_CALLS_PER_CONNECTION = 256
# A stop lets calls that are about to be answered go out, and no more than that.
GRACE_S = 0.5

_OPTIONS = (
    # Without this a second server on the port would silently get half of the connections.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    # Estimating the bandwidth costs pings, and these messages are small.
    ("grpc.http2.bdp_probe", 0),
    # Clients ask for signs of life as often as they like.
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What a server bears with before it hangs up, in milliseconds.

    The streams of a caller that is frozen, or whose host vanished without a word, are ended as
    `keepalive` says; a connection without a call, after once to twice ``idle_ms``.
    """

    # A connection is greeted within milliseconds; a silent one must not keep its descriptor.
    handshake_ms: int = 10_000
    # Managers and workers have a stream open all the time; whoever asks rarely connects again.
    idle_ms: int = 60_000
    keepalive_ms: int = KEEPALIVE_MS

    def options(self) -> tuple[tuple[str, int], ...]:
        """The options of a gRPC server."""
        return (
            ("grpc.server_handshake_timeout_ms", self.handshake_ms),
            ("grpc.max_connection_idle_ms", self.idle_ms),
            *keepalive(self.keepalive_ms),
        )


USUAL = Patience()


@dataclass(frozen=True, slots=True)
class Service:
    """A service of torchft.proto: its short name, and a handler for each method.

    A handler takes the parsed request and returns the serialized answer; a stream's handler takes
    the iterator of requests, and writes serialized answers to the context. While it is not ready
    all requests are refused, and the health protocol says so.
    """

    name: str
    handlers: Mapping[str, Handler]
    streams: Mapping[str, Handler] = field(default_factory=dict)
    readiness: Readiness = ALWAYS_READY

    @property
    def full_name(self) -> str:
        return f"torchft.{self.name}"

    def generic_handler(
        self, calls: Calls, refusals: Refusals, errors: RpcErrors
    ) -> grpc.GenericRpcHandler[Any, Any]:
        methods = torchft_pb2.DESCRIPTOR.services_by_name[self.name].methods_by_name
        missing = methods.keys() - self.handlers.keys() - self.streams.keys()
        assert not missing, f"no handler for {missing}"
        errors.know_methods(methods)
        kinds = (
            (self.handlers, grpc.unary_unary_rpc_method_handler, refusing_garbage, calls.known),
            (
                self.streams,
                grpc.stream_stream_rpc_method_handler,
                refusing_garbage_in_stream,
                lambda handler: calls.known(UPKEEP.counting(handler)),
            ),
        )
        return grpc.method_handlers_generic_handler(
            self.full_name,
            {
                method: make_handler(
                    counted(
                        answering_errors(
                            self._if_ready(checked(handler)),
                            _refusal_logger(refusals, f"/{self.full_name}/{method}"),
                            functools.partial(errors.count, method),
                        )
                    ),
                    request_deserializer=parser(
                        getattr(torchft_pb2, methods[method].input_type.name)
                    ),
                    response_serializer=_as_is,
                )
                for handlers, make_handler, checked, counted in kinds
                for method, handler in handlers.items()
            },
        )

    def _if_ready(self, handler: Handler) -> Handler:
        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
            self.readiness.check()
            return await handler(request, context)

        return answer


def _as_is(answer: bytes) -> bytes:
    return answer


def _refusal_logger(refusals: Refusals, method: str) -> Callable[[str, str], None]:
    return lambda peer, reason: refusals.log_refusal(peer, method, reason)


class _Unknown(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in stubs only
    """Logs calls of methods that no other handler has: gRPC refuses them without a log line."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        name = str(handler_call_details.method)[:100]
        self._refusals.log_refusal("a caller", "an unknown method", f"there is no {name!r} here")


@contextlib.asynccontextmanager
async def serve(
    build: Callable[[HostPort], Service],
    bind: HostPort,
    security: Security = PLAIN,
    patience: Patience = USUAL,
    errors: RpcErrors | None = None,
) -> AsyncIterator[HostPort]:
    """Serve until the block is left; gives the address with the port that was really bound.

    ``build`` makes the service once that address is known; ``errors`` counts its answers that are
    errors.

    Raises:
        AddressError: nothing can be bound there (port in use, not an address of this machine, ...).
        ConfigError: a file of ``security`` is gone, or it has a CA and no certificate.
    """
    _check_bindable(bind)
    credentials = security.server_credentials()
    refusals, errors = Refusals(), RpcErrors() if errors is None else errors
    guards = () if security.token is None else (TokenGuard(security, refusals, errors),)
    if security.token is not None and credentials is None:
        log.warning("the token travels unencrypted: set TORCHFT_TLS_CERT and TORCHFT_TLS_KEY")
    options = (*_OPTIONS, *patience.options())
    server = grpc.aio.server(options=options, interceptors=guards)
    try:
        if credentials is None:
            port = server.add_insecure_port(bind.target)
        else:
            port = server.add_secure_port(bind.target, credentials)
    except RuntimeError as error:
        raise AddressError(str(bind), f"cannot be bound: {error}") from None
    bound = HostPort(bind.host, port)
    service = build(bound)
    calls = Calls()
    server.add_generic_rpc_handlers((service.generic_handler(calls, refusals, errors),))
    health = Health(service.full_name, service.readiness)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (service.full_name, HEALTH_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    server.add_generic_rpc_handlers((_Unknown(refusals),))
    await server.start()
    try:
        yield bound
    finally:
        health.stop()
        calls.stop()
        await server.stop(GRACE_S)


def _check_bindable(bind: HostPort) -> None:
    """Try the address with a plain socket first: its error says what is wrong, gRPC's does not."""
    host = bind.host or None
    try:
        found = socket.getaddrinfo(
            host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise AddressError(str(bind), f"cannot be resolved: {error.strerror}") from None
    family, kind, proto, _, where = found[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
            # Binding next to a listener succeeds with SO_REUSEADDR on some systems; this does not.
            probe.listen(1)
        except OSError as error:
            raise AddressError(str(bind), f"cannot be bound: {error.strerror}") from None
