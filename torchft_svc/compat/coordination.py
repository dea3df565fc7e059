"""`torchft.coordination`: clients of both services, and both services in this process."""

from __future__ import annotations

from collections.abc import Hashable
from datetime import timedelta

from torchft_svc import coordination as native
from torchft_svc.compat.errors import public_errors
from torchft_svc.coordination import Quorum, QuorumMember, QuorumResult, Timestamp

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "Timestamp",
]

# The default of the public release's server in a process; its program's is a minute.
_JOIN_TIMEOUT_MS = 100
# Steps are so much faster here that a group would be far ahead of one that starts together with it.
_STARTUP_WAIT_MS = 500


class LighthouseServer(native.LighthouseServer):
    """A lighthouse in this process.

    By default it waits 0.1 s for groups that are late, and at the very first 0.5 s for groups that
    are started together.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        with public_errors():
            super().__init__(
                bind,
                min_replicas,
                _JOIN_TIMEOUT_MS if join_timeout_ms is None else join_timeout_ms,
                quorum_tick_ms,
                heartbeat_timeout_ms,
                startup_wait_ms=_STARTUP_WAIT_MS if join_timeout_ms is None else 0,
            )


class LighthouseClient(native.LighthouseClient):
    """Asks a lighthouse; raises RuntimeError, or TimeoutError after a timeout."""

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        with public_errors():
            super().__init__(addr, connect_timeout)

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: dict[Hashable, object] | None = None,
    ) -> Quorum:
        """Wait for a quorum that contains this group."""
        with public_errors():
            return super().quorum(
                replica_id, timeout, address, store_address, step, world_size, shrink_only, data
            )

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Report that the group is alive."""
        with public_errors():
            super().heartbeat(replica_id, timeout)


class ManagerServer(native.ManagerServer):
    """A group's manager in this process."""

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
    ) -> None:
        with public_errors():
            super().__init__(
                replica_id,
                lighthouse_addr,
                hostname,
                bind,
                store_addr,
                world_size,
                heartbeat_interval,
                connect_timeout,
                quorum_retries,
            )


class ManagerClient(native.ManagerClient):
    """Asks a manager; raises RuntimeError, or TimeoutError after a timeout."""

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        with public_errors():
            super().__init__(addr, connect_timeout)

    def _quorum(  # type: ignore[override]  # the order of the nightly
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        init_sync: bool,
        commit_failures: int,
        timeout: timedelta,
        reconfigure_handle: str = "",
    ) -> QuorumResult:
        """Wait until every worker of the group has asked and there is a quorum."""
        with public_errors():
            return super()._quorum(
                group_rank,
                step,
                checkpoint_metadata,
                shrink_only,
                timeout,
                commit_failures,
                reconfigure_handle,
                init_sync,
            )

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """Return where worker ``rank`` of this manager's group serves its state."""
        with public_errors():
            return super()._checkpoint_metadata(rank, timeout)

    def should_commit(
        self, group_rank: int, step: int, should_commit: bool, timeout: timedelta
    ) -> bool:
        """Vote, and wait for the group's decision."""
        with public_errors():
            return super().should_commit(group_rank, step, should_commit, timeout)
