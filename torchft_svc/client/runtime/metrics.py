"""The metrics of the trainers of this process, at a port or in the program's own registry.

They are read when they are asked for: a step costs the same with and without them. Needs
prometheus-client (the extra ``metrics``): import it only where metrics are switched on.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.core.quorum.tally import NO_TALLY
from torchft_svc.host.address import HostPort
from torchft_svc.telemetry import catalog
from torchft_svc.telemetry.exposition import Family, build_info, values
from torchft_svc.telemetry.serving import MetricsServer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerSource:
    """A worker, with the labels of its metrics: job, group and group rank."""

    labels: tuple[str, str, str]
    worker: SharedRound


class TrainerMetrics:
    """Collects the metrics of all workers of this process that are shown in one registry."""

    def __init__(self) -> None:
        self.sources: dict[int, TrainerSource] = {}

    def collect(self) -> Iterator[Family]:
        """All metrics of this moment; see `prometheus_client.registry.Collector`."""
        sources = list(self.sources.values())
        now = time.monotonic()
        yield from build_info(catalog.Program.TRAINER)
        seconds, steps = [], []
        for each in sources:
            tally = each.worker.time_use.tally(now) or NO_TALLY
            seconds += [
                ((*each.labels, phase), value)
                for phase, value in (
                    ("committed", tally.committed_s),
                    ("discarded", tally.discarded_s),
                    ("waiting", tally.waiting_s),
                    ("reconfiguring", tally.reconfiguring_s),
                    ("healing", tally.healing_s),
                )
            ]
            steps.append(((*each.labels, "committed"), tally.num_committed))
            steps.append(((*each.labels, "discarded"), tally.num_discarded))
        yield values(catalog.PHASE_SECONDS, seconds)
        yield values(catalog.TRAINER_STEPS, steps)
        for metric, read in _VALUES:
            yield values(metric, [(each.labels, read(each.worker)) for each in sources])


_VALUES: tuple[tuple[catalog.Metric, Callable[[SharedRound], float]], ...] = (
    (catalog.TRAINER_STEP, lambda worker: worker.state.step),
    (catalog.TRAINER_GROUPS, lambda worker: worker.state.participation.num_participants),
    (catalog.TRAINER_HEALS, lambda worker: worker.num_heals),
    (catalog.TRAINER_HEAL_BYTES, lambda worker: worker.healed_bytes),
)


class _Ports:
    """The servers of this process, by the port that was asked for, each with its registry."""

    def __init__(self) -> None:
        self.servers: dict[int, tuple[MetricsServer, CollectorRegistry]] = {}

    def open_registry(self, port: int) -> CollectorRegistry:
        """The registry that is served at ``port`` (0: any free one)."""
        if port not in self.servers:
            registry = CollectorRegistry()
            server = MetricsServer(HostPort("", port), registry)
            self.servers[port] = server, registry
            log.info("metrics are served at port %d", server.address.port)
        return self.servers[port][1]

    def close_registry(self, registry: CollectorRegistry) -> None:
        """End the server of ``registry``, if there is one."""
        for port, (server, served) in list(self.servers.items()):
            if served is registry:
                del self.servers[port]
                server.close()


_lock = threading.Lock()
_numbers = itertools.count()
_shown: WeakKeyDictionary[CollectorRegistry, TrainerMetrics] = WeakKeyDictionary()
_ports = _Ports()


def show_trainer(
    source: TrainerSource, registry: CollectorRegistry | None, port: int | None
) -> Callable[[], None]:
    """Show the metrics of a worker in the program's ``registry``, and at ``port`` (None: not).

    Returns a function that ends this.

    Raises:
        AddressError: nothing can be bound at the port.
    """
    number = next(_numbers)
    with _lock:
        registries = [] if registry is None else [registry]
        if port is not None:
            registries.append(_ports.open_registry(port))
        for each in registries:
            if each not in _shown:
                _shown[each] = TrainerMetrics()
                each.register(_shown[each])
            _shown[each].sources[number] = source

    def hide() -> None:
        with _lock:
            for each in registries:
                metrics = _shown[each]
                metrics.sources.pop(number, None)
                if not metrics.sources:
                    each.unregister(metrics)
                    del _shown[each]
                    _ports.close_registry(each)
        registries.clear()

    return hide
