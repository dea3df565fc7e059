"""What a trainer is configured by, and the relations between its timeouts."""

from __future__ import annotations

import enum
import math
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta

from torchft_svc.core.limits import MAX_DURATION_S, check_length, check_not_empty
from torchft_svc.core.quorum.types import DEFAULT_JOB, MAX_WORLD_SIZE
from torchft_svc.core.quorum.worker.state_check import DEFAULT_CHECK_EVERY, CheckRules, as_policy
from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError
from torchft_svc.host.interfaces import chosen_host
from torchft_svc.rpc.security import Security, security_or_environment

DEFAULT_TIMEOUT = timedelta(seconds=60)
DEFAULT_HEARTBEAT_INTERVAL = timedelta(milliseconds=100)
DEFAULT_SPARE_REFRESH_S = 60.0
# The default of the lighthouse, also in the public release.
LIGHTHOUSE_HEARTBEAT_TIMEOUT_S = 5.0
LOCAL_LIGHTHOUSE = "127.0.0.1:29510"


class WorldSizeMode(enum.Enum):
    """The number of groups that contribute gradients.

    ``DYNAMIC``: all present groups. ``FIXED_WITH_SPARES``: at most ``min_replica_size``; the others
    are spares that contribute zeros and receive the average, so they stay identical.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts in seconds; an inner one must not exceed an outer one, or its error is misleading.

    ``collective_s`` bounds a collective, a vote, and the idle time of a heal, ``quorum_s`` the wait
    for a quorum, ``connect_s`` how long a service may be unreachable. ``watchdog_s``: an operation
    that is so late after its own deadline ends the process (None: never).
    """

    collective_s: float = 60.0
    quorum_s: float = 60.0
    connect_s: float = 60.0
    heartbeat_interval_s: float = 0.1
    watchdog_s: float | None = None

    def __post_init__(self) -> None:
        for field in self.__slots__:
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(_KEYWORDS[field], value, "use a finite time above 0 seconds")
            check_length(_KEYWORDS[field], value or 0.0)
        reason = "the others would give up the quorum while it waits"
        self._check_below_quorum("collective_s", reason)
        reason = "the quorum would time out before it reports which groups are missing"
        self._check_below_quorum("connect_s", reason)
        if self.heartbeat_interval_s >= LIGHTHOUSE_HEARTBEAT_TIMEOUT_S:
            raise ConfigError(
                "heartbeat_interval",
                f"{self.heartbeat_interval_s:g} s",
                f"it must be below the lighthouse's heartbeat timeout of "
                f"{LIGHTHOUSE_HEARTBEAT_TIMEOUT_S:g} s, or a living group is considered dead",
            )

    def _check_below_quorum(self, field: str, reason: str) -> None:
        value_s = getattr(self, field)
        if value_s > self.quorum_s:
            limit = f"it must not be above quorum_timeout={self.quorum_s:g} s: {reason}"
            raise ConfigError(_KEYWORDS[field], f"{value_s:g} s", limit)


_KEYWORDS = {
    "collective_s": "timeout",
    "quorum_s": "quorum_timeout",
    "connect_s": "connect_timeout",
    "heartbeat_interval_s": "heartbeat_interval",
    "watchdog_s": "watchdog_timeout",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """The place of this worker in its replica group."""

    group_rank: int
    group_world_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.group_world_size <= MAX_WORLD_SIZE:
            expected = f"a group has 1 to {MAX_WORLD_SIZE} workers"
            raise ConfigError("world_size", self.group_world_size, expected)
        if not 0 <= self.group_rank < self.group_world_size:
            size = self.group_world_size
            expected = f"it must be 0 to {size - 1} with world_size={size}"
            raise ConfigError("rank", self.group_rank, expected)

    @property
    def leads(self) -> bool:
        """Whether this worker starts the group's services."""
        return self.group_rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The group's services: where they are, and how they are started.

    Addresses are ``host:port``. ``hostname`` is what other groups reach this one at: the argument,
    or the address of the chosen network interface (None: where the route to the lighthouse leaves
    from). ``min_replicas`` is sent to the lighthouse (0: not set). ``is_spare``: the group stands
    by until a place in the job is free.
    ``manager_address``: use a running manager. ``in_process``: run the manager inside the trainer
    instead of in a separate process. ``flight_recorder``: the directory for records of collectives
    (None: nothing is recorded).
    """

    lighthouse_address: str
    manager_address: str | None
    replica_name: str
    job_id: str
    port: int
    hostname: str | None
    quorum_retries: int
    min_replicas: int
    in_process: bool
    security: Security
    flight_recorder: str | None
    is_spare: bool = False


def resolve_timeouts(
    environment: Environment,
    *,
    timeout: timedelta | None,
    quorum_timeout: timedelta | None,
    connect_timeout: timedelta | None,
    heartbeat_interval: timedelta,
    watchdog_timeout: timedelta | None = None,
) -> Timeouts:
    """Resolve each value: argument, else environment, else default.

    If only one is given, the defaults of the others are adapted to it: with a quorum timeout of
    10 s, a collective timeout need not be given as well.
    """
    quorum_s = _seconds(quorum_timeout, environment.quorum_timeout_s)
    collective_s = _seconds(timeout, environment.timeout_s)
    connect_s = _seconds(connect_timeout, environment.connect_timeout_s)
    default_s = DEFAULT_TIMEOUT.total_seconds()
    if quorum_s is None:
        # A timeout that is too long is refused under its own name.
        quorum_s = min(max(default_s, collective_s or 0.0, connect_s or 0.0), MAX_DURATION_S)
    fitting_s = min(default_s, quorum_s) if quorum_s > 0 else default_s
    return Timeouts(
        collective_s=fitting_s if collective_s is None else collective_s,
        quorum_s=quorum_s,
        connect_s=fitting_s if connect_s is None else connect_s,
        heartbeat_interval_s=heartbeat_interval.total_seconds(),
        watchdog_s=_seconds(watchdog_timeout, environment.watchdog_timeout_s),
    )


def resolve_place(
    environment: Environment, group_rank: int | None, group_world_size: int | None
) -> GroupPlace:
    """Resolve the place: argument, else ``RANK`` and ``WORLD_SIZE``, else a group of one worker."""
    if group_rank is None:
        group_rank = environment.group_rank
    if group_world_size is None:
        group_world_size = environment.group_world_size
    return GroupPlace(
        group_rank=0 if group_rank is None else group_rank,
        group_world_size=1 if group_world_size is None else group_world_size,
    )


def resolve_services(
    environment: Environment,
    *,
    lighthouse_addr: str | None,
    manager_addr: str | None,
    replica_id: str | None,
    job_id: str | None,
    port: int | None,
    hostname: str | None,
    quorum_retries: int | None,
    min_replicas: int | None,
    in_process: bool,
    security: Security | None,
    flight_recorder: str | None,
    spare: bool | None = None,
) -> ServiceOptions:
    """Resolve each option: argument, else environment, else default (a lighthouse on this machine).

    An empty argument is an error; only ``replica_id`` may be empty, as in the public release, and
    counts as not given.
    """
    for field, value in (
        ("lighthouse_addr", lighthouse_addr),
        ("manager_addr", manager_addr),
        ("job_id", job_id),
        ("hostname", hostname),
        ("flight_recorder", flight_recorder),
    ):
        check_not_empty(field, value)
    manager_address = manager_addr or environment.manager_address
    if in_process and manager_addr:
        raise ConfigError("in_process", True, f"manager_addr={manager_addr!r} already runs")
    is_spare = environment.is_spare if spare is None else spare
    if is_spare and manager_address and not in_process:
        reason = f"the manager at {manager_address!r} already runs, as that of an ordinary group"
        raise ConfigError("spare", True, reason)
    return ServiceOptions(
        lighthouse_address=lighthouse_addr or environment.lighthouse_address or LOCAL_LIGHTHOUSE,
        manager_address=None if in_process else manager_address,
        replica_name=replica_id or environment.replica_group_id or _fresh_name(),
        job_id=job_id or environment.job_id or DEFAULT_JOB,
        port=(environment.manager_port or 0) if port is None else port,
        hostname=hostname or chosen_host(environment),
        quorum_retries=_count("quorum_retries", quorum_retries, environment.quorum_retries),
        min_replicas=_count("min_replicas", min_replicas, environment.min_replicas),
        in_process=in_process,
        security=security_or_environment(security, environment),
        flight_recorder=flight_recorder or environment.flight_recorder,
        is_spare=is_spare,
    )


def resolve_checks(
    environment: Environment, check_every: int | None, on_difference: str | None
) -> CheckRules:
    """Resolve each value: argument, else environment, else default."""
    if check_every is None:
        check_every = environment.check_every
    if on_difference is None:
        on_difference = environment.on_difference
    return CheckRules(
        check_every=DEFAULT_CHECK_EVERY if check_every is None else check_every,
        on_difference="heal" if on_difference is None else as_policy(on_difference),
    )


def resolve_copies(environment: Environment, buddy_every: int | None) -> int:
    """Resolve the steps between two copies of the state (0: none): argument, else environment."""
    every = environment.buddy_every if buddy_every is None else buddy_every
    if every is not None and every < 0:
        raise ConfigError("buddy_every", every, "use a number of steps, or 0 for no copies")
    return every or 0


def positive_s(field: str, timeout: timedelta) -> float:
    """The seconds of ``timeout``; raises `ConfigError` if it is not positive, or too long."""
    seconds = timeout.total_seconds()
    if seconds <= 0:
        raise ConfigError(field, str(timeout), "use a time above 0")
    check_length(field, seconds)
    return seconds


def _seconds(argument: timedelta | None, variable_s: float | None) -> float | None:
    return variable_s if argument is None else argument.total_seconds()


def _count(field: str, argument: int | None, variable: int | None) -> int:
    value = (variable or 0) if argument is None else argument
    if value < 0:
        raise ConfigError(field, value, "use 0 or more")
    return value


def _fresh_name() -> str:
    """A unique name: two groups with one name would replace each other."""
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
