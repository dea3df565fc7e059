"""What shows a worker to monitoring, as far as the program or the environment asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchft_svc.client.step.event_streams import COMMITS, ERRORS, QUORUMS, EventStreams
from torchft_svc.client.step.round import RoundTracer
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.env import METRICS_PORT_VARIABLE, Environment
from torchft_svc.errors import ConfigError
from torchft_svc.host.uninterruptible import nothing
from torchft_svc.settings import GroupPlace, ServiceOptions
from torchft_svc.telemetry.exporting import open_telemetry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


@dataclass(frozen=True, slots=True)
class Observers:
    """Loggers and spans of a worker's events; `close` ends its metrics and exporters."""

    streams: EventStreams
    tracer: RoundTracer | None
    hide_metrics: Callable[[], None]
    end_export: Callable[[], None]

    def close(self) -> None:
        """End all; may be called twice."""
        self.hide_metrics()
        self.end_export()


def observe(
    place: GroupPlace,
    options: ServiceOptions,
    environment: Environment,
    registry: CollectorRegistry | None,
    worker: SharedRound,
) -> Observers:
    """Show ``worker`` where the program (``registry``) or the environment wants to see it.

    Raises:
        ConfigError: prometheus-client, which the metrics need, is not installed.
        AddressError: nothing can be bound at the port for metrics.
    """
    job, group, rank = options.job_id, options.replica_name, place.group_rank
    streams = EventStreams(job, group, rank)
    hide = _show_metrics((job, group, str(rank)), environment, registry, worker)
    telemetry = open_telemetry(environment, "trainer", {"job": job, "group": group, "rank": rank})
    if telemetry is None:
        return Observers(streams, None, hide, nothing)
    from torchft_svc.client.runtime.tracing import OtelTracer  # it needs OpenTelemetry, too

    telemetry.export_logs((QUORUMS, ERRORS), logging.INFO)
    # A record for each step costs a fifth of a step of 4 ms: only if the program wants them.
    telemetry.export_logs([COMMITS])
    return Observers(streams, OtelTracer(telemetry, job, group, rank), hide, telemetry.close)


def _show_metrics(
    labels: tuple[str, str, str],
    environment: Environment,
    registry: CollectorRegistry | None,
    worker: SharedRound,
) -> Callable[[], None]:
    """Show the metrics of a worker, if they are wanted; returns how to end that."""
    port = environment.metrics_port
    if port is None and registry is None:
        return nothing
    try:
        from torchft_svc.client.runtime.metrics import TrainerSource, show_trainer
    except ImportError as error:
        field = "metrics_registry" if port is None else METRICS_PORT_VARIABLE
        raise ConfigError(field, port, f"{error}: install torchft-svc[metrics]") from None
    if port:
        port += environment.local_rank or 0  # each worker of a machine needs its own
    return show_trainer(TrainerSource(labels, worker), registry, port)
