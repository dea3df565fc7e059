"""etcd's lease and election calls, over gRPC, which is here anyway: no other client is needed."""

from __future__ import annotations

from typing import Any

import grpc

from torchft_svc.errors import ConfigError
from torchft_svc.proto import etcd_pb2 as pb
from torchft_svc.rpc.address import split_addresses
from torchft_svc.rpc.channel import open_aio_channel

SCHEME = "etcd://"


class Etcd:
    """``url`` is ``etcd://host:port[,host:port...]/prefix``; to be used on one event loop."""

    def __init__(self, url: str) -> None:
        hosts, _, prefix = url.removeprefix(SCHEME).partition("/")
        if not url.startswith(SCHEME) or not prefix:
            raise ConfigError("leader_election", url, f"use {SCHEME}host:2379[,host:2379]/prefix")
        self.addresses = split_addresses(hosts)
        self.prefix = prefix.encode()
        self._channel: grpc.aio.Channel | None = None
        self._next = 0

    async def grant(self, ttl_s: int, timeout_s: float) -> tuple[int, int]:
        """A new lease: its id, and the seconds that it lives."""
        request = pb.LeaseGrantRequest(ttl=ttl_s)
        answer = await self._call("etcdserverpb.Lease/LeaseGrant", request, timeout_s)
        return answer.id, answer.ttl

    async def renew(self, lease: int, timeout_s: float) -> int:
        """The seconds that the lease lives from now on; 0: it is gone."""
        keep_alive = self._open().stream_stream(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=pb.LeaseKeepAliveResponse.FromString,
        )
        requests = iter([pb.LeaseKeepAliveRequest(id=lease)])
        async for answer in keep_alive(requests, timeout=timeout_s):
            return int(answer.ttl)
        return 0

    async def revoke(self, lease: int, timeout_s: float) -> None:
        await self._call(
            "etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest(id=lease), timeout_s
        )

    async def campaign(self, lease: int, value: str) -> None:
        """Wait until this lease leads; that lasts for as long as the lease does."""
        request = pb.CampaignRequest(name=self.prefix, lease=lease, value=value.encode())
        await self._call("v3electionpb.Election/Campaign", request, None)

    async def leader(self, timeout_s: float) -> tuple[int, str]:
        """The lease that leads and what it campaigned with; 0 and nothing if none does."""
        request = pb.LeaderRequest(name=self.prefix)
        try:
            answer = await self._call("v3electionpb.Election/Leader", request, timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNKNOWN:  # that is how it says: no leader
                return 0, ""
            raise
        return answer.kv.lease, answer.kv.value.decode("utf-8", "replace")

    async def go_on(self) -> None:
        """The server in use has failed: use the next one of the list."""
        await self.close()
        self._next = (self._next + 1) % len(self.addresses)

    async def close(self) -> None:
        """May be called twice."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = open_aio_channel(self.addresses[self._next])
        return self._channel

    async def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        answer = type(request).__name__.replace("Request", "Response")
        call = self._open().unary_unary(
            f"/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(pb, answer).FromString,
        )
        return await call(request, timeout=timeout_s)
