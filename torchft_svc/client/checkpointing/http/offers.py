"""The state that a worker serves at present, and the receivers that wait for the next one."""

from __future__ import annotations

import threading
import time

from torchft_svc.client.checkpointing.http.served import Gone, ServedState
from torchft_svc.client.checkpointing.transport import why_not_offered


class NotOffered(Exception):
    """The requested step has not been offered yet."""


class OfferSlot:
    """Holds the state that was offered last; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state: ServedState | None = None
        self._newest_step = -1
        self._refused: tuple[int, str] | None = None
        self._closed = False

    @property
    def state(self) -> ServedState | None:
        with self._changed:
            return self._state

    def offer(self, state: ServedState) -> None:
        """Serve ``state`` from now on, in place of the previous one."""
        with self._changed:
            before, self._state = self._state, state
            self._newest_step = state.offer.step
            self._refused = None
            self._changed.notify_all()
        if before is not None:
            before.retire(f"step {state.offer.step} is served now")

    def withdraw(self, why: str) -> None:
        """Serve nothing until another state is offered, possibly of the same step."""
        with self._changed:
            state, self._refused = self._state, None
        if state is not None:
            state.retire(why)

    def refuse(self, step: int, why: str) -> None:
        """The state of ``step`` cannot be offered, unless `offer` is called for it later."""
        with self._changed:
            self._refused = step, why
            self._changed.notify_all()

    def wait_for(self, step: int, wait_s: float) -> ServedState:
        """Wait until the state of ``step`` is offered, and return it.

        A state of the newest step that is over may be offered again, because the step was
        discarded; so this waits for that, too.

        Raises:
            Gone: a newer step was offered already, or this one cannot be offered.
            NotOffered: it was not offered within ``wait_s``.
        """
        until = time.monotonic() + wait_s
        with self._changed:
            while True:
                if self._closed:
                    raise Gone("this worker is shutting down")
                if step < self._newest_step:
                    raise Gone(f"step {step} is gone, the newest is {self._newest_step}")
                state = self._state
                if state is not None and state.offer.step == step and not state.is_over:
                    return state
                if self._refused is not None and self._refused[0] == step:
                    raise Gone(why_not_offered(*self._refused))
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise NotOffered(
                        f"step {step} is not offered, the newest was {self._newest_step}"
                    )
                self._changed.wait(left_s)

    def by_id(self, state_id: str) -> ServedState:
        """The state that is served under ``state_id``.

        Raises:
            Gone: another state is served now, or none.
        """
        state = self.state
        if state is None or state.state_id != state_id:
            raise Gone("another state is served now")
        return state

    def expire(self, now: float) -> float | None:
        """Drop a state that was kept too long without progress; return when to check again."""
        state = self.state
        if state is None or state.is_over:
            return None
        if now >= state.expires_at():
            state.expire()
        return None if state.is_over else state.expires_at()

    def close(self) -> None:
        """Drop everything; waiting receivers get an error."""
        with self._changed:
            self._closed = True
            state = self._state
            self._changed.notify_all()
        if state is not None:
            state.retire("this worker is shutting down")
