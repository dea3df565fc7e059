"""Makes Prometheus' pages of what a program counts. Needs prometheus-client: import it only where
metrics are switched on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from torchft_svc.core.pieces import Pieces
from torchft_svc.telemetry.catalog import BUILD_INFO, Metric, MetricKind, Program
from torchft_svc.telemetry.histogram import DurationHistogram
from torchft_svc.version import VERSION

# How many samples are collected and encoded before other work goes first: some milliseconds.
SAMPLES_AT_ONCE = 500
_END = b"# EOF\n"

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def values(metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]]) -> Family:
    """The family of ``metric``, with a value for each tuple of labels."""
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily
    family = kind(metric.family, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def many_values(
    metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]]
) -> Iterator[Family]:
    """The family of ``metric`` in parts of `SAMPLES_AT_ONCE`; for `page_in_pieces`."""
    left = iter(samples)
    part = list(islice(left, SAMPLES_AT_ONCE))
    yield values(metric, part)
    while part := list(islice(left, SAMPLES_AT_ONCE)):
        yield values(metric, part)


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


def page_in_pieces(families: Iterable[Family], accept: str = "") -> Pieces[tuple[bytes, str]]:
    """The values as text, and its content type, one of ``families`` at a time.

    Several with one name, one after the other, are parts of one. ``accept``: the header of the
    request.
    """
    encode, content_type = choose_encoder(accept)
    text: list[bytes] = []
    end, last = b"", ""
    for family in families:
        part = encode(_registry_of(family))
        end = _END if part.endswith(_END) else b""
        part = part.removesuffix(_END)
        if family.name == last:  # it is described in its first part
            lines = part.split(b"\n")
            part = b"\n".join(line for line in lines if not line.startswith(b"#"))
        text.append(part)
        last = family.name
        yield
    return b"".join(text) + end, content_type


def _registry_of(family: Family) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Collected(family))
    return registry


class _Collected(Collector):
    """A family that was collected."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterable[Family]:
        return (self._family,)
