"""Protects a worker's round and step, which several threads use."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.coordination import QuorumResult
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Resumed
from torchft_svc.core.quorum.worker.peers import LoseMember
from torchft_svc.core.quorum.worker.round import Round, WorkerRules
from torchft_svc.core.quorum.worker.step import StepMachine, StepState
from torchft_svc.core.quorum.worker.time_use import TimeUse

log = logging.getLogger(__name__)


class SharedRound:
    """A worker's `Round`: one thread at a time changes it, any thread may read it or bring news.

    ``on_phase`` is called with a report of each new phase, except the wait for a quorum, and of the
    progress of a heal. It must not block. Attributes of ``round`` may be read without a lock; all
    else needs `changing`. ``time_use``: what the training thread's time is spent on;
    ``num_heals``, ``healed_bytes``: the states that this worker has received.
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
        self.time_use = TimeUse()
        self.num_heals = self.healed_bytes = 0
        self._pg = pg
        self._clock = clock
        self._lock = threading.RLock()
        self._drained = threading.Event()

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
                    self.report_phase(after.phase)

    def report_phase(self, phase: Phase) -> None:
        """Report that this worker is in ``phase`` of its step."""
        self.on_phase(self.round.report(phase))

    def report_progress(self, received_bytes: int, state_bytes: int) -> None:
        """Report how much of the state that this worker heals with has arrived."""
        with self._lock:
            report = self.round.report()
            if report.phase is Phase.HEALING:
                arrived = replace(report, received_bytes=received_bytes, state_bytes=state_bytes)
                self.on_phase(arrived)

    @property
    def state(self) -> StepState:
        """A frozen view of the step; needs no lock."""
        return self.round.step.state

    # -- news ------------------------------------------------------------------------------------

    def drain(self, command: Drain) -> None:
        """Record that the group has to leave after its step (rule M11)."""
        within_s = math.inf if command.within_s is None else command.within_s
        with self._lock:
            is_news = self.round.drain(command.reason, self._clock() + within_s)
        self._drained.set()
        if is_news:
            limit = f" within {within_s:g} s" if within_s < math.inf else ""
            log.warning("draining%s: %s", limit, command.reason)

    def wait_until_drained(self, timeout_s: float) -> None:
        """Block until `drain` was called, at most ``timeout_s``."""
        self._drained.wait(timeout_s)

    def record_loss(self, replica_id: str, reason: str, quorum_id: int) -> None:
        """Record that a member of quorum ``quorum_id`` is gone."""
        with self._lock:
            loss = self.round.peers.record_loss(replica_id, reason, quorum_id)
        self._lose(loss)

    def record_term_end(self, news: TermEnds) -> None:
        """Record that the term of a quorum is to end, or is over."""
        with self._lock:
            loss = self.round.record_term_end(news)
        self._lose(loss)

    def stream_lost(self) -> None:
        """Record that the stream to the manager has broken, and is opened again."""
        with self._lock:
            loss = self.round.stream_lost()
        self._lose(loss)

    def stream_ended(self) -> None:
        """Record that the stream to the manager has ended: this group is out of its last quorum."""
        with self._lock:
            loss = self.round.peers.stream_ended()
        self._lose(loss)

    def membership_to_resume(self) -> Resumed | None:
        """See `Round.membership_to_resume`."""
        with self._lock:
            return self.round.membership_to_resume()

    def _lose(self, loss: LoseMember | None) -> None:
        if loss is not None:
            self._pg.lose_member(loss.quorum_id, loss.reason)

    def receive_newcomer(self, replica_id: str) -> None:
        """Record that a group waits to join."""
        with self._lock:
            self.round.peers.record_newcomer(replica_id)

    def receive_no_quorum(self, reason: str) -> None:
        """Log why there is no quorum yet (empty: unknown); called repeatedly.

        It is logged if the wait is long, when the reason changes, and from time to time. That a
        prepared spare waits for a place is no news.
        """
        with self._lock:
            if self.round.stands_by and not reason:
                return
            sentence = self.round.peers.record_no_quorum(reason, self._clock())
        if sentence:
            log.warning(sentence)

    # -- the end ---------------------------------------------------------------------------------

    def serves_in(self) -> int | None:
        """See `Round.serves_in`."""
        with self._lock:
            return self.round.serves_in

    def receivers(self) -> tuple[str, ...]:
        """See `Round.receivers`."""
        with self._lock:
            return self.round.receivers

    def draining_until(self) -> float | None:
        """See `Manager.draining_until`."""
        with self._lock:
            return None if self.round.drain_reason is None else self.round.drain_until

    # -- who is gone -----------------------------------------------------------------------------

    def check_losses(self, quorum: QuorumResult) -> None:
        """See `Peers.check_losses`."""
        with self._lock:
            self.round.peers.check_losses(quorum)

    def who_is_lost(self) -> str:
        """See `Peers.who_is_lost`."""
        with self._lock:
            return self.round.peers.who_is_lost()

    def lost_members(self) -> tuple[str, ...]:
        """See `Peers.lost_members`."""
        with self._lock:
            return self.round.peers.lost_members()

    def check_source(self, quorum: QuorumResult) -> None:
        """See `Peers.check_source`."""
        with self._lock:
            self.round.peers.check_source(quorum)

    def check_own(self, quorum: QuorumResult) -> None:
        """See `Peers.check_own`."""
        with self._lock:
            self.round.peers.check_own(quorum)
