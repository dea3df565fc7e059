"""Tests a manager's question which groups train, where its connection ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from torchft_svc.errors import Unreachable
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.job_members import members_of_job


def test_a_connection_that_was_just_closed_is_a_lighthouse_that_cannot_be_reached() -> None:
    config = ManagerConfig(
        lighthouse_address="127.0.0.1:1",
        replica_name="a",
        group_world_size=1,
        store_address="127.0.0.1:2",
    )

    async def ask() -> None:
        channel = grpc.aio.insecure_channel("127.0.0.1:1")
        await channel.close()
        await members_of_job(channel, "127.0.0.1:1", config, 5.0)

    with pytest.raises(Unreachable, match="the connection was closed"):
        asyncio.run(ask())
