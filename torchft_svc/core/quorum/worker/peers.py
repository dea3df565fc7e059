"""The groups that a worker trains with, and which of them are gone, its own group included."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.errors import QuorumFailed

# Groups wait for one another in every step; longer waits are logged. A reason that changes all the
# time, as while a large job starts, is not logged more often.
_LOG_AFTER_S = 5.0
# The reason is repeated, so that it is near the end of the log.
_LOG_AGAIN_S = 30.0
# Only losses that are newer than the quorum matter, and these are few.
_MAX_LOSSES = 256
# A line in a log is read by people.
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class LoseMember:
    """The members of quorum ``quorum_id`` cannot finish any operation, because of ``reason``.

    A backend that does not notice this by itself has to be informed.
    """

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of ``replica_id``, a member of ``quorum_id``; it may be in a later one again."""

    replica_id: str
    reason: str
    quorum_id: int

    def concerns(self, quorum: QuorumResult) -> bool:
        """Whether a group of ``quorum`` is gone; the news may come before the quorum itself.

        It may be this group: it stood still for too long, and the others continue without it.
        """
        return quorum.quorum_id <= self.quorum_id and self.replica_id in quorum.replica_ids

    def __str__(self) -> str:
        return f"{self.replica_id} is out: {self.reason}"

    def describe(self) -> str:
        """The loss in a sentence for people."""
        return f"lost group {stable_name(self.replica_id)}: {self.reason}"


class Peers:
    """The groups that the process group was last built for, and which of them are gone."""

    def __init__(self) -> None:
        self.quorum: QuorumResult | None = None
        self._reasons: dict[str, str] = {}  # why groups are gone that no quorum has left out yet
        self._last: QuorumResult | None = None  # the quorum before
        self._last_reasons: dict[str, str] = {}  # why groups of it are gone
        self._losses: deque[_Loss] = deque(maxlen=_MAX_LOSSES)
        self._newcomers: frozenset[str] = frozenset()
        self._asked_at: float | None = None  # since when there is no answer; None: there is one
        self._logged, self._logged_at = "", -math.inf

    @property
    def num_waiting(self) -> int:
        """How many groups wait to join, as far as is known since the last question."""
        return len(self._newcomers)

    def begin_question(self, now: float) -> None:
        """Forget newcomers and losses: the next quorum is asked for.

        Waiting groups are in it, or are announced again. Groups that were lost before are not in
        it, whatever its id: a lighthouse's clock may have been set back.
        """
        self._newcomers = frozenset()
        self._losses.clear()
        if self._asked_at is None:  # else the question before had no answer
            self._asked_at = now

    def record_answer(self, quorum: QuorumResult) -> None:
        """Record that the question has brought ``quorum``, whose members do not wait any more."""
        self._asked_at = None
        self._newcomers = self._newcomers.difference(quorum.replica_ids)

    def enter_quorum(self, quorum: QuorumResult) -> None:
        """Record that the process group is built for ``quorum`` from now on."""
        self._last, self.quorum = self.quorum, quorum
        self._last_reasons, self._reasons = self._reasons, {}

    def describe_change(self) -> str:
        """The members of the present quorum, and which are new or gone (empty: none are)."""
        return _describe_change(self._last, self.quorum, self._last_reasons) if self.quorum else ""

    def fits(self, quorum: QuorumResult) -> bool:
        """Whether the process group was built for ``quorum``."""
        return self.quorum is not None and self.quorum.quorum_id == quorum.quorum_id

    # -- news, at any time -----------------------------------------------------------------------

    def record_newcomer(self, replica_id: str) -> None:
        """Record that a group waits to join."""
        self._newcomers |= {replica_id}

    def record_loss(self, replica_id: str, reason: str, quorum_id: int) -> LoseMember | None:
        """Record that a member of quorum ``quorum_id`` is gone.

        Returns None if it is not in the present quorum.
        """
        loss = _Loss(replica_id, reason, quorum_id)
        self._losses.append(loss)
        if len(self._reasons) < _MAX_LOSSES:
            self._reasons[replica_id] = reason
        if self.quorum is None or not loss.concerns(self.quorum):
            return None
        return LoseMember(self.quorum.quorum_id, str(loss))

    def stream_ended(self) -> LoseMember | None:
        """Record that the stream to the manager has ended: this group is out of its last quorum.

        What it waits for will not come, and not every backend notices that its peers have left.
        """
        if self.quorum is None or self.quorum.replica_world_size == 1:
            return None
        reason = "the stream to the manager ended: this group is out"
        return LoseMember(self.quorum.quorum_id, reason)

    def record_no_quorum(self, reason: str, now: float) -> str:
        """Record why there is no quorum (empty: not known), which is reported again and again.

        Returns what to log: if that lasts, when it changes, and from time to time.
        """
        asked_at = self._asked_at
        if asked_at is None or min(now - asked_at, now - self._logged_at) < _LOG_AFTER_S:
            return ""
        if reason == self._logged and now - self._logged_at < _LOG_AGAIN_S:
            return ""
        self._logged, self._logged_at = reason, now
        why = reason or "the lighthouse gave no reason"
        return f"no quorum for {now - asked_at:.0f} s: {why}"

    # -- losses ----------------------------------------------------------------------------------

    def check_losses(self, quorum: QuorumResult) -> None:
        """Raise `QuorumFailed` if a group of ``quorum`` is gone."""
        for loss in self._losses:
            if loss.concerns(quorum):
                raise QuorumFailed(str(loss))

    def check_source(self, quorum: QuorumResult) -> None:
        """Raise `QuorumFailed` if the group from which this one heals is gone."""
        source = quorum.recover_src_replica_rank
        if source is not None:
            self._check(quorum, quorum.replica_ids[source])

    def check_own(self, quorum: QuorumResult) -> None:
        """Raise `QuorumFailed` if this group itself is out: the others train without it."""
        self._check(quorum, quorum.replica_ids[quorum.replica_rank])

    def _check(self, quorum: QuorumResult, replica_id: str) -> None:
        for loss in self._losses:
            if loss.concerns(quorum) and loss.replica_id == replica_id:
                raise QuorumFailed(str(loss))

    def who_is_lost(self) -> str:
        """Which groups of the present quorum are gone, and why (empty: none)."""
        return _listed([loss.describe() for loss in self._known_losses().values()], "; ")

    def lost_members(self) -> tuple[str, ...]:
        """The replica ids of the groups of the present quorum that are gone."""
        return tuple(self._known_losses())

    def without_lost(self, replica_ids: Sequence[str]) -> tuple[str, ...]:
        """Those of ``replica_ids`` that no news since the last question has reported as gone."""
        lost = {loss.replica_id for loss in self._losses}
        return tuple(each for each in replica_ids if each not in lost)

    def _known_losses(self) -> dict[str, _Loss]:
        quorum = self.quorum
        if quorum is None:
            return {}
        return {loss.replica_id: loss for loss in self._losses if loss.concerns(quorum)}


def _describe_change(
    last: QuorumResult | None, quorum: QuorumResult, reasons: dict[str, str]
) -> str:
    before = () if last is None else last.replica_ids
    members_before, members_now = frozenset(before), frozenset(quorum.replica_ids)
    came = [each for each in quorum.replica_ids if each not in members_before]
    went = [each for each in before if each not in members_now]
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
    changes = [f"{what}: {_listed(who, ', ')}" for what, who in news.items() if who and last]
    return "; ".join([members, *changes])


def _gone(replica_id: str, reasons: dict[str, str]) -> str:
    reason = reasons.get(replica_id)
    return stable_name(replica_id) + (f" ({reason})" if reason else "")


def _names(replica_ids: Sequence[str]) -> str:
    return _listed([stable_name(each) for each in replica_ids], ", ")


def _listed(words: list[str], separator: str) -> str:
    left_out = len(words) - _MAX_NAMES
    more = [f"and {left_out} more"] if left_out > 0 else []
    return separator.join([*words[:_MAX_NAMES], *more])
