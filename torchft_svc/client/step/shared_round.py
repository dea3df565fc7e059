"""Protects a worker's round and step, which several threads use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.coordination import QuorumResult
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Resumed
from torchft_svc.core.quorum.worker.peers import LoseMember
from torchft_svc.core.quorum.worker.round import Round, WorkerRules
from torchft_svc.core.quorum.worker.round_orders import Order
from torchft_svc.core.quorum.worker.step import StepMachine, StepState

log = logging.getLogger(__name__)

Orders = tuple[Order, ...]


class SharedRound:
    """A worker's `Round`: one thread at a time changes it, any thread may read it or bring news.

    ``on_phase`` is called with each new phase, except the wait for a quorum, its step, and
    `Round.went_on_to`. It must not block. Attributes of ``round`` may be read
    without a lock; all else needs `changing`.
    """

    def __init__(
        self,
        rules: WorkerRules,
        step: StepMachine,
        pg: ProcessGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_phase: Callable[[PhaseReport], None] = lambda *_: None
        self.round: Round = Round(rules, step)
        self._pg = pg
        self._clock = clock
        self._lock = threading.RLock()

    @contextmanager
    def changing(self) -> Iterator[Round]:
        """Give this thread exclusive access to the round, and report a change of its phase."""
        with self._lock:
            before = self.round.step.state.phase
            try:
                yield self.round
            finally:
                after = self.round.step.state
                # The manager itself knows when a group waits for a quorum.
                if after.phase is not before and after.phase is not Phase.QUORUM:
                    self.tell_phase(after.phase)

    def tell_phase(self, phase: Phase) -> None:
        """Report that this worker is in ``phase`` of its step."""
        self.on_phase(self.round.report(phase))

    @property
    def state(self) -> StepState:
        """A frozen view of the step; needs no lock."""
        return self.round.step.state

    # -- news ------------------------------------------------------------------------------------

    def drain(self, reason: str) -> None:
        """The group has to leave after its step, for ``reason`` (rule M11)."""
        with self._lock:
            is_news = self.round.drain(reason)
        if is_news:
            log.warning("draining: %s", reason)

    def lose(self, replica_id: str, reason: str, quorum_id: int) -> None:
        """A member of quorum ``quorum_id`` is gone."""
        with self._lock:
            order = self.round.peers.lost(replica_id, reason, quorum_id)
        self._lose(order)

    def term_ends(self, news: TermEnds) -> None:
        """The term of a quorum is to end, or is over."""
        with self._lock:
            order = self.round.term_ends(news)
        self._lose(order)

    def line_broke(self) -> None:
        """See `Round.line_broke`."""
        with self._lock:
            order = self.round.line_broke()
        self._lose(order)

    def cut(self) -> None:
        """The stream to the manager has ended: this group is out of its last quorum."""
        with self._lock:
            order = self.round.peers.cut()
        self._lose(order)

    def resumed(self) -> Resumed | None:
        """See `Round.resumed`."""
        with self._lock:
            return self.round.resumed()

    def _lose(self, order: LoseMember | None) -> None:
        if order is not None:
            self._pg.lose_member(order.quorum_id, order.reason)

    def receive_newcomer(self, replica_id: str) -> None:
        """A group waits to join."""
        with self._lock:
            self.round.peers.waits(replica_id)

    def receive_no_quorum(self, reason: str) -> None:
        """There is no quorum yet, for ``reason`` (empty: unknown); called repeatedly.

        Logs the reason if the wait is long, when the reason changes, and from time to time.
        """
        with self._lock:
            sentence = self.round.peers.no_quorum_yet(reason, self._clock())
        if sentence:
            log.warning(sentence)

    # -- who is gone -----------------------------------------------------------------------------

    def check_losses(self, quorum: QuorumResult) -> None:
        """See `Peers.check_losses`."""
        with self._lock:
            self.round.peers.check_losses(quorum)

    def who_is_lost(self) -> str:
        """See `Peers.who_is_lost`."""
        with self._lock:
            return self.round.peers.who_is_lost()

    def check_source(self, quorum: QuorumResult) -> None:
        """See `Peers.check_source`."""
        with self._lock:
            self.round.peers.check_source(quorum)
