"""An end of the healing benchmark that speaks our transport, and the plain copy."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

from benchmarks.children.healing_ends import (
    MATRIX_BYTES,
    State,
    flags,
    make_state,
    run_receiver,
    run_sender,
)
from torchft_svc.client.checkpointing import HTTPTransport

_TIMEOUT = timedelta(seconds=60)
_HOST = "127.0.0.1"
# What a plain copy reads at once, again and again into the same memory.
_PLAIN_BYTES = 1 << 20


class OurSender:
    """Serves the same state over the transport and as plain bytes."""

    def __init__(self, num_matrices: int) -> None:
        self._state = make_state(num_matrices)
        self._transport: HTTPTransport[State] = HTTPTransport(_TIMEOUT, hostname=_HOST)
        self._listener = socket.create_server((_HOST, 0))
        threading.Thread(target=self._send_plain, name="bench-plain", daemon=True).start()

    def offer(self, kind: str, step: int) -> str:
        if kind == "plain":
            return f"{_HOST}:{self._listener.getsockname()[1]}"
        self._transport.send_checkpoint([1], step, self._state, _TIMEOUT)
        return self._transport.metadata()

    def end(self, kind: str) -> None:
        self._transport.disallow_checkpoint()

    def _send_plain(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                for matrix in self._state["matrices"]:
                    connection.sendall(memoryview(matrix.numpy()).cast("B"))


class OurReceiver:
    """Fetches either way; a kind is ``plain`` or ``ours-CONNECTIONS``."""

    def __init__(self, num_matrices: int) -> None:
        self._num_bytes = num_matrices * MATRIX_BYTES
        self._buffer = memoryview(bytearray(_PLAIN_BYTES))

    def fetch(self, kind: str, address: str, step: int) -> State | None:
        if kind == "plain":
            self._fetch_plain(address)
            return None
        num_connections = int(kind.removeprefix("ours-"))
        transport: HTTPTransport[State]
        with HTTPTransport(_TIMEOUT, num_connections, _HOST) as transport:
            return transport.recv_checkpoint(0, address, step, _TIMEOUT)

    def _fetch_plain(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        missing = self._num_bytes
        with socket.create_connection((host, int(port))) as connection:
            while missing:
                missing -= connection.recv_into(self._buffer, min(missing, _PLAIN_BYTES))


def main() -> None:
    arguments = flags()
    if arguments.role == "send":
        run_sender(OurSender(arguments.matrices))
    else:
        run_receiver(OurReceiver(arguments.matrices))


if __name__ == "__main__":
    main()
