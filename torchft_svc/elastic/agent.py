"""The agent of a node: torch's own, with a restart policy, whose workers never outlive it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchft_svc.core.launch.agent import AgentConfig, AgentMachine, Outcome
from torchft_svc.core.launch.world import World
from torchft_svc.core.restart_progress import RestartProgress
from torchft_svc.elastic.driver import AgentDriver, Meeting, News
from torchft_svc.elastic.health import NodeHealth
from torchft_svc.elastic.local_group import LocalGroup
from torchft_svc.elastic.policy import RestartPolicyStrategy, SoftRestartPolicyStrategy
from torchft_svc.elastic.progress import WorkerProgress, usable_s
from torchft_svc.elastic.rendezvous.config import RendezvousConfig, rendezvous_config
from torchft_svc.elastic.rendezvous.handler import LighthouseRendezvous, NodeDrained
from torchft_svc.elastic.rendezvous.link import RendezvousLink
from torchft_svc.elastic.rendezvous.own_lighthouse import own_lighthouse
from torchft_svc.elastic.rendezvous.polled import PolledMeeting
from torchft_svc.elastic.warm_start import WarmStart
from torchft_svc.elastic.workers import LocalWorkers, end_alone, untied
from torchft_svc.env import Environment
from torchft_svc.errors import TrainingFailed
from torchft_svc.host.address import HostPort, advertised_host
from torchft_svc.host.interfaces import chosen_host
from torchft_svc.rpc.security import PLAIN

log = logging.getLogger(__name__)

# A lost node is reported within milliseconds, a process that is killed with it ends at once, and
# exceptions of others take some time to end theirs.
CONSEQUENCE_S = 1.0
# torch's: between the signal that ends workers and SIGKILL.
KILL_AFTER_S = 30


@dataclass(frozen=True)
class AgentSettings:
    """What an agent needs besides torch's own arguments.

    ``parameters`` are those of the rendezvous; ``signals`` end the agent and its workers;
    ``progress`` is what the workers record, ``health`` checks the machine;
    ``max_restarts_without_progress`` restarts in a row that do not get beyond a step are the last
    ones (None: no limit); ``preload`` are the modules that a fork server imports for workers (None:
    there is none).
    """

    strategy: RestartPolicyStrategy
    parameters: RendezvousParameters
    signals: str
    progress: WorkerProgress
    health: NodeHealth
    max_restarts_without_progress: int | None = None
    preload: Sequence[str] | None = None


class ElasticAgent(LocalElasticAgent):
    """Runs the workers of ``spec`` as the strategy of ``settings`` says."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: AgentSettings,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300.0,
        log_line_prefix_template: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            spec, logs_specs, start_method, exit_barrier_timeout, log_line_prefix_template, **more
        )
        self._settings = settings
        self._restart_progress = RestartProgress(settings.max_restarts_without_progress)
        self.final_reason = ""  # why a restart of this node would not help
        self.has_left = False  # it has reported how this node ends
        self._waits_since: float | None = time.monotonic()  # for a world

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        return self._settings.strategy.run(self)

    def run_hard(self) -> RunResult:
        """torch's loop, in which every change restarts all workers."""
        try:
            return super()._invoke_run(self._worker_group.spec.role)
        except NodeDrained as error:
            raise RendezvousGracefulExitError(str(error)) from None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Monitor as torch does; failures because the world has broken use up no restart."""
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        handler, final_code = worker_group.spec.rdzv_handler, self._settings.progress.final_code
        is_final = any(each.exitcode == final_code for each in result.failures.values())
        if isinstance(handler, LighthouseRendezvous):
            may_be = not is_final and _may_be_a_consequence(result)
            if may_be and handler.wait_for_change(CONSEQUENCE_S):
                log.info("workers have failed because their world has broken")
                return RunResult(state=WorkerState.HEALTHY)  # torch looks for changes then
            handler.record_failure()
        self._settings.health.record_failure()
        why_in_vain = self._restart_progress.record_failure(self._settings.progress.step)
        if is_final or why_in_vain:
            self.final_reason = why_in_vain or f"a worker has ended with status {final_code}"
            self._remaining_restarts = 0  # torch ends then
        return result

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Start the workers as torch does, unless their machine is why they have failed."""
        self._settings.health.check()
        super()._initialize_workers(worker_group)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = KILL_AFTER_S, **more: Any
    ) -> None:
        """End as torch does; what Python programs have started gets SIGKILL when they have ended.

        torch signals their sessions: without the workers of its DataLoader, a program cannot finish
        its step.
        """
        spec = self._worker_group.spec
        handler, within_s = spec.rdzv_handler, None
        if isinstance(handler, LighthouseRendezvous):
            within_s = handler.drained_within_s
        if isinstance(sys.exc_info()[1], SignalException):
            within_s = Environment().grace_s
        if within_s is not None:
            timeout = math.ceil(usable_s(within_s))
        self._settings.progress.record_end(timeout)
        processes = [
            each.proc for each in getattr(self._pcontext, "subprocess_handlers", {}).values()
        ]
        is_python = untied((spec.entrypoint, *spec.args))[0] == sys.executable
        if (
            is_python
            and death_sig is not signal.SIGKILL
            and not end_alone(processes, death_sig, timeout)
        ):
            death_sig = signal.SIGKILL
        accepted = inspect.signature(super()._shutdown).parameters
        if "timeout" in accepted:  # older releases of torch have none
            more["timeout"] = timeout
        super()._shutdown(death_sig, **more)

    def _exit_barrier(self) -> None:
        """Wait as torch does; a lighthouse knows which of the others still live."""
        handler = self._worker_group.spec.rdzv_handler
        if not isinstance(handler, LighthouseRendezvous):
            super()._exit_barrier()  # type: ignore[no-untyped-call]
            return
        log.info("finished; waiting %g s for the others", self._exit_barrier_timeout)
        self._in_exit_barrier = True
        try:
            if not handler.wait_for_others(self._exit_barrier_timeout):
                log.warning("other nodes have not finished in time")
        finally:
            self._in_exit_barrier = False

    def run_soft(self, strategy: SoftRestartPolicyStrategy) -> RunResult:
        """Run our loop, which sends workers their next world, and waits for events.

        Raises:
            SignalException, RendezvousError: see `AgentDriver.run`.
            TrainingFailed: no worker has failed, but they could not be started, or did not answer.
        """
        spec = self._worker_group.spec
        self.has_left = True
        with contextlib.ExitStack() as open_things:
            config = self._rendezvous_config()
            machine = AgentMachine(
                AgentConfig(
                    node=config.node,
                    settings=config.settings,
                    policy=strategy.policy,
                    max_restarts=spec.max_restarts,
                    ready_timeout_s=strategy.ready_timeout_s,
                    exit_barrier_timeout_s=self._exit_barrier_timeout,
                    max_soft_failures=strategy.max_soft_failures,
                    max_restarts_without_progress=self._settings.max_restarts_without_progress,
                    failure_window_s=strategy.failure_window_s,
                    can_warm_up=self._has_lighthouse,
                    reactions=strategy.reactions(),
                ),
                time.monotonic(),
            )
            self._machine = machine
            group = self._group(config.node.node_id)
            driver = AgentDriver(
                machine,
                group,
                self._meet(config, open_things),
                self._shutdown_timeout,
                self._settings.progress,
                self._settings.health,
                config.connect_timeout_s,
                strategy.stopped_timeout_s,
            )
            end = driver.run(self._settings.signals)
            self._remaining_restarts = machine.num_restarts_left
            self.final_reason = end.reason if end.final else ""
            result = self._result(end.outcome, group)
            if result.is_failed() and not result.failures:  # torch could not say why
                raise TrainingFailed(end.reason, machine.num_restarts, end.final)
            return result

    @property
    def _has_lighthouse(self) -> bool:
        return isinstance(self._worker_group.spec.rdzv_handler, LighthouseRendezvous)

    def _rendezvous_config(self) -> RendezvousConfig:
        """The configuration of this node; options of other back ends are left out."""
        parameters, spec = self._settings.parameters, self._worker_group.spec
        options = parameters.config if self._has_lighthouse else {}
        host = parameters.local_addr
        if not self._has_lighthouse:
            if "join_timeout" in parameters.config:
                options = {"join_timeout": parameters.config["join_timeout"]}
            at, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=1)
            host = host or chosen_host(Environment()) or advertised_host(HostPort(at, port or 1))
        return rendezvous_config(
            endpoint=parameters.endpoint if self._has_lighthouse else f"{host}:1",
            run_id=parameters.run_id,
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            local_addr=host,
            options={**options, "num_workers": spec.local_world_size, "role": spec.role},
            is_soft=True,
        )

    def _meet(
        self, config: RendezvousConfig, open_things: contextlib.ExitStack
    ) -> Callable[[Callable[[News], None]], Meeting]:
        def meet(on_news: Callable[[News], None]) -> Meeting:
            spec = self._worker_group.spec
            if not self._has_lighthouse:
                self._warn_of_last_call()
                return PolledMeeting(spec.rdzv_handler, config.node, spec.monitor_interval, on_news)
            endpoint, security = config.endpoint, None
            if not endpoint:
                own = open_things.enter_context(own_lighthouse())
                endpoint, security = own.address(), PLAIN
            return RendezvousLink(
                endpoint, config.run_id, config.node, config.settings, on_news, security
            )

        return meet

    def _warn_of_last_call(self) -> None:
        """torch's other back ends wait so long for more nodes, at each join and loss."""
        parameters = self._settings.parameters
        may_be_fewer = parameters.min_nodes < parameters.max_nodes
        if may_be_fewer and "last_call_timeout" not in parameters.config:
            log.warning(
                "with fewer than %d nodes, %s begins each new world after 30 s: it waits for more "
                "(--rdzv-conf last_call_timeout=1 makes that 1 s)",
                parameters.max_nodes,
                parameters.backend,
            )

    def _group(self, node_id: str) -> LocalGroup:
        spec = self._worker_group.spec
        prefix = None if self._log_line_prefix_template is None else self._line_prefix
        preload, warm = self._settings.preload, None
        if preload is not None:
            warm = WarmStart([str(word) for word in untied((spec.entrypoint, *spec.args))], preload)
        return LocalGroup(
            node_id=node_id,
            spec=spec,
            processes=LocalWorkers(spec, self._logs_specs, self._start_method, prefix, warm),
            prepare=self._prepare,
            on_start=self._note_start,
            on_world=self._note_world,
            on_pause=self._note_pause,
        )

    # -- what torchelastic's users see -------------------------------------------------------------

    def _prepare(self, environments: dict[int, dict[str, str]]) -> None:
        """What torch adds to the environments of workers that are about to be started."""
        spec = self._worker_group.spec
        set_local_rank: Any = getattr(self, "_set_local_rank_env", None)
        for local_rank, environment in environments.items():
            if set_local_rank is not None:
                set_local_rank(environment, local_rank, spec)
            else:  # before torch 2.9
                environment["LOCAL_RANK"] = str(local_rank)
        if self._worker_watchdog is not None:
            self._worker_watchdog.stop()
        self._setup_local_watchdog(envs=environments)
        if self._health_check_server is None:
            self._setup_healthcheck()

    def _note_start(self, world: World, pids: dict[int, int]) -> None:
        group = self._worker_group
        ids = {worker.local_rank: worker.id for worker in group.workers}
        self._set_world(world, {**ids, **pids})
        for local_rank in pids:
            event = self._construct_event("START", EventSource.WORKER, group.workers[local_rank])
            record(event, group.spec.event_log_handler)
        group.state = WorkerState.HEALTHY
        self._put_metrics()

    def _note_pause(self) -> None:
        if self._waits_since is None:
            self._waits_since = time.monotonic()

    def _note_world(self, world: World) -> None:
        self._set_world(
            world, {worker.local_rank: worker.id for worker in self._worker_group.workers}
        )
        if self._waits_since is not None:
            duration_ms = 1000 * (time.monotonic() - self._waits_since)
            event = self._construct_event("RENDEZVOUS", EventSource.AGENT, duration_ms=duration_ms)
            record(event, self._worker_group.spec.event_log_handler)
        self._waits_since = None
        self._put_metrics()

    def _set_world(self, world: World, ids: dict[int, Any]) -> None:
        """Describe the present world as torch does, for its events and results."""
        group: Any = self._worker_group
        ranks = world.ranks(self._machine.config.node.node_id)
        group.workers = []
        for local_rank in range(group.spec.local_world_size):
            worker = Worker(
                local_rank,
                global_rank=ranks.first_rank + local_rank,
                role_rank=ranks.first_role_rank + local_rank,
                world_size=ranks.world_size,
                role_world_size=ranks.role_world_size,
            )
            worker.id = ids.get(local_rank)
            group.workers.append(worker)
        group.group_rank, group.group_world_size = ranks.node_rank, ranks.num_nodes
        group.master_addr, group.master_port = world.master_addr, world.master_port

    def _put_metrics(self) -> None:
        self._remaining_restarts = self._machine.num_restarts_left
        role = self._worker_group.spec.role
        put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{role}.{self._worker_group.state.name.lower()}", 1)

    def _line_prefix(self, local_rank: int) -> str:
        worker = self._worker_group.workers[local_rank]
        return Template(self._log_line_prefix_template or "").safe_substitute(
            role_name=self._worker_group.spec.role, rank=worker.global_rank, local_rank=local_rank
        )

    def _result(self, outcome: Outcome, group: LocalGroup) -> RunResult:
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        if outcome is Outcome.SUCCEEDED:
            self._worker_group.state = WorkerState.SUCCEEDED
            values = {ranks[end.local_rank]: end.value for end in group.ends.values()}
            return RunResult(WorkerState.SUCCEEDED, return_values=values)
        self._worker_group.state = WorkerState.FAILED
        failures = {
            ranks[end.local_rank]: end.failure
            for end in group.ends.values()
            if end.failure is not None
        }
        return RunResult(WorkerState.FAILED, failures=failures)


def _may_be_a_consequence(result: RunResult) -> bool:
    """Whether workers may have failed because others have: by an exception, or an abort."""
    codes = [failure.exitcode for failure in result.failures.values()]
    return bool(codes) and all(code > 0 or code == -signal.SIGABRT for code in codes)
