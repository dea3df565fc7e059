"""Exports logs and traces by OpenTelemetry's protocol, from threads of its library.

Needs the extra ``otel``: import it only where `Environment.exports_telemetry` says so. The library
reads its ``OTEL_*`` variables itself. A collector that is down costs no thread of ours anything:
what waits for it is bounded, and dropped.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.logging.handler import LoggingHandler
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from torchft_svc.telemetry.trace_ids import change_span_id, trace_id
from torchft_svc.version import VERSION

# How long the end of a program waits until the last records are exported.
FLUSH_S = 2.0
_SCOPE = "torchft_svc"


class OtelHandler(LoggingHandler):
    """Passes log records to the exporter. For `TrainerLog` it is no configuration of the program's,
    and no reason to be silent."""

    is_ours = is_exporter = True


class _Ids(RandomIdGenerator):
    """Random ids, unless a span of the thread has fixed ones.

    The base class would draw from the random numbers of the program.
    """

    def __init__(self) -> None:
        self.fixed = threading.local()
        self._random = random.SystemRandom()

    def generate_span_id(self) -> int:
        fixed = getattr(self.fixed, "change", None)
        return self._random.randrange(1, 1 << 64) if fixed is None else change_span_id(*fixed)

    def generate_trace_id(self) -> int:
        fixed = getattr(self.fixed, "change", None)
        return self._random.randrange(1, 1 << 128) if fixed is None else trace_id(*fixed)


class Telemetry:
    """The exporters of one program, with ``fields`` such as job and group; ends with `close`."""

    def __init__(self, program: str, fields: Mapping[str, object]) -> None:
        attributes = {f"torchft.{name}": str(value) for name, value in fields.items()}
        resource = Resource.create(
            {"service.name": f"torchft-{program}", "service.version": VERSION, **attributes}
        )
        self._ids = _Ids()
        self._traces = TracerProvider(
            resource=resource, shutdown_on_exit=False, id_generator=self._ids
        )
        spans, records = OTLPSpanExporter(), OTLPLogExporter()
        for exporter in (spans, records):
            _draw_elsewhere(exporter)
        self._traces.add_span_processor(BatchSpanProcessor(spans))
        self._logs = LoggerProvider(resource=resource, shutdown_on_exit=False)
        self._logs.add_log_record_processor(BatchLogRecordProcessor(records))
        self._handler = OtelHandler(logger_provider=self._logs, log_code_attributes=True)
        self._handled: list[tuple[logging.Logger, bool]] = []
        self.tracer = self._traces.get_tracer(_SCOPE, VERSION)

    def export_logs(self, loggers: Sequence[logging.Logger], level: int | None = None) -> None:
        """Export the records of ``loggers``. One without a level gets ``level``, and then its
        records, which the program has not asked for, go nowhere else."""
        for logger in loggers:
            is_ours = level is not None and logger.level == logging.NOTSET
            if level is not None and is_ours:
                logger.setLevel(level)
                logger.propagate = False
            self._handled.append((logger, is_ours))
            logger.addHandler(self._handler)

    def add_change(
        self,
        job: str,
        quorum_id: int,
        began_ns: int,
        ended_ns: int,
        attributes: Mapping[str, str | int],
    ) -> None:
        """Add the first span of the trace of a quorum change."""
        self._ids.fixed.change = job, quorum_id
        try:
            span = self.tracer.start_span(
                "torchft.quorum_change",
                context=trace.set_span_in_context(trace.INVALID_SPAN),
                start_time=began_ns,
                attributes={"torchft.job": job, "torchft.quorum_id": quorum_id, **attributes},
            )
        finally:
            self._ids.fixed.change = None
        span.end(ended_ns)

    def add_spans(self, job: str, quorum_id: int, spans: Sequence[Span]) -> None:
        """Add spans of a program that takes part in a quorum change, the first one around them."""
        change = SpanContext(
            trace_id(job, quorum_id),
            change_span_id(job, quorum_id),
            is_remote=True,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )
        context = trace.set_span_in_context(NonRecordingSpan(change))
        made: list[trace.Span] = []
        for name, began_ns, _, attributes in spans:
            span = self.tracer.start_span(
                name, context=context, start_time=began_ns, attributes=attributes
            )
            if not made:
                context = trace.set_span_in_context(span)
            made.append(span)
        for span, (_, _, ended_ns, _) in zip(made, spans, strict=True):
            span.end(ended_ns)

    def close(self) -> None:
        """Export what waits, within `FLUSH_S` seconds; may be called twice."""
        for logger, is_ours in self._handled:
            logger.removeHandler(self._handler)
            if is_ours:
                logger.setLevel(logging.NOTSET)
                logger.propagate = True
        self._handled.clear()
        ending = threading.Thread(target=self._shut_down, name="torchft-otel-end", daemon=True)
        ending.start()
        ending.join(FLUSH_S)

    def _shut_down(self) -> None:
        self._traces.shutdown()
        self._logs.shutdown()


def _draw_elsewhere(exporter: object) -> None:
    """Keep ``exporter`` from drawing from the random numbers of the program.

    The library draws the pause before a retry for each export, on its own thread: samples that the
    program reads meanwhile would be others, and so would all that it draws later.
    """
    module = sys.modules[type(getattr(exporter, "_client", exporter)).__module__]
    if vars(module).get("random") is random:
        vars(module)["random"] = random.SystemRandom()


#: Name, beginning and end in unix nanoseconds, and attributes.
Span = tuple[str, int, int, Mapping[str, str | int]]
