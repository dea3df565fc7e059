"""The metrics of a manager, served on a thread of their own.

Needs prometheus-client (the extra ``metrics``): import it only where metrics are served.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from torchft_svc.host.address import HostPort
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.telemetry import catalog
from torchft_svc.telemetry.exposition import Family, build_info, durations, values
from torchft_svc.telemetry.rpc_errors import RpcErrors
from torchft_svc.telemetry.serving import MetricsServer


class ManagerMetrics:
    """Collects the metrics of the manager of one group.

    The event loop goes on meanwhile: what is read here are single values, and copies.
    """

    def __init__(self, driver: ManagerDriver, errors: RpcErrors, job: str, group: str) -> None:
        self._driver = driver
        self._errors = errors
        self._labels = (job, group)

    def collect(self) -> Iterator[Family]:
        """All metrics of this moment; see `prometheus_client.registry.Collector`."""
        driver, counts, labels = self._driver, self._driver.counts, self._labels
        yield from build_info(catalog.Program.MANAGER)
        yield values(catalog.RPC_ERRORS, dict(self._errors.counts).items())
        yield values(catalog.MANAGER_CONNECTED, [(labels, float(counts.is_connected))])
        yield values(catalog.MANAGER_WORKERS, [(labels, driver.num_attached)])
        yield values(catalog.MANAGER_STEP, [(labels, driver.group.reached())])
        outcomes = (("formed", counts.num_formed), ("failed", counts.num_failed))
        yield values(catalog.MANAGER_QUORUMS, [((*labels, name), num) for name, num in outcomes])
        yield durations(catalog.MANAGER_QUORUM_DURATION, [(labels, counts.durations)])


def serve_metrics(
    bind: HostPort, driver: ManagerDriver, errors: RpcErrors, job: str, group: str
) -> MetricsServer:
    """Serve the metrics of a manager at ``bind`` until the server is closed.

    Raises:
        AddressError: nothing can be bound there.
    """
    registry = CollectorRegistry()
    registry.register(ManagerMetrics(driver, errors, job, group))
    return MetricsServer(bind, registry)
