"""What a manager has to know, and the relations that its timeouts must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchft_svc.core.limits import MAX_NAME_LENGTH, check_length
from torchft_svc.core.quorum.types import DEFAULT_JOB, MAX_WORLD_SIZE, Resumed
from torchft_svc.errors import AddressError, ConfigError
from torchft_svc.host.address import HostPort, parse_address, split_addresses
from torchft_svc.rpc.security import PLAIN, Security

# An incarnation is a uuid behind the name and a colon.
_INCARNATION_LENGTH = 37
# Above this many attempts a quorum is not flaky, it is broken.
MAX_QUORUM_RETRIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerConfig:
    """Settings of a manager: addresses are ``host:port``, durations seconds.

    ``lighthouse_address`` may be several addresses with commas between.

    ``advertise_host`` is the host under which other groups reach this manager (None: the one that
    the route to the lighthouse leaves from). ``connect_timeout_s`` is how long a lighthouse may be
    unreachable before workers that wait receive an error, ``quorum_retries`` how often a failed
    quorum is requested again before they do. ``min_replicas`` is the fewest groups that the job
    trains with (0: the lighthouse knows; else the largest that its groups report counts).
    ``is_spare``: the group stands by until a place is free (rule G1).
    ``owner_pid`` is the process to die with. ``resumed`` is the incarnation that it continues
    (None: a new one). ``predecessor_end`` is how the manager before this one died (empty: there was
    none), and ``predecessor_ended_at`` when, on the monotonic clock of the machine.
    ``metrics_bind``: where its metrics are served (None: nowhere).
    """

    lighthouse_address: str
    replica_name: str
    group_world_size: int
    store_address: str
    bind: str = ":0"
    advertise_host: str | None = None
    heartbeat_interval_s: float = 0.1
    connect_timeout_s: float = 10.0
    quorum_retries: int = 0
    job_id: str = DEFAULT_JOB
    min_replicas: int = 0
    is_spare: bool = False
    owner_pid: int | None = None
    resumed: Resumed | None = None
    predecessor_end: str = ""
    predecessor_ended_at: float = 0.0
    metrics_bind: str | None = None
    security: Security = PLAIN

    def __post_init__(self) -> None:
        self._check_addresses()
        if self.owner_pid is not None and not 1 <= self.owner_pid < 2**31:
            raise ConfigError("owner_pid", self.owner_pid, "a process has a number from 1 to 2**31")
        for field, limit in (
            ("replica_name", MAX_NAME_LENGTH - _INCARNATION_LENGTH),
            ("job_id", MAX_NAME_LENGTH),
        ):
            value = getattr(self, field)
            if not (0 < len(value) <= limit and value.isprintable() and value.isascii()):
                shown = value if len(value) <= limit else f"{value[:40]}..."
                raise ConfigError(field, shown, f"use 1 to {limit} printable ASCII characters")
        if not 1 <= self.group_world_size <= MAX_WORLD_SIZE:
            raise ConfigError(
                "group_world_size", self.group_world_size, f"use 1 to {MAX_WORLD_SIZE} workers"
            )
        if not 0 <= self.quorum_retries <= MAX_QUORUM_RETRIES:
            raise ConfigError(
                "quorum_retries", self.quorum_retries, f"use 0 to {MAX_QUORUM_RETRIES}"
            )
        if not 0 <= self.min_replicas <= MAX_WORLD_SIZE:
            raise ConfigError(
                "min_replicas", self.min_replicas, f"use 0 to {MAX_WORLD_SIZE} groups"
            )
        for field in ("heartbeat_interval_s", "connect_timeout_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(field, value, "use a finite number of seconds above 0")
            check_length(field, value)

    def _check_addresses(self) -> None:
        split_addresses(self.lighthouse_address)
        parse_address(self.store_address)
        for bind in filter(None, (self.bind, self.metrics_bind)):
            parse_address(bind, may_bind=True)
        if self.advertise_host is not None:
            _check_host(self.advertise_host)

    @property
    def lighthouses(self) -> tuple[str, ...]:
        """Addresses of the lighthouses, in the order in which they are tried."""
        return split_addresses(self.lighthouse_address)


def _check_host(host: str) -> None:
    try:
        parse_address(str(HostPort(host, 1)))
    except AddressError:
        shown = host if len(host) <= MAX_NAME_LENGTH else f"{host[:40]}..."
        raise ConfigError("advertise_host", shown, "it is not a host name") from None
