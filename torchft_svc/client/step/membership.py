"""Whom a worker trains with, and who of them is gone, this group itself included."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.coordination import QuorumResult
from torchft_svc.core.names import stable_name
from torchft_svc.errors import QuorumFailed

log = logging.getLogger(__name__)

# Groups wait for one another in every step; what lasts longer than this, people want to know. The
# reason is said as often at most when it changes all the time, as while a large job starts.
_SAY_AFTER_S = 5.0
# Who looks at a trainer that waits sees why, without looking back far.
_SAY_AGAIN_S = 30.0
# Only losses that are newer than the quorum matter, and these are few.
_MAX_LOSSES = 256
# A line in a log is read by people.
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class _LostGroup:
    """``replica_id`` is gone, which was in quorum ``quorum_id`` and may be back in a later one."""

    replica_id: str
    reason: str
    quorum_id: int

    def concerns(self, quorum: QuorumResult) -> bool:
        """Whether a group of ``quorum`` is gone; news may come before the quorum itself.

        It may be this very group: it stood still for too long, and the others go on without it.
        """
        return quorum.quorum_id <= self.quorum_id and self.replica_id in quorum.replica_ids

    def __str__(self) -> str:
        return f"{self.replica_id} is out: {self.reason}"

    def description(self) -> str:
        """For people."""
        return f"lost group {stable_name(self.replica_id)}: {self.reason}"


class QuorumMembership:
    """The quorum that ``pg`` was last built for, and who of it is gone since."""

    def __init__(self, pg: ProcessGroup, clock: Callable[[], float] = time.monotonic) -> None:
        self.quorum: QuorumResult | None = None
        self._clock = clock
        self._pg = pg
        self._reasons: dict[str, str] = {}  # why groups are gone that no quorum has left out yet
        self._losses: deque[_LostGroup] = deque(maxlen=_MAX_LOSSES)
        self._newcomers: frozenset[str] = frozenset()  # replaced as a whole, for other threads
        self._asked_at: float | None = None  # since when there is no answer; None: there is one
        self._said, self._said_at = "", -math.inf

    @property
    def num_waiting(self) -> int:
        """How many groups wait to join, as far as is known since the last quorum was asked for."""
        return len(self._newcomers)

    def receive_newcomer(self, replica_id: str) -> None:
        """A group waits to join; to be called on any thread."""
        self._newcomers |= {replica_id}

    def ask(self) -> None:
        """The next quorum is asked for: who waits is in it, or is announced again. Who was lost
        before is not in it, whatever its id: a lighthouse's clock may have been set back."""
        self._newcomers = frozenset()
        self._losses.clear()
        if self._asked_at is None:  # else the question before had no answer
            self._asked_at = self._clock()

    def answer(self, quorum: QuorumResult) -> None:
        """This is the next quorum."""
        self._asked_at = None
        self._newcomers = self._newcomers.difference(quorum.replica_ids)

    def receive_no_quorum(self, reason: str) -> None:
        """There is none yet, because of ``reason`` (empty: not known); to be called on any thread,
        again and again. Says so in the log if that lasts, when it changes, and from time to time.
        """
        asked_at, now = self._asked_at, self._clock()
        if asked_at is None or min(now - asked_at, now - self._said_at) < _SAY_AFTER_S:
            return
        if reason == self._said and now - self._said_at < _SAY_AGAIN_S:
            return
        self._said, self._said_at = reason, now
        why = reason or "the lighthouse gave no reason"
        log.warning("no quorum for %.0f s: %s", now - asked_at, why)

    def lose(self, replica_id: str, reason: str, quorum_id: int) -> None:
        """A member of quorum ``quorum_id`` is gone; to be called on any thread."""
        loss = _LostGroup(replica_id, reason, quorum_id)
        self._losses.append(loss)
        if len(self._reasons) < _MAX_LOSSES:
            self._reasons[replica_id] = reason
        quorum = self.quorum
        if quorum is not None and loss.concerns(quorum):
            self._pg.lose_member(quorum.quorum_id, str(loss))

    def leave(self) -> None:
        """This group is out of its last quorum; to be called on any thread.

        What it waits for will not come, and not every backend notices that its peers have left.
        """
        quorum = self.quorum
        if quorum is not None and quorum.replica_world_size > 1:
            reason = "the stream to the manager ended: this group is out"
            self._pg.lose_member(quorum.quorum_id, reason)

    def check_losses(self, quorum: QuorumResult) -> None:
        """Raise `QuorumFailed` if the news of a loss came before the quorum itself."""
        for loss in list(self._losses):
            if loss.concerns(quorum):
                raise QuorumFailed(str(loss))

    def check_source(self, quorum: QuorumResult) -> None:
        """Raise `QuorumFailed` if the group is gone from which this one heals.

        An older manager does not tell who that is: then it does not count as gone.
        """
        source = quorum.recover_src_replica_rank
        if source is None or source >= len(quorum.replica_ids):
            return
        for loss in list(self._losses):
            if loss.concerns(quorum) and loss.replica_id == quorum.replica_ids[source]:
                raise QuorumFailed(str(loss))

    def lost(self) -> str:
        """For people, who of the present quorum is gone and why; empty: nobody, as far as known."""
        quorum = self.quorum
        if quorum is None:
            return ""
        losses = {loss.replica_id: loss for loss in list(self._losses) if loss.concerns(quorum)}
        return _listed([loss.description() for loss in losses.values()], "; ")

    def enter(self, quorum: QuorumResult) -> str:
        """This is the quorum from now on, to whose members losses are told to the process group.

        Returns, for people, who trains in it, and who of them is new or gone since the last one;
        empty: the same groups as before.
        """
        last, self.quorum = self.quorum, quorum
        reasons, self._reasons = self._reasons, {}
        return _change(last, quorum, reasons)

    def fits(self, quorum: QuorumResult) -> bool:
        """Whether the process group has the members of ``quorum`` already."""
        return self.quorum is not None and self.quorum.quorum_id == quorum.quorum_id


def _change(last: QuorumResult | None, quorum: QuorumResult, reasons: dict[str, str]) -> str:
    before = [] if last is None else last.replica_ids
    came = [each for each in quorum.replica_ids if each not in set(before)]
    went = [each for each in before if each not in set(quorum.replica_ids)]
    if last is not None and not came and not went:
        return ""
    num = quorum.replica_world_size
    members = ": ".join(filter(None, (f"{num} group{'s'[: num > 1]}", _names(quorum.replica_ids))))
    again = {stable_name(each) for each in came} & {stable_name(each) for each in went}
    news = {
        "new": [stable_name(each) for each in came if stable_name(each) not in again],
        "restarted": [stable_name(each) for each in came if stable_name(each) in again],
        "gone": [_gone(each, reasons) for each in went if stable_name(each) not in again],
    }
    told = [f"{what}: {_listed(who, ', ')}" for what, who in news.items() if who and last]
    return "; ".join([members, *told])


def _gone(replica_id: str, reasons: dict[str, str]) -> str:
    reason = reasons.get(replica_id)
    return stable_name(replica_id) + (f" ({reason})" if reason else "")


def _names(replica_ids: list[str]) -> str:
    return _listed([stable_name(each) for each in replica_ids], ", ")


def _listed(words: list[str], separator: str) -> str:
    left_out = len(words) - _MAX_NAMES
    more = [f"and {left_out} more"] if left_out > 0 else []
    return separator.join([*words[:_MAX_NAMES], *more])
