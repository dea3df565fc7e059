"""A quorum is a term: it stays in force, step after step, until somebody has a reason to end it.

In a term no step asks anybody (rule E1). Each worker adds its *wish* to end the term to a sum that
the step has anyway, so all members of the quorum learn alike how the next step begins (rule E2):

    committed, and nobody wishes  ->  the next step belongs to this quorum, too
    committed, and somebody does  ->  everyone asks for the next step
    discarded, or seen here alone ->  this group asks, the lighthouse informs the others (rule E4)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass, field

# The shortest time between two looks of a lighthouse for members that keep others waiting: each
# look is at all of them, and takes 0.5 ms for 1000.
LOOK_S = 0.1


class Wish(enum.Enum):
    """What a worker has seen in the sum of the wishes of its step."""

    NONE = "nobody wants to end the term"
    SOME = "somebody wants to end it, or nothing was summed that could show it"
    ALONE = (
        "only this worker has a reason to end it: the sum lacks its wish, or cannot be read here"
    )


class Fate(enum.Enum):
    """How the next step of a group begins."""

    CONTINUES = "in the same quorum, without a question"
    ENDS = "all members of the quorum ask for the next one"
    ABORTED = "this group asks, and the others may have gone on"


def fate(committed: bool, wishes: Collection[Wish]) -> Fate:
    """How the next step begins, after a step of a term; ``wishes``: as each worker of the group saw
    them. Worker r of each group saw the same as its counterparts, so all groups decide alike; what
    only one worker knows is no reason for the others."""
    if not committed:
        return Fate.ABORTED
    if Wish.SOME in wishes:
        return Fate.ENDS
    return Fate.ABORTED if Wish.ALONE in wishes else Fate.CONTINUES


@dataclass(frozen=True, slots=True)
class TermEnds:
    """News about the term of quorum ``quorum_id``, because of ``reason``.

    ``step`` is None: it is to end, which the members have to agree on. Otherwise it is over: no
    step from ``step`` on can be committed in it, because a member does not take part any more.
    """

    quorum_id: int
    step: int | None
    reason: str

    def is_over_at(self, quorum_id: int, step: int) -> bool:
        """Whether a step of quorum ``quorum_id`` that begins at ``step`` is in vain."""
        return self.quorum_id == quorum_id and self.step is not None and step >= self.step


@dataclass(slots=True)
class RunningTerm:
    """What a lighthouse knows of the term of a job's last quorum."""

    #: Its steps may ask nobody; so may those of a quorum that groups report to a lighthouse that
    #: is new to the job.
    may_go_on: bool = True
    #: The step with which it began (-1: not known).
    began_at: int = -1
    #: When its quorum was formed (-inf: not here).
    formed_at: float = -math.inf
    #: The size of a quorum that groups have reported (0: not known).
    num_groups: int = 0
    #: When the first group has reported it (inf: none has).
    reported_at: float = math.inf
    #: The highest step that each member has reported in it.
    reached: dict[str, int] = field(default_factory=dict)
    #: The first step that not all members take part in (None: there is none; 0: it is not known, as
    #: members are ``lost``).
    over_from: int | None = None
    #: Members whose loss was announced, with the reasons.
    lost: dict[str, str] = field(default_factory=dict)
    #: A member has asked since, or is gone, so that no more steps are committed in it.
    is_recorded: bool = False
    #: When a member will have waited for others in a step for too long (inf: none waits).
    look_at: float = math.inf
    #: When that was looked at last.
    looked_at: float = -math.inf
    #: The same as ``look_at``, of a member that has asked since.
    last_look_at: float = math.inf

    @property
    def due_at(self) -> float:
        """The time to look for members that keep others waiting."""
        return self.look_at if self.over_from is None else self.last_look_at

    def record_wait(self, since: float, patience_s: float, now: float) -> None:
        """Record that a member waits for others in a step since ``since``."""
        if self.may_go_on and self.over_from is None:
            self.look_at = min(self.look_at, max(since + patience_s, self.looked_at + LOOK_S, now))

    def is_due(self, now: float) -> bool:
        """Whether to look for members that keep others waiting; not again within `LOOK_S`."""
        if now < self.due_at:
            return False
        if self.over_from is None:
            self.looked_at, self.look_at = now, now + LOOK_S
        else:
            self.last_look_at = math.inf
        return True

    def ends_with(self, step: int, *, agreed: bool) -> bool:
        """End the term as a member asks for a quorum at ``step``; whether that is news for others.

        It is not if all members know already (``agreed``), unless that was before this term.
        """
        is_known = self.over_from is not None and self.over_from <= step
        if not self.may_go_on or is_known or (agreed and step > self.began_at):
            return False
        self.over_from = step
        return True
