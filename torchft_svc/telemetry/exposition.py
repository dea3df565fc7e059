"""Makes Prometheus' pages of what a program counts. Needs prometheus-client: import it only where
metrics are switched on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from torchft_svc.telemetry.catalog import BUILD_INFO, Metric, MetricKind, Program
from torchft_svc.telemetry.histogram import DurationHistogram
from torchft_svc.version import VERSION

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def values(metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]]) -> Family:
    """The family of ``metric``, with a value for each tuple of labels."""
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily
    family = kind(metric.family, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def one_value(metric: Metric, value: float) -> Family:
    """The family of ``metric``, which has no labels."""
    return values(metric, [((), value)])


def durations(
    metric: Metric, samples: Iterable[tuple[tuple[str, ...], DurationHistogram]]
) -> Family:
    """The family of ``metric``, with a histogram for each tuple of labels."""
    family = HistogramMetricFamily(metric.family, metric.help, labels=metric.labels)
    for labels, histogram in samples:
        family.add_metric(labels, histogram.buckets(), histogram.sum_s)
    return family


def build_info(program: Program) -> Iterator[Family]:
    """The family that names the version of ``program``."""
    yield values(BUILD_INFO, [((VERSION, program.value), 1.0)])


def page(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """The present values as text, and its content type; ``accept``: the header of the request."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
