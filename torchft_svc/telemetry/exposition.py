"""Makes Prometheus' pages of what a program counts. Needs prometheus-client: import it only where
metrics are switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

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


@dataclass(frozen=True, slots=True)
class FamilyPart:
    """Some of the samples of a gauge or counter that has thousands."""

    metric: Metric
    samples: Sequence[tuple[tuple[str, ...], float]]

    def lines(self) -> str:
        """The samples as text, as the library writes them, which takes five times as long."""
        names = self.metric.labels
        order = sorted(range(len(names)), key=names.__getitem__)
        labels = ",".join(f'{names[index]}="%s"' for index in order)
        line = f"{self.metric.name}{{{labels}}} %s\n"
        written: Callable[[float], str] = floatToGoString  # which has no types
        return "".join(
            line % (*(_escaped(labelled[index]) for index in order), written(value))
            for labelled, value in self.samples
        )


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def many_values(
    metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]]
) -> Iterator[FamilyPart]:
    """The family of ``metric`` in parts of `SAMPLES_AT_ONCE`; for `page_in_pieces`."""
    left = iter(samples)
    part = list(islice(left, SAMPLES_AT_ONCE))
    yield FamilyPart(metric, part)
    while part := list(islice(left, SAMPLES_AT_ONCE)):
        yield FamilyPart(metric, part)


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


def page_in_pieces(
    families: Iterable[Family | FamilyPart], accept: str = ""
) -> Pieces[tuple[bytes, str]]:
    """The values as text, and its content type, one of ``families`` at a time.

    Parts of one metric have to follow each other. ``accept``: the header of the request.
    """
    encode, content_type = choose_encoder(accept)
    text: list[bytes] = []
    end, last = b"", None
    for family in families:
        if not isinstance(family, FamilyPart):
            page = encode(_registry_of(family))
        elif family.metric is not last:  # it is described before its first part
            page = encode(_registry_of(values(family.metric, ())))
        else:
            page = end
        end = _END if page.endswith(_END) else b""
        text.append(page.removesuffix(_END))
        last = None
        if isinstance(family, FamilyPart):
            text.append(family.lines().encode())
            last = family.metric
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
