"""What a worker sends on its stream to the manager."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from torchft_svc.core.step import Phase
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import phase_to_wire

# A worker's phase is told at most so often: it is for people and for hang timeouts of seconds, and
# a fast trainer would otherwise spend its time with it.
PHASE_INTERVAL_S = 0.1


class Outgoing:
    """One stream's messages, for the thread that sends them: hello, phases, maybe a goodbye.

    The other methods may be called on any thread, and only store something.
    """

    def __init__(self, hello: pb.AttachHello) -> None:
        self._hello = hello
        self._phase: tuple[Phase, int] | None = None
        self._changed = threading.Event()
        self._over = threading.Event()
        self._goodbye: pb.AttachDetach | None = None

    def tell(self, phase: Phase, step: int) -> None:
        """Send ``phase`` soon; only the latest one counts."""
        self._phase = phase, step
        if not self._changed.is_set():
            self._changed.set()

    def end(self, goodbye: pb.AttachDetach | None = None) -> None:
        """Say no more, at the most ``goodbye``; may be called twice, the first time counts."""
        if not self._over.is_set():
            self._goodbye = goodbye
            self._over.set()
        self._changed.set()

    def messages(self) -> Iterator[pb.AttachRequest]:
        """To be read once."""
        yield pb.AttachRequest(hello=self._hello)
        while not self._over.is_set():
            self._changed.wait()
            self._changed.clear()  # before the look at what has changed
            if self._phase is not None and not self._over.is_set():
                phase, step = self._phase
                told = pb.AttachPhase(phase=phase_to_wire(phase), step=step)
                yield pb.AttachRequest(phase=told)
                self._over.wait(PHASE_INTERVAL_S)
        if self._goodbye is not None:
            yield pb.AttachRequest(detach=self._goodbye)
