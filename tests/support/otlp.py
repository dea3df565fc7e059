"""A collector of OpenTelemetry's protocol over HTTP, in this process."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Collector:
    """What was received: spans and log records, each with the attributes of its program."""

    def __init__(self, address: str) -> None:
        self.endpoint = f"http://{address}"
        self.spans: list[tuple[dict[str, Any], Any]] = []
        self.logs: list[tuple[dict[str, Any], Any]] = []

    def receive(self, path: str, body: bytes) -> bytes:
        if path == "/v1/traces":
            traces = ExportTraceServiceRequest.FromString(body)
            for each in traces.resource_spans:
                program = attributes(each.resource)
                self.spans += [
                    (program, span) for scope in each.scope_spans for span in scope.spans
                ]
            return bytes(ExportTraceServiceResponse().SerializeToString())
        assert path == "/v1/logs"
        logs = ExportLogsServiceRequest.FromString(body)
        for each in logs.resource_logs:
            program = attributes(each.resource)
            self.logs += [(program, log) for scope in each.scope_logs for log in scope.log_records]
        return bytes(ExportLogsServiceResponse().SerializeToString())

    def spans_of(self, name: str) -> list[Any]:
        return [span for _, span in self.spans if span.name == name]


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a resource, span or record, as plain values."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in message.attributes
    }


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer = collector.receive(self.path, body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
