"""Starts all parts of a manager, and ends them in order."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchft_svc import coordination
from torchft_svc.client import checkpointing
from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.process.background import BackgroundThread
from torchft_svc.client.process.deadlines import Timer
from torchft_svc.client.process.draining import TermSignal
from torchft_svc.client.process.ending import (
    LAST_WORDS_S,
    end_now,
    ends_on_purpose,
    failure,
)
from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.recording import FlightRecorder
from torchft_svc.client.process_groups.registry import make_process_group
from torchft_svc.client.process_groups.torch_group import adopt_torch_group
from torchft_svc.client.runtime.bootstrap import (
    GroupServices,
    GroupStore,
    StartingServices,
    open_store,
)
from torchft_svc.client.runtime.lingering import Lingering
from torchft_svc.client.runtime.observing import Observers, observe
from torchft_svc.client.runtime.trainer_log import StepPosition, speak_on_stderr, speaker_of
from torchft_svc.client.step.round import Dependencies, RoundRules
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.client.step.state import StateRegistry
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.core.quorum.worker.step import StepMachine
from torchft_svc.env import Environment
from torchft_svc.host.address import advertised_host, parse_address, split_addresses
from torchft_svc.host.health_check import DEFAULT_TIMEOUT_S, check_health
from torchft_svc.host.progress_file import ProgressFile, open_progress
from torchft_svc.settings import GroupPlace, ServiceOptions

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from torchft_svc.coordination import ManagerClient

log = logging.getLogger(__name__)

# A program that was interrupted must be gone within 2 s, its children included.
_JOIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerParts:
    """What the caller supplies; what is None is created here."""

    pg: dist.ProcessGroup | str | None
    transport: CheckpointTransport[Any] | None
    registry: StateRegistry
    step: StepMachine
    handles_term: bool
    store: tuple[str | None, int | None]  # host and port
    metrics_registry: CollectorRegistry | None


@dataclass(slots=True)
class Runtime:
    """The running parts; `close` ends each of them, even if others fail."""

    deps: Dependencies
    worker: SharedRound
    thread: BackgroundThread
    timer: Timer
    group_store: GroupStore | None
    services: GroupServices
    lighthouse_address: str
    term_signal: TermSignal | None
    recorder: FlightRecorder | None
    observers: Observers
    lingering: Lingering
    closed: bool = False

    def close(self, wait: bool) -> None:
        """Stop, once groups that heal from this one have its state; idempotent.

        ``wait`` also joins the transport's threads.
        """
        if self.closed:
            return
        self.closed = True
        try:
            if ends_on_purpose():
                self.lingering.wait()
        except Exception:
            log.exception("waiting for groups that heal from this one")
        finally:  # an interrupt ends the wait only
            self._end_parts(wait)

    def _end_parts(self, wait: bool) -> None:
        self.deps.pg.interrupt()
        endings: list[Callable[[], object]] = [
            *([] if self.term_signal is None else [self.term_signal.close]),
            # Before the connections end: the others learn why they will (rule E9).
            functools.partial(self.deps.client.close, failure()),
            lambda: self.deps.transport.shutdown(wait),
            lambda: self.thread.close(_JOIN_S),
            lambda: self.timer.close(_JOIN_S),
            self.deps.watchdog.close,
            self.deps.pg.shutdown,
            self.observers.close,
            self._finish_records,
            self.services.close,
            self._drop_store,
        ]
        for end in endings:
            try:
                end()
            except Exception:
                log.exception("shutting down")

    def _finish_records(self) -> None:
        if self.recorder is not None:
            self.recorder.close(_JOIN_S)

    def _drop_store(self) -> None:
        """Drop the last reference, which stops its server; otherwise its descriptors would live as
        long as the model, which references this runtime."""
        self.group_store = None


def start_runtime(
    rules: RoundRules,
    options: ServiceOptions,
    environment: Environment,
    given: CallerParts,
) -> Runtime:
    """Start what ``given`` lacks; if a part fails, the earlier ones are stopped again."""
    position = StepPosition()
    _begin_worker(rules.place, options, environment, position)
    progress = open_progress(environment.progress_file)
    timeouts, timeout = rules.timeouts, timedelta(seconds=rules.timeouts.collective_s)
    with contextlib.ExitStack() as undo:
        records = options.flight_recorder
        recorder = FlightRecorder.of_job(records, options.job_id) if records else None
        store = open_store(rules.place, options, environment, timeouts, *given.store)
        starting = StartingServices(rules.place, options, environment, timeouts, store)
        undo.callback(starting.close)
        # Both names are imported here, while the manager's process starts.
        connect = coordination.ManagerClient
        transport = given.transport
        if transport is None:
            transport = checkpointing.HTTPTransport(
                timeout, hostname=_host(options, environment), security=options.security
            )
            undo.callback(transport.shutdown, False)
        given.registry.check_with(transport.check_state)
        pg = _process_group(given.pg, timeout)
        if recorder is not None:
            pg.record_to(recorder)
        services = starting.wait()
        undo.callback(services.close)
        manager = services.manager_address, timedelta(seconds=timeouts.connect_s), services.locator
        client = connect(*manager, security=options.security)
        undo.callback(client.close)
        end = functools.partial(_end, pg, recorder)
        kill = functools.partial(end, client.stands_still)
        worker = SharedRound(rules.for_worker(services.locator.patience_s, pg), given.step, pg)
        position.worker = worker
        services.resume_with(worker.membership_to_resume)
        client.attach(rules.place.group_rank, _listeners(worker, kill), worker.time_use.tally)
        shown = observe(rules.place, options, environment, given.metrics_registry, worker)
        undo.callback(shown.close)
        runtime = Runtime(
            deps=Dependencies(
                client=client,
                pg=pg,
                transport=transport,
                registry=given.registry,
                watchdog=Watchdog(timeouts.watchdog_s, functools.partial(end, lambda: True)),
                progress=progress,
                streams=shown.streams,
                tracer=shown.tracer,
            ),
            worker=worker,
            thread=BackgroundThread("torchft-quorum"),
            timer=Timer("torchft-timer"),
            group_store=store,
            services=services,
            lighthouse_address=options.lighthouse_address,
            term_signal=_term_signal(worker, client, progress, environment.grace_s)
            if given.handles_term
            else None,
            recorder=recorder,
            observers=shown,
            lingering=Lingering(worker, transport, starting.keys, rules.place),
        )
        undo.pop_all()
    if progress.step is None:  # it was not restarted
        progress.record_step(0)
    return runtime


def _process_group(given: dist.ProcessGroup | str | None, timeout: timedelta) -> ProcessGroup:
    """Return the caller's process group, or a new one of the backend that it names."""
    if isinstance(given, ProcessGroup):
        return given
    if isinstance(given, dist.ProcessGroup):
        return adopt_torch_group(given, timeout)
    made: ProcessGroup = make_process_group("gloo" if given is None else given, timeout)
    return made


def _term_signal(
    worker: SharedRound, client: ManagerClient, progress: ProgressFile, grace_s: float | None
) -> TermSignal:
    """Let SIGTERM drain the group; a launcher that knows for how long has recorded it."""

    def inform(command: Drain) -> None:
        within_s = command.within_s
        within = None if within_s is None else timedelta(seconds=within_s)
        client.drain(command.reason, within=within)

    def left_s() -> float | None:
        until = progress.drain_until
        return grace_s if until is None else max(0.001, until - time.monotonic())

    return TermSignal(worker.drain, inform, left_s)


def _listeners(worker: SharedRound, kill: Callable[[str], None]) -> coordination.Listeners:
    return coordination.Listeners(
        on_loss=worker.record_loss,
        on_kill=kill,
        on_drain=worker.drain,
        on_waiting=worker.receive_newcomer,
        on_no_quorum=worker.receive_no_quorum,
        on_break=worker.stream_lost,
        on_cut=worker.stream_ended,
        on_term=worker.record_term_end,
    )


def _begin_worker(
    place: GroupPlace, options: ServiceOptions, environment: Environment, position: StepPosition
) -> None:
    speaker = speaker_of(place, options, position)
    speak_on_stderr(environment.log_level or "info", environment.log_format, speaker)
    level = logging.INFO if place.leads else logging.DEBUG
    _check_health(environment)
    log.log(level, "joins job %s at %s", options.job_id, options.lighthouse_address)


def _check_health(environment: Environment) -> None:
    """Check this machine, once for all of its workers, before one of them joins the group."""
    command = environment.health_check
    if command is not None and not environment.local_rank:
        check_health(command, environment.health_check_timeout_s or DEFAULT_TIMEOUT_S)


def _end(
    pg: ProcessGroup,
    recorder: FlightRecorder | None,
    hangs: Callable[[], bool],
    reason: str,
) -> None:
    """End this process, but first write the flight record, which shows missing collectives."""

    def save(recorder: FlightRecorder) -> None:
        pg.save_record(reason)
        recorder.close(LAST_WORDS_S)

    try:
        if recorder is not None:
            # On a thread: a stuck library must not keep this process alive.
            saving = threading.Thread(
                target=save, args=(recorder,), name="torchft-last-flight", daemon=True
            )
            saving.start()
            saving.join(LAST_WORDS_S)
    finally:
        end_now(reason, hangs=hangs())


def _host(options: ServiceOptions, environment: Environment) -> str:
    """The host at which other groups fetch this worker's state."""
    if environment.checkpoint_host is not None:
        return environment.checkpoint_host
    return options.hostname or advertised_host(
        *map(parse_address, split_addresses(options.lighthouse_address))
    )
