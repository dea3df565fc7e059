"""An end of the healing benchmark that speaks our transport, and the plain copy."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from tools.benchmarks.children.healing_ends import (
    MATRIX_BYTES,
    PLAIN_KINDS,
    State,
    flags,
    make_state,
    run_receiver,
    run_sender,
)
from torchft_svc.client.checkpointing import HTTPTransport

_TIMEOUT = timedelta(seconds=60)
_HOST = "127.0.0.1"
# What a plain copy reads at once.
_PLAIN_BYTES = 1 << 20


class OurSender:
    """Serves the same state over the transport and as plain bytes.

    Kind ``extra``: it is not the source that was assigned, but one more.
    """

    def __init__(self, num_matrices: int) -> None:
        self._state = make_state(num_matrices)
        self._transport: HTTPTransport[State] = HTTPTransport(_TIMEOUT, hostname=_HOST)
        self._listener = socket.create_server((_HOST, 0))
        threading.Thread(target=self._send_plain, name="bench-plain", daemon=True).start()

    def offer(self, kind: str, step: int) -> str:
        if kind in PLAIN_KINDS:
            return f"{_HOST}:{self._listener.getsockname()[1]}"
        announced, extras = ([], [1]) if kind == "extra" else ([1], [])
        self._transport.send_striped(announced, extras, step, self._state, _TIMEOUT)
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
    """Fetches either way.

    A kind is one of the plain ones, ``ours-CONNECTIONS``, or ``unprepared-CONNECTIONS``. Commas
    stand between the addresses of several sources.
    """

    def __init__(self, num_matrices: int) -> None:
        self._num_matrices = num_matrices
        self._num_bytes = num_matrices * MATRIX_BYTES
        self._transport: HTTPTransport[State] | None = None
        self._buffer = memoryview(bytearray(_PLAIN_BYTES))

    def prepare(self, kind: str) -> None:
        """What a Manager does while a worker that has just started waits for its first quorum."""
        if kind in PLAIN_KINDS:
            return
        way, _, num_connections = kind.partition("-")
        self._transport = HTTPTransport(_TIMEOUT, int(num_connections), _HOST)
        if way == "ours":
            own = [torch.empty(MATRIX_BYTES, dtype=torch.uint8) for _ in range(self._num_matrices)]
            self._transport.expect_checkpoint({"matrices": own})
            assert self._transport.wait_until_prepared(_TIMEOUT)

    def fetch(self, kind: str, address: str, step: int) -> State | None:
        if kind in PLAIN_KINDS:
            self._fetch_plain(address, keep=kind == "kept")
            return None
        assert self._transport is not None
        with self._transport as transport:
            first, *extras = address.split(",")
            lookups = [partial(str, extra) for extra in extras]
            return transport.recv_striped(0, first, lookups, step, _TIMEOUT)

    def _fetch_plain(self, address: str, keep: bool) -> None:
        host, _, port = address.rpartition(":")
        array: Any = torch.empty(self._num_bytes if keep else 0, dtype=torch.uint8).numpy()
        kept = memoryview(array)
        done = 0
        with socket.create_connection((host, int(port))) as connection:
            while done < self._num_bytes:
                count = min(self._num_bytes - done, _PLAIN_BYTES)
                target = kept[done : done + count] if keep else self._buffer
                done += connection.recv_into(target, count)


def main() -> None:
    arguments = flags()
    if arguments.role == "send":
        run_sender(OurSender(arguments.matrices))
    else:
        run_receiver(OurReceiver(arguments.matrices))


if __name__ == "__main__":
    main()
