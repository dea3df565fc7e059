"""Launches an agent from Python, as ``torch.distributed.launcher`` does, with a restart policy.

elastic_launch(LaunchConfig(..., restart_policy=RestartPolicy.SOFT), function)(*args)
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import math
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api as torch_launcher

from torchft_svc import env
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.launch.world import FAILURE_WINDOW_S, MAX_FAILURES
from torchft_svc.core.restart_progress import RestartProgress
from torchft_svc.elastic.agent import AgentSettings, ElasticAgent
from torchft_svc.elastic.health import NodeHealth
from torchft_svc.elastic.policy import (
    MAX_SOFT_FAILURES,
    STOPPED_TIMEOUT_S,
    HardRestartPolicyStrategy,
    RestartPolicyStrategy,
    SoftRestartPolicyStrategy,
)
from torchft_svc.elastic.progress import recording_progress
from torchft_svc.elastic.rendezvous.config import BACKEND, EXIT_BARRIERS
from torchft_svc.elastic.rendezvous.plugin import create_handler
from torchft_svc.elastic.rendezvous.polled import is_error_of_etcd
from torchft_svc.elastic.warm_start import DEFAULT_PRELOAD, check_command
from torchft_svc.elastic.workers import Entrypoint, tied
from torchft_svc.errors import ConfigError, HealthCheckFailed, UsageError
from torchft_svc.host.health_check import DEFAULT_TIMEOUT_S

__all__ = [
    "HardRestartPolicyStrategy",
    "LaunchConfig",
    "RestartPolicy",
    "RestartPolicyStrategy",
    "SoftRestartPolicyStrategy",
    "elastic_launch",
    "launch_agent",
]

log = logging.getLogger(__name__)

# A process that is to outlive its terminal has these ignored. SIGTERM always ends the launcher.
_MAY_BE_IGNORED = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT


@dataclass
class LaunchConfig(torch_launcher.LaunchConfig):
    """torch's, and what a restart policy needs.

    Args:
        rdzv_backend: where the nodes meet; the default is the lighthouse under a soft policy, as
            for ``torchft-run``, and torch's default otherwise.
        restart_policy: one of ours, or a strategy of your own.
        soft_ready_timeout: under a soft policy, seconds that a worker has to reach a new world
            before it is treated as failed; 0: it may take however long.
        stopped_worker_timeout: under a soft policy, seconds for which a worker may be stopped
            (SIGSTOP) before it is killed, which is a failure; 0: it may be for ever.
        max_soft_failures: with soft-replace, more failures of a node's workers within
            ``failure_window`` restart all of them.
        failure_window: seconds for which a failure counts.
        max_run_failures: with more failures of all nodes together within ``failure_window``, the
            run ends with an error (None: never); it needs a lighthouse, as does the next one.
        max_restarts_without_progress: with so many restarts in a row after which the workers have
            not committed a step beyond their last one, the run ends with an error that is final
            (None: no limit); it needs workers that record their steps.
        max_node_failures: with more failures of one node within ``failure_window``, it is excluded
            from the run for as long (None: never).
        health_check: a command that runs before this node joins, and again after its workers have
            failed; if it fails, or takes longer than ``health_check_timeout`` seconds, the node
            leaves the run.
        exit_barrier: whether a node whose workers have finished waits for the nodes that are
            ``alive``, or for ``all``, as torch's own back ends do.
        exit_barrier_timeout: seconds that a node whose workers have finished waits for the others.
        warm_start: under a soft policy, fork workers from a process that has imported the modules
            of ``warm_start_preload``, as soon as it has; for Python scripts and modules.

    Raises:
        ConfigError: a value that cannot work.
    """

    rdzv_backend: str = ""
    restart_policy: RestartPolicy | RestartPolicyStrategy = RestartPolicy.HARD
    soft_ready_timeout: float = 300.0
    stopped_worker_timeout: float = STOPPED_TIMEOUT_S
    max_soft_failures: int = MAX_SOFT_FAILURES
    failure_window: float = FAILURE_WINDOW_S
    max_run_failures: int | None = None
    max_node_failures: int | None = None
    max_restarts_without_progress: int | None = None
    health_check: str = ""
    health_check_timeout: float = DEFAULT_TIMEOUT_S
    exit_barrier: str = "alive"
    exit_barrier_timeout: float = 300.0
    warm_start: bool = False
    warm_start_preload: Sequence[str] = DEFAULT_PRELOAD

    def __post_init__(self) -> None:
        if isinstance(self.restart_policy, str):
            self.restart_policy = _policy(self.restart_policy)
        if not self.rdzv_backend:
            is_soft = isinstance(_strategy(self), SoftRestartPolicyStrategy)
            self.rdzv_backend = BACKEND if is_soft else torch_launcher.LaunchConfig.rdzv_backend
        for name in ("soft_ready_timeout", "stopped_worker_timeout", "exit_barrier_timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(name, value, "use a finite number of seconds, 0 or more")
        if not (math.isfinite(self.health_check_timeout) and self.health_check_timeout > 0):
            timeout = self.health_check_timeout
            raise ConfigError("health_check_timeout", timeout, "use more than 0 seconds")
        self._check_failures()
        if self.exit_barrier not in EXIT_BARRIERS:
            raise ConfigError("exit_barrier", self.exit_barrier, "use alive or all")
        if not 1 <= self.min_nodes <= self.max_nodes:
            nodes = f"{self.min_nodes}:{self.max_nodes}"
            raise ConfigError("nnodes", nodes, "1 <= min <= max is needed")
        if self.warm_start and isinstance(_strategy(self), HardRestartPolicyStrategy):
            raise ConfigError("warm_start", True, "it needs a soft restart policy")
        super().__post_init__()  # type: ignore[no-untyped-call]

    def _check_failures(self) -> None:
        if not (math.isfinite(self.failure_window) and self.failure_window > 0):
            raise ConfigError("failure_window", self.failure_window, "use more than 0 seconds")
        for name in ("max_soft_failures", "max_run_failures", "max_node_failures"):
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit <= MAX_FAILURES:
                raise ConfigError(name, limit, f"use 0 to {MAX_FAILURES}")
        RestartProgress(self.max_restarts_without_progress)  # refuses what cannot work
        for name in ("max_run_failures", "max_node_failures"):
            if getattr(self, name) is not None and self.rdzv_backend != BACKEND:
                reason = f"only a lighthouse counts the failures of nodes, not {self.rdzv_backend}"
                raise ConfigError(name, getattr(self, name), reason)


class FinalChildFailedError(ChildFailedError):
    """Workers have failed, and a restart cannot mend that."""

    is_final = True


class elastic_launch:  # noqa: N801 - torch's name
    """Calls `launch_agent`: ``elastic_launch(config, entrypoint)(*args)``."""

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Entrypoint | None,
        health_check_server: Any = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


@contextlib.contextmanager
def _named_etcd_errors() -> Iterator[None]:
    """One of torch's two back ends for etcd lets the errors of the package etcd through."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, RendezvousConnectionError) else error
        if cause is None or not is_error_of_etcd(cause):
            raise
        hint = ""
        if "404" in str(cause):  # newer servers do not have the interface that is asked for
            hint = " (the server needs its v2 interface: etcd up to 3.5, with --enable-v2)"
        text = f"the connection to etcd has failed: {cause}{hint}"
        raise RendezvousConnectionError(text) from error


@contextlib.contextmanager
def _seeing_ends_of_children() -> Iterator[None]:
    """Withdraw that this process ignores SIGCHLD, as some programs have their children do.

    The system would forget how workers end: a killed one would look like one that has finished.

    Raises:
        UsageError: it is ignored, and this is not the main thread.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "SIGCHLD is ignored, so no end of a worker could be seen: launch it on the main thread"
        )
    log.warning("SIGCHLD was ignored, which would hide how workers end: its default is back")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _chosen_signals(names: str) -> str:
    """The signals of ``names`` that end the launcher: not those that were ignored at its start.

    ``nohup`` ignores SIGHUP, and a shell without job control SIGINT and SIGQUIT of what it starts
    in the background.
    """
    ignored = {
        number.name for number in _MAY_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN
    }
    listed = (name.strip() for name in names.split(","))
    return ",".join(name for name in listed if name not in ignored)


@_named_etcd_errors()
@_seeing_ends_of_children()
def launch_agent(
    config: LaunchConfig,
    entrypoint: Entrypoint | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run this node's workers until they end: what they returned, by global rank.

    Call it on the main thread: otherwise no signal is handled, and the end of that thread ends the
    workers.

    Raises:
        ChildFailedError: workers have failed, and no restart is left; a `FinalChildFailedError` if
            a restart could not mend it.
        TrainingFailed: they could not be started, or did not answer, and no restart is left.
        SignalException: this process has received a signal, and has ended the workers.
        RendezvousError: there is no world for this node.
        HealthCheckFailed: this node has not passed its health check.
        ConfigError: a value that cannot work.
    """
    if not entrypoint:
        raise ConfigError("entrypoint", entrypoint, "give a function or a command")
    if config.warm_start:
        check_command(entrypoint, args)
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
        log.warning("config has no run_id, generated a random run_id: %s", config.run_id)
    if config.rdzv_backend != BACKEND:
        env.withdraw_preferences()
    signals = _chosen_signals(config.signals_to_handle)
    env.update({"TORCHELASTIC_SIGNALS_TO_HANDLE": signals})
    name = _entrypoint_name(entrypoint, args)
    log.debug("launching %s as %s", name, config)
    initialize_metrics(MetricsConfig(config.metrics_cfg))
    parameters = _rendezvous_parameters(config)
    strategy = _strategy(config)
    if isinstance(strategy, SoftRestartPolicyStrategy) and parameters.backend == "static":
        reason = "a soft restart policy needs a back end whose worlds change: lighthouse or c10d"
        raise ConfigError("rdzv_backend", "static", reason)
    if isinstance(strategy, SoftRestartPolicyStrategy):
        # torch's agents would keep the address of the first world's store, which a node that joins
        # later does not know. Workers get another one.
        env.update({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    handler = _rendezvous_handler(parameters)
    preload = config.warm_start_preload if config.warm_start else None
    health = NodeHealth(config.health_check, config.health_check_timeout)
    health.check()
    with (
        recording_progress(config.nproc_per_node, socket.gethostname()) as progress,
        health.owned(),
    ):
        limit = config.max_restarts_without_progress
        settings = AgentSettings(strategy, parameters, signals, progress, health, limit, preload)
        agent = _agent(config, (entrypoint, args), settings, handler, health_check_server)
        return _run(agent, handler, name, config.event_log_handler)


def _run(
    agent: ElasticAgent, handler: RendezvousHandler, name: str, event_log_handler: str
) -> dict[int, Any]:
    """Run the agent, and report its end to the others, unless it has done so."""
    ends_run = True
    try:
        return _run_agent(agent, name, event_log_handler)
    except (SignalException, HealthCheckFailed):
        # Shutting down would close the run for all, also for this node's next attempt.
        ends_run = False
        raise
    finally:
        if ends_run and not agent.has_left:
            handler.shutdown()


def _run_agent(agent: ElasticAgent, name: str, event_log_handler: str) -> dict[int, Any]:
    try:
        result: RunResult | None = agent.run()
    except Exception:
        events.record(agent.get_event_failed(), event_log_handler)
        raise
    events.record(agent.get_event_succeeded(), event_log_handler)  # the agent, not its workers
    if result is None:  # the rendezvous has ended gracefully, without this node
        return {}
    if result.is_failed() and agent.final_reason:
        log.error("no restart would help: %s", agent.final_reason)
        raise FinalChildFailedError(name=name, failures=result.failures)
    if result.is_failed():
        raise ChildFailedError(name=name, failures=result.failures)
    return result.return_values


def _rendezvous_parameters(config: LaunchConfig) -> RendezvousParameters:
    endpoint, options = config.rdzv_endpoint, config.rdzv_configs
    if config.rdzv_backend == BACKEND:
        endpoint = endpoint or env.Environment().lighthouse_address or ""
        options = {**options, **_lighthouse_options(config)}
    try:
        return RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **options,
        )
    except ValueError as error:
        raise ConfigError("rdzv_backend", config.rdzv_backend, str(error)) from None


def _lighthouse_options(config: LaunchConfig) -> dict[str, Any]:
    """Options of this node, and those of the run that are not the usual ones."""
    of_run = {
        "max_run_failures": (config.max_run_failures, None),
        "max_node_failures": (config.max_node_failures, None),
        "failure_window": (config.failure_window, FAILURE_WINDOW_S),
        "exit_barrier": (config.exit_barrier, "alive"),
    }
    return {
        "num_workers": config.nproc_per_node,
        "role": config.role,
        **{name: value for name, (value, usual) in of_run.items() if value != usual},
    }


def _rendezvous_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    if parameters.backend == BACKEND:  # without a look at other packages' back ends
        return create_handler(parameters)
    try:
        return registry.get_rendezvous_handler(parameters)
    except UsageError:
        raise
    except ImportError as error:
        hint = "pip install python-etcd" if parameters.backend.startswith("etcd") else "install it"
        raise ConfigError("rdzv_backend", parameters.backend, f"{error} ({hint})") from error
    except ValueError as error:  # there is no such back end, or its settings cannot work
        raise ConfigError("rdzv_backend", parameters.backend, str(error)) from error


def _agent(
    config: LaunchConfig,
    call: tuple[Entrypoint, list[Any]],
    settings: AgentSettings,
    handler: RendezvousHandler,
    health_check_server: Any,
) -> ElasticAgent:
    master_addr, master_port = _static_address(settings.parameters)
    entrypoint, args = tied(call[0], tuple(call[1]))
    spec = _accepted(
        _NamedSpec,
        name=_spec_name(call[0]),
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=args,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        **_newer(config),
    )
    agent: ElasticAgent = _accepted(
        ElasticAgent,
        spec=spec,
        settings=settings,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        exit_barrier_timeout=config.exit_barrier_timeout,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=getattr(config, "shutdown_timeout", None),
        health_check_server=health_check_server,
    )
    return agent


def _strategy(config: LaunchConfig) -> RestartPolicyStrategy:
    if isinstance(config.restart_policy, RestartPolicyStrategy):
        return config.restart_policy
    if not config.restart_policy.is_soft:
        return HardRestartPolicyStrategy()
    return SoftRestartPolicyStrategy(
        config.restart_policy,
        config.soft_ready_timeout,
        config.max_soft_failures,
        config.failure_window,
        config.stopped_worker_timeout,
    )


def _policy(text: str) -> RestartPolicy:
    try:
        return RestartPolicy(text)
    except ValueError:
        known = ", ".join(policy.value for policy in RestartPolicy)
        raise ConfigError("restart_policy", text, f"use one of {known}") from None


@dataclass
class _NamedSpec(WorkerSpec):
    """A spec that reports the ``name`` of the user's program instead of our wrapper's."""

    name: str = ""

    def get_entrypoint_name(self) -> str:
        return self.name


def _static_address(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """Address of the store, where the user has given it."""
    if parameters.backend != "static":
        return None, None
    endpoint = parameters.endpoint.strip()
    address, port = parse_rendezvous_endpoint(endpoint, default_port=-1)
    if not endpoint or port == -1:
        raise ConfigError(
            "rdzv_endpoint", endpoint, "give --master-addr and --master-port, or host:port here"
        )
    return address, port


# Arguments that torch has had for some releases only.
_NEWER = (
    "numa_options",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "virtual_local_rank",
)


def _newer(config: LaunchConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _NEWER if hasattr(config, name)}


def _parameters(kind: type) -> Iterable[str]:
    """Arguments of its constructor."""
    return inspect.signature(kind.__init__).parameters  # type: ignore[misc]


def _accepted(kind: type, **arguments: Any) -> Any:
    """``kind`` with those of the ``arguments`` that this release of torch knows."""
    known = {name for each in kind.__mro__ for name in _parameters(each)}
    return kind(**{name: value for name, value in arguments.items() if name in known})


def _spec_name(entrypoint: Entrypoint) -> str:
    if isinstance(entrypoint, str):
        return entrypoint.rsplit("/", 1)[-1]
    return entrypoint.__qualname__


def _entrypoint_name(entrypoint: Entrypoint, args: list[Any]) -> str:
    """What the report of a failure calls it: a function, a script, or a program."""
    if not isinstance(entrypoint, str):
        return entrypoint.__name__
    if entrypoint == sys.executable:
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint


def from_torch(config: torch_launcher.LaunchConfig, **more: Any) -> LaunchConfig:
    """Our configuration with the values of torch's ``config``, and ``more`` fields."""
    fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return LaunchConfig(**fields, **more)
