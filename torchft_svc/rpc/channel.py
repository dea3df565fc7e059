"""Channels to a service: own connections, fast reconnects, bounded messages."""

from __future__ import annotations

import grpc

from torchft_svc.core.quorum.types import MAX_QUORUM_BYTES
from torchft_svc.core.route import MAX_PAUSE_S, MIN_PAUSE_S
from torchft_svc.host.address import parse_address
from torchft_svc.rpc.security import PLAIN, Security
from torchft_svc.rpc.tls import TlsFiles

# A quorum of 10,000 groups takes about 2 MB; what is larger than a lighthouse can be set to allow,
# and a few numbers, is not an answer of ours.
MAX_ANSWER_BYTES = MAX_QUORUM_BYTES + 1024
# A connection may take so long: several round trips to another continent, or to a busy machine.
# With a longer limit, a lighthouse whose packets were lost stays unused for longer when it is back.
MAX_CONNECTING_MS = 1000

# A host that vanishes closes nothing: a sign of life is asked for after so long, and waited for as
# long again.
KEEPALIVE_MS = 5_000
# The same for a lighthouse where there is another one to go to.
IMPATIENT_KEEPALIVE_MS = 2_000
# The same, both ways, between a lighthouse and those who beat: their heartbeats show who is gone,
# and a thousand pings cost it half as much as as many heartbeats.
BEATING_KEEPALIVE_MS = 20_000


def keepalive_of_beating_ms(num_lighthouses: int) -> int:
    """The keepalive of a manager's or agent's channel to one of its lighthouses."""
    return BEATING_KEEPALIVE_MS if num_lighthouses == 1 else IMPATIENT_KEEPALIVE_MS


def keepalive(interval_ms: int = KEEPALIVE_MS) -> tuple[tuple[str, int], ...]:
    """A silent connection is asked for a sign of life after ``interval_ms``, and given up after as
    long again, but at most `KEEPALIVE_MS`; so it is if it does not confirm what was sent.

    gRPC answers for a process that runs, even if a long call holds its interpreter lock.
    """
    patience_ms = min(interval_ms, KEEPALIVE_MS)
    return (
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", patience_ms),
        # That alone ends nothing while the peer's system confirms what the frozen process never
        # reads; this does, and its default is a minute.
        ("grpc.http2.ping_timeout_ms", patience_ms),
        # By default gRPC stops pinging after two pings without data.
        ("grpc.http2.max_pings_without_data", 0),
    )


# In spite of its name this is the deadline of an attempt, not a pause.
_CONNECTING = "grpc.min_reconnect_backoff_ms"
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", int(1000 * MIN_PAUSE_S)),
    ("grpc.max_reconnect_backoff_ms", int(1000 * MAX_PAUSE_S)),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # Two channels in one process must not share a connection, or one's failure is the other's.
    ("grpc.use_local_subchannel_pool", 1),
    # Training clusters are often behind proxies that only know the way out.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(
    address: str,
    security: Security = PLAIN,
    keepalive_ms: int = KEEPALIVE_MS,
    connecting_ms: int = MAX_CONNECTING_MS,
) -> grpc.Channel:
    """A blocking channel, for the trainer's side; connects when it is first used. A silent peer is
    given up as `keepalive` says, and an attempt to connect after ``connecting_ms``.

    The calls over it have to carry ``security.metadata``.
    """
    options = (*keepalive(keepalive_ms), *_OPTIONS, (_CONNECTING, connecting_ms))
    target, credentials = parse_address(address).target, security.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


def open_aio_channel(
    address: str, security: TlsFiles = PLAIN, keepalive_ms: int = KEEPALIVE_MS
) -> grpc.aio.Channel:
    """A channel for the services' event loop; otherwise as `open_channel`."""
    options = (*keepalive(keepalive_ms), *_OPTIONS, (_CONNECTING, MAX_CONNECTING_MS))
    target, credentials = parse_address(address).target, security.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)
