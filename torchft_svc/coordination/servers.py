"""Both services inside this process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, TypeVar

from torchft_svc.core.rendezvous import SETTLE_IN_S
from torchft_svc.core.types import DEFAULT_JOB, QuorumConfig
from torchft_svc.lighthouse_server.app import run_lighthouse
from torchft_svc.manager_server.app import run_manager
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.rpc.address import HostPort, parse_address, reachable_host
from torchft_svc.rpc.loop import Background
from torchft_svc.rpc.security import Security, security_or_environment

Self = TypeVar("Self", bound="_Server")


class _Server:
    """A context manager that stops its service."""

    _running: Background[Any]

    def shutdown(self) -> None:
        """Stop serving, in good order; may be called twice."""
        self._running.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class LighthouseServer(_Server):
    """A lighthouse inside this process, for tests and small jobs.

    ``bind`` is ``host:port`` (``:0``: any free port on every interface). Durations are
    milliseconds. ``quorum_tick_ms`` is accepted and has no effect: nothing polls. A group whose
    step stands still for ``hang_timeout_ms`` (None: however long) is reported; it is ended if
    ``on_hang`` is ``kill``, and left out until it asks again if that is ``evict``. A group that
    heals is waited for up to ``heal_timeout_ms`` (None: as for any other, the join timeout).
    ``settle_in_ms``: so long after its first agent it begins no launched run anew (rule L13).
    ``security``: TLS files and token (default: those of the environment).

    Raises:
        AddressError: nothing can be bound there.
        ConfigError: a value that cannot work.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
        *,
        startup_timeout_ms: int | None = None,
        heal_timeout_ms: int | None = None,
        hang_timeout_ms: int | None = None,
        on_hang: Literal["report", "kill", "evict"] = "report",
        settle_in_ms: int = round(SETTLE_IN_S * 1000),
        security: Security | None = None,
    ) -> None:
        told = {
            "join_timeout_s": join_timeout_ms,
            "heartbeat_timeout_s": heartbeat_timeout_ms,
            "startup_timeout_s": startup_timeout_ms,
            "heal_timeout_s": heal_timeout_ms,
            "hang_timeout_s": hang_timeout_ms,
        }
        durations: dict[str, Any] = {
            field: value / 1000 for field, value in told.items() if value is not None
        }
        config = QuorumConfig(min_replicas=min_replicas, on_hang=on_hang, **durations)
        where = parse_address(bind, may_bind=True)
        self._running = Background(
            run_lighthouse(
                config,
                where,
                security_or_environment(security),
                settle_in_s=settle_in_ms / 1000,
            )
        )

    def address(self) -> str:
        """``http://host:port``, to be given to managers."""
        bound = self._running.value
        return f"http://{HostPort(reachable_host(bound), bound.port)}"


class ManagerServer(_Server):
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
