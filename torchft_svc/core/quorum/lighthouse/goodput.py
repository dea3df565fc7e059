"""Accounts for a job's time: what ended in committed steps, and what the rest was lost to.

Training is synchronous, so the time of one member of the quorum is the job's: that of a *reference*
member, which reports its `Tally` with its beats (rule N6). What no tally covers is accounted for by
what the job did. Times are unix seconds; each input costs O(1).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Set
from dataclasses import dataclass

from torchft_svc.core.quorum.lighthouse.incidents import Goodput
from torchft_svc.core.quorum.tally import NO_TALLY, Tally

STARTUP, WAITING, HEALING = "startup", "waiting", "healing"
RECONFIGURING, DISCARDED, HANG = "reconfiguring", "discarded", "hang"
LIGHTHOUSE_AWAY, OTHER = "lighthouse_away", "other"
CAUSES = (
    STARTUP,
    WAITING,
    HEALING,
    RECONFIGURING,
    DISCARDED,
    HANG,
    LIGHTHOUSE_AWAY,
    OTHER,
)
# A step under way counts as committed until its outcome is known, but not for longer than this,
# in usual steps; and where no step is known yet, in seconds.
USUAL_STEPS, FIRST_STEP_S = 2.0, 5.0
# A group whose time began so much before the lighthouse has seen its job knows more than that.
OLDER_S = 1.0
# Within so long, one report of a group at least is on its way for no time that matters. Not longer,
# because clocks drift, and stop with a machine that is suspended.
LATENESS_WINDOW_S = 10.0
# So long a new lighthouse looks for the group that knows most of the time before.
ADOPT_S = 10.0
# A job goes back by few steps, as a rule: those that others took while the group that is left stood
# still. How long steps took is known of those in so many reports.
MAX_MARKS = 512
# Groups that are gone may be back with the same process, if only their connection was lost. What so
# many of them have reported is kept; of another one that is back, its whole time would count.
MAX_GONE = 2048


@dataclass(slots=True)
class _Known:
    """The last tally of a group, and two earlier ones around the instant at which the accounts end:
    one ``before`` it, and one ``after`` it (None: there is none).

    A tally accounts for all time since its process began, on that process's clock, so it ends at
    ``began_at`` plus its sum. Reports are late, never early: the earliest beginning that one of the
    last reports shows is right.
    """

    began_at: float
    since: float
    last: Tally
    before: Tally = NO_TALLY
    after: Tally | None = None
    earliest_before: float = math.inf  # that reports have shown in the window before this one
    earliest: float = math.inf  # and in this one

    def until(self, tally: Tally) -> float:
        """The instant up to which ``tally`` accounts for the time."""
        return self.began_at + tally.total_s

    def record_beginning(self, began_at: float, at: float) -> None:
        """Record what a report that has come at ``at`` shows of the beginning."""
        if at - self.since > LATENESS_WINDOW_S:
            self.since, self.earliest_before, self.earliest = at, self.earliest, math.inf
        self.earliest = min(self.earliest, began_at)
        self.began_at = min(self.earliest, self.earliest_before)

    def replace_last(self, tally: Tally, end: float) -> Tally:
        """Record the next tally; returns the earlier one that ends nearest to the accounts, which
        end at ``end``."""
        if self.until(self.last) <= end:
            self.before, self.after = self.last, None
        elif self.after is None:
            self.after = self.last
        elif self.until(self.after) <= end:
            self.before, self.after = self.after, self.last
        self.last = tally
        if self.after is not None and self.until(self.after) - end < end - self.until(self.before):
            return self.after
        return self.before


class TimeAccounts:
    """The time of one job since ``at``, when its first group was seen."""

    def __init__(self, at: float) -> None:
        self._began_at = at
        self._until = at  # all time before is accounted for
        self._committed_s = 0.0
        self._num_committed = 0.0  # the steps of ``_committed_s``; of some, a part is accounted for
        # Both, as they were after each of the last reports: what the last steps took.
        self._marks: deque[tuple[float, float]] = deque(maxlen=MAX_MARKS)
        self._lost_s = dict.fromkeys(CAUSES, 0.0)
        self._has_quorum = False
        self._ended_at: float | None = None
        self._absence = (at, at)  # the last time in which the lighthouse saw no group of the job
        self._known: dict[str, _Known] = {}
        self._gone: OrderedDict[str, _Known] = OrderedDict()
        self._reference: str | None = None
        self._eligible: Set[str] | None = None  # as the reference; None: any
        self._adopted_at: float | None = None  # the first time
        # What members wait for, or discard steps because of, and until when.
        self._blamed: str | None = None
        self._blamed_until: float | None = None
        # Who is to blame for that, and what was counted so, by its other cause.
        self._blamed_groups: set[str] = set()
        self._blamed_s: dict[str, float] = {}

    # -- inputs ----------------------------------------------------------------------------------

    def record_quorum(self, up_to_date: Set[str], at: float) -> None:
        """Record that a quorum with other members is formed, of which these are up to date."""
        if not self._has_quorum:
            self._has_quorum = True
            self._add_lost(STARTUP, at)
        self._eligible = up_to_date
        if self._reference not in up_to_date:
            self._reference = None
        if self._blamed is not None:
            self._blamed_until = at

    def record_tally(self, replica_id: str, tally: Tally, until: float) -> None:
        """Record the tally of a group, which accounts for the time up to ``until``, or a moment
        less: its report was on its way."""
        known, base = self._record_tally(replica_id, tally, until)
        until = known.until(tally)
        if self._knows_more(tally, until):
            self._adopt(replica_id, tally, until)
            return
        is_eligible = self._eligible is None or replica_id in self._eligible
        if is_eligible and (self._reference is None or self._is_behind(until)):
            self._reference = replica_id
        if replica_id == self._reference and until > self._until:
            self._add_delta(base, tally, until)

    def forget_group(self, replica_id: str) -> None:
        """Forget a group that is gone; it may be back, if only its connection was lost."""
        known = self._known.pop(replica_id, None)
        if known is not None:
            self._gone[replica_id] = known
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)
        if replica_id == self._reference:
            self._reference = None

    def blame_hang(self, replica_id: str) -> None:
        """Count what members wait for and discard until the next quorum as lost to the hang of a
        group."""
        if self._blamed is None:
            self._blamed_groups, self._blamed_s = set(), {}
        self._blamed, self._blamed_until = HANG, None
        self._blamed_groups.add(replica_id)

    def exonerate(self, replica_id: str) -> None:
        """Record that a group had not hung: it was lost.

        What was counted as lost to its hang counts by its own cause again, unless another group has
        hung, too.
        """
        if self._blamed_groups != {replica_id}:
            self._blamed_groups.discard(replica_id)
            return
        self._blamed_groups = set()
        for cause, seconds in self._blamed_s.items():
            self._lost_s[HANG] = max(0.0, self._lost_s[HANG] - seconds)
            self._lost_s[cause] += seconds
        self._blamed, self._blamed_until, self._blamed_s = None, None, {}

    def confirm_hang(self, replica_id: str) -> None:
        """Record that a group that hung goes on: what was lost to its hang stays so, whatever comes
        next."""
        self._blamed_groups.discard(replica_id)
        if not self._blamed_groups:
            self._blamed_s = {}

    def give_up(self, num_steps: int) -> None:
        """Count the last ``num_steps`` committed steps as discarded: the job continues without."""
        num_kept = max(0.0, self._num_committed - num_steps)
        kept_s = self._committed_until(num_kept)
        self._lost_s[DISCARDED] += self._committed_s - kept_s
        while self._marks and self._marks[-1][0] >= num_kept:
            self._marks.pop()
        self._num_committed, self._committed_s = num_kept, kept_s
        self._marks.append((num_kept, kept_s))

    def end(self, at: float) -> None:
        """Record that the last group is gone. If all of them have lost their connection and train
        on, they say so when they are back."""
        for replica_id in list(self._known):
            self.forget_group(replica_id)
        self._ended_at = max(at, self._until)
        self._reference = self._eligible = None

    def begin_again(self, at: float) -> None:
        """Record that a group is back, after the last one was gone."""
        if self._ended_at is not None:
            for cause, until in self._absent_parts():  # no tally has covered an earlier absence
                self._add_lost(cause, until)
            self._absence, self._ended_at = (self._ended_at, max(at, self._ended_at)), None

    # -- what follows ----------------------------------------------------------------------------

    def goodput(self, at: float, *, waits: bool = False, hangs: bool = False) -> Goodput:
        """The goodput at ``at``; ``waits``: groups ask in vain; ``hangs``: one hangs."""
        at = max(self._until, at if self._ended_at is None else self._ended_at)
        committed_s, lost_s = self._committed_s, dict(self._lost_s)
        since = self._until
        for cause, until in self._absent_parts():
            lost_s[cause] += max(0.0, until - since)
            since = max(since, until)
        rest_s = at - since
        rest_cause = self._rest_cause(waits=waits, hangs=hangs)
        if rest_cause is None:
            under_way_s = min(rest_s, self._usual_s())
            committed_s += under_way_s
            lost_s[OTHER] += rest_s - under_way_s
        else:
            lost_s[rest_cause] += rest_s
        wall_s = at - self._began_at
        ratio = min(1.0, committed_s / wall_s) if wall_s > 0 else 0.0
        return Goodput(wall_s=wall_s, committed_s=committed_s, lost_s=lost_s, ratio=ratio)

    def _rest_cause(self, *, waits: bool, hangs: bool) -> str | None:
        """What the time is lost to that no tally covers yet (None: steps are under way)."""
        if not self._has_quorum and not self._known:
            return STARTUP
        if hangs:
            return HANG
        if waits:
            return WAITING
        return None if self._known else OTHER

    def _absent_parts(self) -> tuple[tuple[str, float], tuple[str, float]]:
        """What is lost, unless a tally covers it, up to the last absence, and to its end."""
        gone_at, back_at = self._absence
        return (OTHER if self._has_quorum else STARTUP, gone_at), (WAITING, back_at)

    def _usual_s(self) -> float:
        """How long a step under way counts as committed."""
        reference = self._known.get(self._reference or "")
        if reference is None or not reference.last.num_committed:
            return FIRST_STEP_S
        tally = reference.last
        return USUAL_STEPS * tally.committed_s / tally.num_committed

    # -- the accounts ----------------------------------------------------------------------------

    def _add_lost(self, cause: str, at: float) -> None:
        if at > self._until:
            self._lost_s[cause] += at - self._until
            self._until = at

    def _is_behind(self, until: float) -> bool:
        """Whether the reference has reported no step for long before ``until``."""
        return until - self._until > max(FIRST_STEP_S, self._usual_s())

    def _record_tally(self, replica_id: str, tally: Tally, until: float) -> tuple[_Known, Tally]:
        """Record the next tally of a group; returns also the one from which on it is added, if the
        group is the reference: an earlier reference may have accounted for less, or more."""
        began_at = until - tally.total_s
        known = self._known.get(replica_id)
        if known is None and replica_id in self._gone:
            known = self._known[replica_id] = self._gone.pop(replica_id)
        if known is None or _num_steps(known.last) > _num_steps(tally):  # its process is a new one
            known = self._known[replica_id] = _Known(began_at, until, tally)
            known.record_beginning(began_at, until)
            return known, NO_TALLY
        known.record_beginning(began_at, until)
        return known, known.replace_last(tally, self._until)

    def _add_delta(self, before: Tally, now: Tally, until: float) -> None:
        """Add what the reference has done since ``before``; what an earlier reference has
        accounted for already is left out in proportion."""
        span_s = until - self._until
        parts = _parts(before, now)
        committed_s = max(0.0, now.committed_s - before.committed_s)
        total_s = committed_s + sum(parts.values())
        if total_s > 0:
            scale = min(1.0, span_s / total_s)
            self._committed_s += committed_s * scale
            self._num_committed += max(0, now.num_committed - before.num_committed) * scale
            self._marks.append((self._num_committed, self._committed_s))
            for cause, seconds in parts.items():
                blamed = self._blamed if cause in (WAITING, DISCARDED) else None
                self._lost_s[blamed or cause] += seconds * scale
                if blamed:
                    self._blamed_s[cause] = self._blamed_s.get(cause, 0.0) + seconds * scale
            span_s -= total_s * scale
        self._lost_s[WAITING] += max(0.0, span_s)  # nobody was there who could account for it
        self._until = until
        if self._blamed_until is not None and until >= self._blamed_until:
            self._blamed = self._blamed_until = None

    def _committed_until(self, num_steps: float) -> float:
        """How long the first ``num_steps`` of the committed steps took."""
        marks = [(0.0, 0.0), *self._marks]
        place = bisect_right(marks, num_steps, key=lambda each: each[0])
        if place == len(marks):
            return self._committed_s
        (num_before, before_s), (num_after, after_s) = marks[place - 1], marks[place]
        share = (num_steps - num_before) / (num_after - num_before)
        return before_s + share * (after_s - before_s)

    def _knows_more(self, tally: Tally, until: float) -> bool:
        """Whether a group has been in the job for longer than it is known here; or as long, and was
        there in more of its steps, while the one whose time was adopted stood still."""
        began_at = until - tally.total_s
        if began_at < self._began_at - OLDER_S:
            return True
        if self._adopted_at is None or until - self._adopted_at > ADOPT_S:
            return False
        most_s = self._committed_s + max(0.0, until - self._until)
        return began_at <= self._began_at + OLDER_S and tally.committed_s > most_s

    def _adopt(self, replica_id: str, tally: Tally, until: float) -> None:
        """Begin the accounts with those of a group that was in the job before this lighthouse."""
        self._adopted_at = until if self._adopted_at is None else self._adopted_at
        self._began_at, self._until = until - tally.total_s, until
        self._committed_s, self._num_committed = tally.committed_s, tally.num_committed
        self._marks.clear()
        self._marks.append((self._num_committed, self._committed_s))
        self._lost_s = dict.fromkeys(CAUSES, 0.0) | _parts(NO_TALLY, tally)
        self._blamed_s = {}
        self._has_quorum, self._reference = True, replica_id


def _num_steps(tally: Tally) -> int:
    return tally.num_committed + tally.num_discarded


def _parts(before: Tally, now: Tally) -> dict[str, float]:
    """What was lost between two tallies, by cause."""
    away_s = max(0.0, now.away_s - before.away_s)
    waiting_s = max(0.0, now.waiting_s - before.waiting_s)
    away_s = min(away_s, waiting_s)
    return {
        DISCARDED: max(0.0, now.discarded_s - before.discarded_s),
        WAITING: waiting_s - away_s,
        LIGHTHOUSE_AWAY: away_s,
        RECONFIGURING: max(0.0, now.reconfiguring_s - before.reconfiguring_s),
        HEALING: max(0.0, now.healing_s - before.healing_s),
    }
