"""An end of the healing benchmark that speaks the public release's HTTPTransport."""

from __future__ import annotations

from datetime import timedelta

from torchft.checkpointing.http_transport import HTTPTransport

from tools.benchmarks.children.healing_ends import (
    State,
    flags,
    make_state,
    run_receiver,
    run_sender,
)

_TIMEOUT = timedelta(seconds=60)


class PublicSender:
    """One transport for each number of chunks; a kind is ``public-CHUNKS``."""

    def __init__(self, num_matrices: int) -> None:
        self._state = make_state(num_matrices)
        self._transports: dict[str, HTTPTransport[State]] = {}

    def offer(self, kind: str, step: int) -> str:
        if kind not in self._transports:
            self._transports[kind] = _transport(kind)
        transport = self._transports[kind]
        transport.send_checkpoint([1], step, self._state, _TIMEOUT)
        return str(transport.metadata())

    def end(self, kind: str) -> None:
        self._transports[kind].disallow_checkpoint()


class PublicReceiver:
    def prepare(self, kind: str) -> None:
        """Do nothing: there is nothing to prepare."""

    def fetch(self, kind: str, address: str, step: int) -> State | None:
        transport = _transport(kind)
        try:
            state: State = transport.recv_checkpoint(0, address, step, _TIMEOUT)
            return state
        finally:
            transport.shutdown()


def _transport(kind: str) -> HTTPTransport[State]:
    return HTTPTransport(_TIMEOUT, num_chunks=int(kind.removeprefix("public-")))


def main() -> None:
    arguments = flags()
    if arguments.role == "send":
        run_sender(PublicSender(arguments.matrices))
    else:
        run_receiver(PublicReceiver())


if __name__ == "__main__":
    main()
