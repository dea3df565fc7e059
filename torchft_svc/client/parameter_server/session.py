"""The process group of a session, which fails as soon as the other end is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torchft_svc.client.checkpointing.http.wire import Wire
from torchft_svc.client.parameter_server.lifeline import Lifeline
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.members import LOSS_GRACE_S, Members
from torchft_svc.client.process_groups.operations import WrappedWork
from torchft_svc.client.process_groups.wrappers import ProcessGroupWrapper
from torchft_svc.errors import SessionEnded, TorchFTError

T = TypeVar("T")

SERVER, CLIENT = "server", "client"
_RANKS = {SERVER: 0, CLIENT: 1}
# Each session has its own members, which connect once.
_QUORUM_ID = 1
# A collective fails with the other process, and so does the lifeline; either may be first.
_LIFELINE_DELAY_S = 0.2


class SessionGroup(ProcessGroupWrapper):
    """A server (rank 0) and a client (rank 1), connected by ``pg``.

    When the other end is gone, collectives under way fail after a moment, and others at once, with
    `SessionEnded`. The other end is informed of `shutdown` and `abort` in the same way.

    Args:
        own: `SERVER` or `CLIENT`.
        wire: the connection by which the ends watch each other; None: there is none, and only
            ``pg`` notices the end.
    """

    def __init__(self, pg: ProcessGroup, own: str, wire: Wire | None) -> None:
        super().__init__(pg)
        self._own = own
        self._other = CLIENT if own == SERVER else SERVER
        self._ended: SessionEnded | None = None
        self._is_ended = threading.Event()
        self._lifeline = None if wire is None else Lifeline(wire, self._lose_other)

    def connect(self, store_addr: str, session_id: str) -> None:
        """Meet the other end at ``store_addr``.

        Raises:
            PeerError: it did not come in time, or is gone.
        """
        if self._lifeline is not None:
            self._lifeline.start()
        own = f"{self._own} of session {session_id}"
        self.configure(store_addr, own, _RANKS[self._own], len(_RANKS), quorum_id=_QUORUM_ID)

    def end_session(self, error: SessionEnded, grace_s: float = LOSS_GRACE_S) -> None:
        """Make collectives fail with ``error``, those under way after ``grace_s``; on any thread.

        The first error counts.
        """
        self._ended = self._ended or error
        self._pg.lose_member(_QUORUM_ID, error.reason)
        self._is_ended.set()
        time.sleep(grace_s)  # what the other end had sent may still arrive
        self._pg.cut()

    def shutdown(self) -> None:
        """Leave the session; idempotent."""
        self._pg.shutdown()
        if self._lifeline is not None:
            self._lifeline.close()

    def abort(self) -> None:
        """Leave the session at once."""
        self._pg.abort()
        if self._lifeline is not None:
            self._lifeline.close()

    def errored(self) -> Exception | None:
        """Why the session cannot be used any more, or None."""
        return self._ended or self._pg.errored()

    def failing_as_ended(self, action: Callable[[], T]) -> T:
        """Return what ``action`` does; its error is `SessionEnded` if the other end is gone."""
        try:
            return action()
        except (RuntimeError, TorchFTError) as error:
            if self._lifeline is not None:
                self._is_ended.wait(_LIFELINE_DELAY_S)
            if self._ended is None:
                raise
            raise self._ended from error

    def _lose_other(self, reason: str) -> None:
        self.end_session(SessionEnded(self._other, reason))

    def _configure(self, members: Members) -> None:
        configure = super()._configure
        self.failing_as_ended(lambda: configure(members))

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        if self._ended is not None:
            raise self._ended
        launch = super()._launch
        return _SessionWork(self.failing_as_ended(lambda: launch(name, args, kwargs)), self)


class _SessionWork(WrappedWork):
    """A collective whose error says that the other end is gone, where that is the reason."""

    def __init__(self, work: Any, group: SessionGroup) -> None:
        super().__init__(work)
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raises `SessionEnded` if the other end is gone."""
        work = self._work
        if timeout is None:
            return self._group.failing_as_ended(lambda: bool(work.wait()))
        return self._group.failing_as_ended(lambda: bool(work.wait(timeout)))
