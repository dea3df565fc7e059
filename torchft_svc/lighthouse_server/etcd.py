"""etcd's lease and election calls, over gRPC, which is here anyway: no other client is needed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from torchft_svc.core.limits import one_line
from torchft_svc.errors import TorchFTError, Unauthorized, Unreachable
from torchft_svc.lighthouse_server.etcd_access import PASSWORD_NAME, USER_NAME, EtcdAccess
from torchft_svc.proto import etcd_pb2 as pb
from torchft_svc.rpc.channel import open_aio_channel
from torchft_svc.rpc.tls_reasons import closing_hint, tls_reason

log = logging.getLogger(__name__)

# etcd compares passwords slowly on purpose, some 0.1 s on an idle machine: a call that has to sign
# in first gets at least so long for that.
SIGN_IN_TIMEOUT_S = 1.0

# What etcd says; the calls of its election have no other status than UNKNOWN.
_NO_LEADER = "election: no leader"
_NO_USERS = "authentication is not enabled"
# The token was forgotten, which it is when it is not used or when users change; or there was none
# when users were not asked for their passwords yet.
_STALE = ("invalid auth token", "revision of auth store is old", "user name is empty")
_REFUSALS = (
    (
        "authentication failed",
        f"it does not accept {{user}} with this password: set {USER_NAME} and {PASSWORD_NAME}",
    ),
    ("user name is empty", f"it requires a user: set {USER_NAME} and {PASSWORD_NAME}"),
    (
        "permission denied",
        "{user} may not do that: grant it a role that reads and writes the keys below {prefix!r}",
    ),
)

Metadata = tuple[tuple[str, str], ...]
T = TypeVar("T")


class Etcd:
    """A client of the servers in ``access``, one at a time. To be used on one event loop.

    Every call raises `Unreachable` where this server does not answer or cannot do it, and
    `Unauthorized` where it and this lighthouse do not trust each other.
    """

    def __init__(self, access: EtcdAccess) -> None:
        self._access = access
        self._channel: grpc.aio.Channel | None = None
        self._next = 0
        self._token: Metadata | None = None  # None: not signed in
        if access.password is not None and not access.dials_tls:
            log.warning("the password for etcd travels unencrypted: use etcds://")

    @property
    def address(self) -> str:
        """The address of the server in use."""
        return self._access.addresses[self._next]

    async def grant(self, ttl_s: int, timeout_s: float) -> tuple[int, int]:
        """A new lease: its id, and the seconds that it lives."""
        request = pb.LeaseGrantRequest(ttl=ttl_s)
        answer = await self._call("etcdserverpb.Lease/LeaseGrant", request, timeout_s)
        return answer.id, answer.ttl

    async def renew(self, lease: int, timeout_s: float) -> int:
        """The seconds that the lease lives from now on; 0: it is gone."""

        async def keep_alive(metadata: Metadata) -> int:
            method = self._open().stream_stream(
                "/etcdserverpb.Lease/LeaseKeepAlive",
                request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
                response_deserializer=pb.LeaseKeepAliveResponse.FromString,
            )
            requests = iter([pb.LeaseKeepAliveRequest(id=lease)])
            async for answer in method(requests, timeout=timeout_s, metadata=metadata):
                return int(answer.ttl)
            return 0

        return await self._as_user(keep_alive, timeout_s)

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """Give the lease up."""
        await self._call(
            "etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest(id=lease), timeout_s
        )

    async def campaign(self, lease: int, value: str) -> None:
        """Wait until this lease leads; that lasts for as long as the lease does."""
        request = pb.CampaignRequest(
            name=self._access.prefix.encode(), lease=lease, value=value.encode()
        )
        await self._call("v3electionpb.Election/Campaign", request, None)

    async def leader(self, timeout_s: float) -> tuple[int, str]:
        """The lease that leads and what it campaigned with; 0 and nothing if none does."""
        request = pb.LeaderRequest(name=self._access.prefix.encode())

        async def ask(metadata: Metadata) -> pb.LeaderResponse:
            answer = pb.LeaderResponse()
            try:
                answer = await self._invoke(
                    "v3electionpb.Election/Leader", request, timeout_s, metadata
                )
            except grpc.aio.AioRpcError as error:
                if error.details() != _NO_LEADER:
                    raise
            return answer

        answer = await self._as_user(ask, timeout_s)
        return answer.kv.lease, answer.kv.value.decode("utf-8", "replace")

    async def use_next_server(self) -> None:
        """Use the next server of the list: the present one has failed."""
        await self.close()
        self._next = (self._next + 1) % len(self._access.addresses)

    async def close(self) -> None:
        """Close the connection; may be called twice."""
        channel, self._channel = self._channel, None
        self._token = None  # each server forgets those that are not used at itself
        if channel is not None:
            await channel.close(grace=None)

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = open_aio_channel(self.address, self._access)
        return self._channel

    async def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        return await self._as_user(
            lambda metadata: self._invoke(method, request, timeout_s, metadata), timeout_s
        )

    async def _invoke(
        self, method: str, request: Any, timeout_s: float | None, metadata: Metadata
    ) -> Any:
        answer = type(request).__name__.replace("Request", "Response")
        call = self._open().unary_unary(
            f"/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(pb, answer).FromString,
        )
        return await call(request, timeout=timeout_s, metadata=metadata)

    async def _as_user(
        self, call: Callable[[Metadata], Awaitable[T]], timeout_s: float | None
    ) -> T:
        """Return what ``call`` returns; made once more if the token that it had is stale."""
        try:
            if self._token is not None:
                try:
                    return await call(self._token)
                except grpc.aio.AioRpcError as error:
                    if not any(sign in (error.details() or "") for sign in _STALE):
                        raise
            self._token = await self._sign_in(max(timeout_s or 0.0, SIGN_IN_TIMEOUT_S))
            return await call(self._token)
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error) from None

    async def _sign_in(self, timeout_s: float) -> Metadata:
        if self._access.user is None:
            return ()
        request = pb.AuthenticateRequest(name=self._access.user, password=self._access.password)
        method = "etcdserverpb.Auth/Authenticate"
        try:
            answer = await self._invoke(method, request, timeout_s, ())
        except grpc.aio.AioRpcError as error:
            if _NO_USERS in (error.details() or ""):
                return ()  # it may be switched on later
            raise
        return (("token", answer.token),)

    def _to_error(self, error: grpc.aio.AioRpcError) -> TorchFTError:
        details = one_line(error.details() or "")
        user = self._access.user
        who = "the user that the certificate names" if user is None else f"user {user!r}"
        refusal = tls_reason(details, self._access.setting)
        for sign, sentence in _REFUSALS:
            if sign in details:
                refusal = sentence.format(user=who, prefix=f"{self._access.prefix}/")
        if refusal is not None:
            return Unauthorized(f"etcd at {self.address}: {refusal}")
        hint = closing_hint(details, self._access.setting)
        if hint and not self._access.dials_tls:
            hint = " (it closes the connection at once: it may require TLS; use etcds://)"
        return Unreachable("etcd", self.address, f"{error.code().name}: {details}{hint}")
