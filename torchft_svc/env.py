"""The only reader of ``os.environ``: each variable typed, each bad value an error that names it.

Argument beats environment beats default, everywhere. An empty variable counts as not set: with
docker compose ``NAME=`` often means that. For TLS files, tokens, users and passwords it is an
error: nobody may serve without protection because a shell variable had no value.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from torchft_svc.errors import ConfigError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_MAX_PORT = 65535
_MAX_EXIT_CODE = 255

# Defaults of the services' flags, which click reads.
LIGHTHOUSE_BIND_VARIABLE = "TORCHFT_LIGHTHOUSE_BIND"
MANAGER_BIND_VARIABLE = "TORCHFT_MANAGER_BIND"
LOG_VARIABLE = "TORCHFT_LOG"
METRICS_PORT_VARIABLE = "TORCHFT_METRICS_PORT"
LOG_FORMAT_VARIABLE = "TORCHFT_LOG_FORMAT"
INTERFACE_VARIABLE = "TORCHFT_INTERFACE"
# Variables that our launcher sets for its workers.
WORLD_ROUND_VARIABLE = "TORCHFT_WORLD_ROUND"
VERDICT_VARIABLE = "TORCHFT_DO_NOT_REQUEUE_EXIT_CODE"
PROGRESS_VARIABLE = "TORCHFT_PROGRESS_FILE"
HEALTH_CHECK_VARIABLE = "TORCHFT_HEALTH_CHECK"
HEALTH_TIMEOUT_VARIABLE = "TORCHFT_HEALTH_CHECK_TIMEOUT_SEC"
LOG_LEVELS = ("debug", "info", "warning", "error", "off")
LOG_FORMATS = ("text", "json")


def keep_grpc_out_of_forks() -> None:
    """Keep gRPC's handlers out of ``fork``, unless the user has decided otherwise.

    A trainer forks DataLoader workers, which never call gRPC. Its handlers would only write a line
    to stderr for each of them. gRPC reads the variable once, when it is imported.
    """
    _prefer("GRPC_ENABLE_FORK_SUPPORT", "0")


def keep_grpc_quiet() -> None:
    """Make gRPC's core log errors only, unless the user has decided otherwise.

    It writes a line to stderr for each connection that fails to agree on TLS, so a peer with a
    wrong certificate that keeps trying would fill the log. Our own errors name the cause.
    """
    _prefer("GRPC_VERBOSITY", "ERROR")


def keep_grpc_in_one_thread() -> None:
    """Keep gRPC's reading of connections in one thread, unless the user has decided otherwise.

    Its event engine would hand each message from thread to thread, which is an eighth to a quarter
    of what a lighthouse needs for the beats of a thousand groups. Only for a process that is a
    lighthouse and starts no other program, which would inherit the variable.
    """
    from importlib import metadata  # it imports much, and the decisions read this module, too

    major, minor = metadata.version("grpcio").split(".")[:2]
    if (int(major), int(minor)) <= _LAST_GRPC_THAT_KNOWS:
        _prefer("GRPC_EXPERIMENTS", "-event_engine_listener")


def withdraw_preferences() -> None:
    """Remove the variables that this package's import has set for gRPC, which is not used here.

    The programs that a launcher starts are the user's: they find the environment as it was.
    """
    for name in _preferred:
        os.environ.pop(name, None)
    _preferred.clear()


_preferred: set[str] = set()
# The name of an experiment may go with any version, which then writes an error at each start.
_LAST_GRPC_THAT_KNOWS = (1, 85)


def _prefer(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = value
        _preferred.add(name)


def set_default(name: str, value: str) -> None:
    """Set a variable that torch reads, unless the user has decided otherwise."""
    os.environ.setdefault(name, value)


def is_set(name: str) -> bool:
    """Whether the environment has ``name``, a variable of another program."""
    return name in os.environ


def value_of(name: str, default: str) -> str:
    """Return the value of another program's variable."""
    return os.environ.get(name, default)


def update(variables: Mapping[str, str]) -> None:
    """Set variables of this process, for what it runs and starts."""
    os.environ.update(variables)


def replace(variables: Mapping[str, str]) -> None:
    """Make them the whole environment of this process."""
    os.environ.clear()
    os.environ.update(variables)


def for_child(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process' environment with ``changes``; None takes a variable away."""
    changed = {**os.environ, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def without_window_size() -> dict[str, str]:
    """This process' environment without the size of a window, which some shells and libraries
    export at their start: a screen would keep it when the window changes."""
    return for_child({"COLUMNS": None, "LINES": None})


def set_worker_variables(worker: TorchrunWorker, round_: int) -> None:
    """Set torchrun's variables, and ours, to the place in a new world, for those that read them."""
    for name, value in asdict(worker).items():
        os.environ[name.upper()] = str(value)
    os.environ[WORLD_ROUND_VARIABLE] = str(round_)


@contextlib.contextmanager
def set_while(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this block, for what it starts; afterwards they are what they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def switched_on(name: str) -> Iterator[None]:
    """Inside this block ``name``, which torch reads, is ``1``; afterwards what it was, or ``0``.

    Changing a variable that exists does not move the others, which other threads may read.
    """
    before = os.environ.setdefault(name, "0")
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ[name] = before


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunWorker:
    """The ranks of a worker, and where its store is, by the names of torchrun's variables."""

    local_rank: int
    role_rank: int
    rank: int
    local_world_size: int
    role_world_size: int
    world_size: int
    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True)
class Environment:
    """Typed reads of ``variables`` (None: the process' own environment, read at each call).

    Every reader returns None where the variable is not set, and raises `ConfigError` with its name
    and value where it cannot be understood.
    """

    variables: Mapping[str, str] | None = None

    @property
    def lighthouse_address(self) -> str | None:
        """``TORCHFT_LIGHTHOUSE``, or ``TORCH_LIGHTHOUSE``: ``host:port``, or several with commas
        between (default: this machine, port 29510)."""
        return self._text("TORCHFT_LIGHTHOUSE") or self._text("TORCH_LIGHTHOUSE")

    @property
    def manager_address(self) -> str | None:
        """``TORCHFT_MANAGER_ADDR``: a manager that already runs, ``host:port`` (default: rank 0
        starts one)."""
        return self._text("TORCHFT_MANAGER_ADDR")

    @property
    def manager_port(self) -> int | None:
        """``TORCHFT_MANAGER_PORT``: where the manager listens (default: any free port, as with
        0)."""
        return self._int("TORCHFT_MANAGER_PORT", 0, _MAX_PORT)

    @property
    def master_address(self) -> str | None:
        """``MASTER_ADDR``: the host of the group's store (default: a worker that is
        alone in its group hosts one)."""
        return self._text("MASTER_ADDR")

    @property
    def master_port(self) -> int | None:
        """``MASTER_PORT``: the port of the group's store (default: a worker that is
        alone in its group hosts one)."""
        return self._int("MASTER_PORT", 1, _MAX_PORT)

    @property
    def uses_agent_store(self) -> bool:
        """``TORCHELASTIC_USE_AGENT_STORE``: the launcher hosts the store, workers only connect
        (default: no)."""
        return bool(self._bool("TORCHELASTIC_USE_AGENT_STORE"))

    @property
    def shares_agent_store(self) -> bool:
        """``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``: if true, workers do not use the launcher's
        store (default: no)."""
        return not self._bool("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")

    @property
    def restart_count(self) -> int:
        """``TORCHELASTIC_RESTART_COUNT``: which attempt of the launcher this worker belongs to
        (default: 0)."""
        return self._int("TORCHELASTIC_RESTART_COUNT", 0) or 0

    @property
    def world_round(self) -> int | None:
        """``TORCHFT_WORLD_ROUND``: the number of this worker's world, which its launcher sets
        (default: none)."""
        return self._int(WORLD_ROUND_VARIABLE, 0)

    @property
    def group_rank(self) -> int | None:
        """``RANK``: this worker's index in its replica group (default: 0)."""
        return self._int("RANK", 0)

    @property
    def group_world_size(self) -> int | None:
        """``WORLD_SIZE``: how many workers the replica group has (default: 1)."""
        return self._int("WORLD_SIZE", 1)

    @property
    def worker_channel(self) -> str | None:
        """``TORCHFT_WORKER_CHANNEL``: the directory over which an agent talks to this worker; the
        launcher sets it (default: none)."""
        return self._text("TORCHFT_WORKER_CHANNEL")

    def torchrun_worker(self) -> TorchrunWorker:
        """Read what torchrun sets for each of its workers.

        Raises:
            ConfigError: this process was not started by it, or a variable is wrong.
        """
        rank, world_size = self.group_rank, self.group_world_size
        host, port = self.master_address, self.master_port
        if rank is None or world_size is None or host is None or port is None:
            missing = [
                name
                for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                if self._text(name) is None
            ]
            reason = "it is not set: start this program with torchft-run or torchrun"
            raise ConfigError(missing[0], None, reason)
        local_rank = _first(self.local_rank, 0)
        return TorchrunWorker(
            local_rank=local_rank,
            role_rank=_first(self._int("ROLE_RANK", 0), rank),
            rank=rank,
            # Other launchers do not set it; it is at least this.
            local_world_size=_first(self._int("LOCAL_WORLD_SIZE", 1), local_rank + 1),
            role_world_size=_first(self._int("ROLE_WORLD_SIZE", 1), world_size),
            world_size=world_size,
            master_addr=host,
            master_port=port,
        )

    @property
    def timeout_s(self) -> float | None:
        """``TORCHFT_TIMEOUT_SEC``: the longest that a collective or a vote may take (default:
        60 s)."""
        return self._seconds("TORCHFT_TIMEOUT_SEC")

    @property
    def quorum_timeout_s(self) -> float | None:
        """``TORCHFT_QUORUM_TIMEOUT_SEC``: the longest wait for a quorum (default: 60 s)."""
        return self._seconds("TORCHFT_QUORUM_TIMEOUT_SEC")

    @property
    def connect_timeout_s(self) -> float | None:
        """``TORCHFT_CONNECT_TIMEOUT_SEC``: the longest that a service may be unreachable (default:
        60 s)."""
        return self._seconds("TORCHFT_CONNECT_TIMEOUT_SEC")

    @property
    def watchdog_timeout_s(self) -> float | None:
        """``TORCHFT_WATCHDOG_TIMEOUT_SEC``: the process ends if a collective is so late after its
        deadline (default: never)."""
        return self._seconds("TORCHFT_WATCHDOG_TIMEOUT_SEC")

    @property
    def flight_recorder(self) -> str | None:
        """``TORCHFT_FLIGHT_RECORDER``: the directory for records of collectives (default: nothing
        is recorded)."""
        return self._text("TORCHFT_FLIGHT_RECORDER")

    @property
    def checks_collectives(self) -> bool:
        """``TORCHFT_CHECK_COLLECTIVES``, or ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: compare each
        operation with the other groups' before it begins; equal in all groups (default: no)."""
        ours = self._bool("TORCHFT_CHECK_COLLECTIVES")
        detail = (self._text("TORCH_DISTRIBUTED_DEBUG") or "").upper() == "DETAIL"
        return detail if ours is None else ours

    @property
    def catches_up(self) -> bool:
        """``TORCHFT_CATCH_UP``: whether a group that starts fetches what does not change of the
        state before it joins, and shows its own state to others that start (default: no)."""
        return bool(self._bool("TORCHFT_CATCH_UP"))

    @property
    def buddy_every(self) -> int | None:
        """``TORCHFT_BUDDY_EVERY``: after every so many steps, offer the state to processes that
        hold copies of it, and begin from such a copy if no group lives; 0: never (default: 0)."""
        return self._int("TORCHFT_BUDDY_EVERY", 0)

    @property
    def is_spare(self) -> bool:
        """``TORCHFT_SPARE``: whether this group is a prepared spare, which stands by until a place
        in its job is free (default: no)."""
        return bool(self._bool("TORCHFT_SPARE"))

    @property
    def spare_refresh_s(self) -> float | None:
        """``TORCHFT_SPARE_REFRESH_SEC``: how often a prepared spare looks for what has changed in
        the state that it follows (default: 60 s)."""
        return self._seconds("TORCHFT_SPARE_REFRESH_SEC")

    @property
    def steady_steps(self) -> bool:
        """``TORCHFT_STEADY_STEPS``: whether a step may begin in the quorum of the step before,
        without a question (default: yes)."""
        ours = self._bool("TORCHFT_STEADY_STEPS")
        return True if ours is None else ours

    @property
    def check_every(self) -> int | None:
        """``TORCHFT_CHECK_EVERY``: in every so many steps groups compare their states; 0: never
        (default: 500)."""
        return self._int("TORCHFT_CHECK_EVERY", 0)

    @property
    def on_difference(self) -> str | None:
        """``TORCHFT_ON_DIFFERENCE``: what follows if their states differ: ``heal``, ``warn`` or
        ``stop`` (default: ``heal``)."""
        return self._text("TORCHFT_ON_DIFFERENCE")

    @property
    def quorum_retries(self) -> int | None:
        """``TORCHFT_QUORUM_RETRIES``: how often a failed quorum is asked for again (default: 0)."""
        return self._int("TORCHFT_QUORUM_RETRIES", 0)

    @property
    def checkpoint_host(self) -> str | None:
        """``TORCHFT_CHECKPOINT_HOST``: the host under which others fetch this worker's state
        (default: the local address from which the lighthouse is reached)."""
        return self._text("TORCHFT_CHECKPOINT_HOST")

    @property
    def interface(self) -> str | None:
        """``TORCHFT_INTERFACE``: the network interface whose address other groups get
        (default: that of the route to the lighthouse)."""
        return self._text(INTERFACE_VARIABLE)

    @property
    def job_id(self) -> str | None:
        """``TORCHFT_JOB_ID``: the job on a lighthouse that serves many (default: ``default``)."""
        return self._text("TORCHFT_JOB_ID")

    @property
    def min_replicas(self) -> int | None:
        """``TORCHFT_MIN_REPLICAS``: the fewest groups that the job trains with; 0: not set
        (default: the setting of the lighthouse)."""
        return self._int("TORCHFT_MIN_REPLICAS", 0)

    @property
    def replica_group_id(self) -> str | None:
        """``REPLICA_GROUP_ID``: the stable name of this replica group (default: a random one)."""
        return self._text("REPLICA_GROUP_ID")

    @property
    def do_not_requeue_exit_code(self) -> int | None:
        """``TORCHFT_DO_NOT_REQUEUE_EXIT_CODE``: the status of an end that no restart can
        mend (default: none; such an end has the status of any error)."""
        return self._int(VERDICT_VARIABLE, 1, _MAX_EXIT_CODE)

    @property
    def drained_exit_code(self) -> int | None:
        """``TORCHFT_DRAINED_EXIT_CODE``: the status of a worker whose group was drained
        (default: 0)."""
        return self._int("TORCHFT_DRAINED_EXIT_CODE", 0, _MAX_EXIT_CODE)

    @property
    def progress_file(self) -> str | None:
        """``TORCHFT_PROGRESS_FILE``: where this worker records its step for who restarts it
        (default: nowhere).

        Where a launcher starts several workers, each has its own: the local rank is appended.
        """
        path, local_rank = self._text(PROGRESS_VARIABLE), self._text("LOCAL_RANK")
        return path if path is None or local_rank is None else f"{path}.{local_rank}"

    @property
    def grace_s(self) -> float | None:
        """``TORCHFT_GRACE_SEC``: the time from SIGTERM to SIGKILL (default: not known)."""
        return self._seconds("TORCHFT_GRACE_SEC")

    @property
    def health_check(self) -> str | None:
        """``TORCHFT_HEALTH_CHECK``: a command that has to succeed before this machine joins
        (default: none)."""
        return self._text(HEALTH_CHECK_VARIABLE)

    @property
    def health_check_timeout_s(self) -> float | None:
        """``TORCHFT_HEALTH_CHECK_TIMEOUT_SEC``: how long that command may take (default: 60)."""
        return self._seconds(HEALTH_TIMEOUT_VARIABLE)

    @property
    def local_rank(self) -> int | None:
        """``LOCAL_RANK``: this worker's index on its machine (default: none)."""
        return self._int("LOCAL_RANK", 0)

    @property
    def log_level(self) -> str | None:
        """``TORCHFT_LOG``: the least that trainers and services log: ``debug``, ``info``,
        ``warning``, ``error`` or ``off`` (default: ``info``)."""
        text = self._text(LOG_VARIABLE)
        if text is not None and text.lower() not in LOG_LEVELS:
            raise ConfigError(LOG_VARIABLE, text, f"use one of {', '.join(LOG_LEVELS)}")
        return None if text is None else text.lower()

    @property
    def log_format(self) -> str:
        """``TORCHFT_LOG_FORMAT``: how all programs write the lines of their log: ``text`` or
        ``json`` (default: ``text``)."""
        text = (self._text(LOG_FORMAT_VARIABLE) or LOG_FORMATS[0]).lower()
        if text not in LOG_FORMATS:
            raise ConfigError(LOG_FORMAT_VARIABLE, text, f"use one of {', '.join(LOG_FORMATS)}")
        return text

    @property
    def metrics_port(self) -> int | None:
        """``TORCHFT_METRICS_PORT``: where a trainer serves its metrics, 0 for any free port; a
        worker with ``LOCAL_RANK`` n adds n (default: nowhere)."""
        return self._int(METRICS_PORT_VARIABLE, 0, _MAX_PORT)

    @property
    def exports_telemetry(self) -> bool:
        """``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` or
        ``OTEL_EXPORTER_OTLP_LOGS_ENDPOINT``: where logs and traces are exported to, unless
        ``OTEL_SDK_DISABLED`` is true; OpenTelemetry's library reads its other variables
        (default: nowhere)."""
        kinds = ("", "TRACES_", "LOGS_")
        is_set = any(self._text(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in kinds)
        return is_set and (self._text("OTEL_SDK_DISABLED") or "").lower() != "true"

    @property
    def tls_cert_file(self) -> str | None:
        """``TORCHFT_TLS_CERT``: this party's certificate and its intermediates, a PEM file
        (default: no TLS)."""
        return self._protecting("TORCHFT_TLS_CERT")

    @property
    def tls_key_file(self) -> str | None:
        """``TORCHFT_TLS_KEY``: the certificate's private key, a PEM file
        (default: no TLS)."""
        return self._protecting("TORCHFT_TLS_KEY")

    @property
    def tls_ca_file(self) -> str | None:
        """``TORCHFT_TLS_CA``: the certificates that sign those of the others, a PEM file
        (default: the system's)."""
        return self._protecting("TORCHFT_TLS_CA")

    @property
    def token(self) -> str | None:
        """``TORCHFT_TOKEN``: the secret that every call must carry (default: none)."""
        return self._protecting("TORCHFT_TOKEN")

    @property
    def token_file(self) -> str | None:
        """``TORCHFT_TOKEN_FILE``: the file that holds it (default: none)."""
        return self._protecting("TORCHFT_TOKEN_FILE")

    @property
    def etcd_cert_file(self) -> str | None:
        """``TORCHFT_ETCD_CERT``: the certificate that a lighthouse shows to etcd, a PEM file
        (default: none)."""
        return self._protecting("TORCHFT_ETCD_CERT")

    @property
    def etcd_key_file(self) -> str | None:
        """``TORCHFT_ETCD_KEY``: that certificate's private key, a PEM file
        (default: none)."""
        return self._protecting("TORCHFT_ETCD_KEY")

    @property
    def etcd_ca_file(self) -> str | None:
        """``TORCHFT_ETCD_CA``: the certificates that sign those of etcd, a PEM file
        (default: the system's)."""
        return self._protecting("TORCHFT_ETCD_CA")

    @property
    def etcd_user(self) -> str | None:
        """``TORCHFT_ETCD_USER``: as whom a lighthouse comes to etcd (default: none)."""
        return self._protecting("TORCHFT_ETCD_USER")

    @property
    def etcd_password(self) -> str | None:
        """``TORCHFT_ETCD_PASSWORD``: that user's password (default: none)."""
        return self._protecting("TORCHFT_ETCD_PASSWORD")

    @property
    def etcd_password_file(self) -> str | None:
        """``TORCHFT_ETCD_PASSWORD_FILE``: the file that holds it (default: none)."""
        return self._protecting("TORCHFT_ETCD_PASSWORD_FILE")

    def other(self, name: str) -> str | None:
        """Return the value of a variable that only another program reads."""
        return self._text(name)

    def _text(self, name: str) -> str | None:
        variables = os.environ if self.variables is None else self.variables
        return variables.get(name, "").strip() or None

    def _protecting(self, name: str) -> str | None:
        variables = os.environ if self.variables is None else self.variables
        if name in variables and not variables[name].strip():
            raise ConfigError(name, variables[name], "it is empty: give it a value, or unset it")
        return self._text(name)

    def _int(self, name: str, low: int, high: int | None = None) -> int | None:
        text = self._text(name)
        if text is None:
            return None
        expected = f"use a whole number, {low} or more" if high is None else f"use {low} to {high}"
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(name, text, expected) from None
        if value < low or (high is not None and value > high):
            raise ConfigError(name, text, expected)
        return value

    def _seconds(self, name: str) -> float | None:
        text = self._text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(name, text, "use a finite number of seconds above 0")
        return value

    def _bool(self, name: str) -> bool | None:
        text = self._text(name)
        if text is None:
            return None
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ConfigError(name, text, "use true or false")


def _first(value: int | None, default: int) -> int:
    return default if value is None else value
