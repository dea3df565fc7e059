"""The one door to a worker's round and step, which several threads use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.coordination import QuorumResult
from torchft_svc.core.peers import LoseMember
from torchft_svc.core.round import Order, Round, WorkerRules
from torchft_svc.core.step import Phase, StepMachine, StepState

log = logging.getLogger(__name__)

Orders = tuple[Order, ...]


class SharedRound:
    """A worker's `Round`, for one thread at a time; and the news that concern it, on any thread.

    ``on_phase`` receives each new phase but the wait for a quorum, with its step; it must not wait.
    """

    def __init__(
        self,
        rules: WorkerRules,
        step: StepMachine,
        pg: ProcessGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_phase: Callable[[Phase, int], None] = _nobody_listens
        self._round: Round[QuorumResult] = Round(rules, step)
        self._pg = pg
        self._clock = clock
        self._lock = threading.RLock()

    @contextmanager
    def changing(self) -> Iterator[Round[QuorumResult]]:
        """The round, for this thread alone."""
        with self._lock:
            before = self._round.step.state.phase
            try:
                yield self._round
            finally:
                after = self._round.step.state
                # The manager knows best when a quorum is waited for.
                if after.phase is not before and after.phase is not Phase.QUORUM:
                    self.on_phase(after.phase, after.step)

    # -- views, which need no lock ---------------------------------------------------------------

    @property
    def state(self) -> StepState:
        """The step, frozen."""
        return self._round.step.state

    @property
    def error(self) -> Exception | None:
        """Why there is no quorum in this round, if so."""
        return self._round.error

    @property
    def has_connected(self) -> bool:
        """Whether the members of the present quorum were met in this round."""
        return self._round.has_connected

    @property
    def last_quorum(self) -> QuorumResult | None:
        """The one that the process group was last built for."""
        return self._round.peers.quorum

    @property
    def num_waiting(self) -> int:
        """How many groups wait to join, as far as is known since the last quorum was asked for."""
        return self._round.peers.num_waiting

    @property
    def drain_reason(self) -> str | None:
        """Why the group has to end after its step; None: it has not."""
        return self._round.drain_reason

    # -- news ------------------------------------------------------------------------------------

    def drain(self, reason: str) -> None:
        """The group has to end after its step, because of ``reason`` (rule M11)."""
        with self._lock:
            is_news = self._round.drain(reason)
        if is_news:
            log.warning("draining: %s", reason)

    def lose(self, replica_id: str, reason: str, quorum_id: int) -> None:
        """A member of quorum ``quorum_id`` is gone."""
        with self._lock:
            order = self._round.peers.lost(replica_id, reason, quorum_id)
        self._lose(order)

    def cut(self) -> None:
        """The stream to the manager has ended: this group is out of its last quorum."""
        with self._lock:
            order = self._round.peers.cut()
        self._lose(order)

    def _lose(self, order: LoseMember | None) -> None:
        if order is not None:
            self._pg.lose_member(order.quorum_id, order.reason)

    def receive_newcomer(self, replica_id: str) -> None:
        """A group waits to join."""
        with self._lock:
            self._round.peers.waits(replica_id)

    def receive_no_quorum(self, reason: str) -> None:
        """There is none yet, because of ``reason`` (empty: not known), as is told again and again.

        Logs it if that lasts, when it changes, and from time to time.
        """
        with self._lock:
            sentence = self._round.peers.no_quorum_yet(reason, self._clock())
        if sentence:
            log.warning(sentence)

    # -- who is gone -----------------------------------------------------------------------------

    def check_losses(self, quorum: QuorumResult) -> None:
        """See `Peers.check_losses`."""
        with self._lock:
            self._round.peers.check_losses(quorum)

    def who_is_lost(self) -> str:
        """See `Peers.who_is_lost`."""
        with self._lock:
            return self._round.peers.who_is_lost()

    def check_source(self, quorum: QuorumResult) -> None:
        """See `Peers.check_source`."""
        with self._lock:
            self._round.peers.check_source(quorum)


def _nobody_listens(phase: Phase, step: int) -> None:
    """Before the manager can be told."""
