"""A manager inside this process."""

from __future__ import annotations

from datetime import timedelta

from torchft_svc.coordination.server import Server
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.host.loop import Background
from torchft_svc.manager_server.app import run_manager
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.rpc.security import Security, security_or_environment


class ManagerServer(Server):
    """A replica group's manager inside this process.

    ``replica_id`` is the group's name; its incarnation is added. ``hostname`` is the host under
    which others reach it (empty: the local address of the route to the lighthouse). It shares
    the interpreter lock with the program around it: a long call that holds it delays heartbeats.

    Raises:
        AddressError: ``bind`` or an address cannot be parsed or bound.
        ConfigError: a value that cannot work.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int,
        *,
        job_id: str = DEFAULT_JOB,
        security: Security | None = None,
        min_replicas: int = 0,
    ) -> None:
        config = ManagerConfig(
            lighthouse_address=lighthouse_addr,
            replica_name=replica_id,
            group_world_size=world_size,
            store_address=store_addr,
            bind=bind,
            advertise_host=hostname or None,
            heartbeat_interval_s=heartbeat_interval.total_seconds(),
            connect_timeout_s=connect_timeout.total_seconds(),
            quorum_retries=quorum_retries,
            job_id=job_id,
            security=security_or_environment(security),
            min_replicas=min_replicas,
        )
        self._running = Background(run_manager(config))

    @classmethod
    def configured(cls, config: ManagerConfig) -> ManagerServer:
        """A manager with this ``config``."""
        server = cls.__new__(cls)
        server._running = Background(run_manager(config))
        return server

    def address(self) -> str:
        """``http://host:port``, to be given to the group's workers."""
        return f"http://{self._running.value.address}"
