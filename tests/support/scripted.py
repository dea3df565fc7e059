"""A lighthouse on the wire that answers when, and what, a test says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from torchft_svc.proto import torchft_pb2 as pb


class Script:
    """Serves sessions, and nothing else."""

    def __init__(self) -> None:
        self._received: queue.SimpleQueue[pb.SessionRequest] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[pb.SessionNews | None] = queue.SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.stream_stream_rpc_method_handler(
            self._session,
            request_deserializer=pb.SessionRequest.FromString,
            response_serializer=pb.SessionNews.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(
            "torchft.LighthouseService", {"Session": handler}
        )
        self._server.add_generic_rpc_handlers((service,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _session(self, requests: Iterator[pb.SessionRequest], context: Any) -> Any:
        reading = threading.Thread(target=self._read, args=(requests,))
        reading.start()
        yield pb.SessionNews(welcome=pb.SessionWelcome())
        yield from iter(self._news.get, None)
        context.cancel()
        reading.join()

    def _read(self, requests: Iterator[pb.SessionRequest]) -> None:
        try:
            for request in requests:
                self._received.put(request)
        except grpc.RpcError:
            pass  # the stream has ended

    def next_request(self, kind: str) -> Any:
        """The next message of this kind."""
        while True:
            request = self._received.get(timeout=30)
            if request.WhichOneof("kind") == kind:
                return getattr(request, kind)

    def answer(self, question: pb.SessionQuestion, quorum_id: int, answers: int) -> None:
        quorum = pb.Quorum(quorum_id=quorum_id, participants=[question.requester])
        self._news.put(pb.SessionNews(quorum=quorum, answers=answers))

    def close(self) -> None:
        self._news.put(None)
        self._server.stop(0).wait()
