"""Adds up what a worker's training thread spends its time on, step by step (rule N6).

``now`` is monotonic seconds. A step costs a few additions; everything else happens in rounds, which
are rare where steps ask nobody.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from torchft_svc.core.quorum.tally import StepTimes, Tally

# A usual step takes the median of so many: one in which all stood still makes no other one longer.
NUM_USUAL = 20
# The times of a step's phases are means over about so many seconds, in which one step is at most so
# much; the first steps of a process compile, and fill caches.
MEAN_OVER_S, MOST_OF_ONE_STEP = 5.0, 0.3
NUM_WARM_UP_STEPS = 3


class RoundWork(enum.Enum):
    """What the background thread of a worker does in a round."""

    WAITING = "waits for the quorum"
    RECONFIGURING = "connects the members"
    HEALING = "fetches a state"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Recovery:
    """The way to the first commit in another quorum, in seconds.

    ``paused_s``: how much longer than a usual step the time since the last commit was (None: there
    was none). ``reconfigured_s``, ``healed_s`` (None: it has not healed): how long the background
    thread took for it.
    """

    paused_s: float | None
    reconfigured_s: float
    healed_s: float | None


class TimeUse:
    """The time of one worker since its first question.

    The training thread reports the ends of its steps, and how long it stood still; the background
    thread reports its work.
    """

    def __init__(self) -> None:
        # All as of the end of the last step, in one tuple: another thread reads it at any time.
        self._tally = (0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0)
        self._since: float | None = None  # the end of the last step
        self._committed_at: float | None = None
        self._quorum_id = 0  # of the last committed step
        self._step: int | None = None  # after it
        self._lost_at_commit = (0.0, 0.0, 0.0, 0.0)  # as in the tally
        self._last_steps_s: deque[float] = deque(maxlen=NUM_USUAL)
        # The phases of the present step: since when it trains, when the update before it ended, and
        # how long the thread has waited for others, in the step and before it.
        self._began_at = 0.0
        self._updated_at: float | None = None
        self._waited_s = self._waited_before_s = 0.0
        self._num_warm_up_steps = 0
        self._load = 1.0  # of the present step
        # Training, updating, between, waiting, the load, and the number of steps; read by other
        # threads.
        self._means: tuple[float, float, float, float, float, int] | None = None
        # In the present step, of the training thread.
        self._still = dict.fromkeys(RoundWork, 0.0)
        self._still_s = 0.0
        # Of the background thread: when its work changed, and how long each took since the last
        # commit in another quorum.
        self._changes: list[tuple[float, RoundWork | None]] = []
        self._spent = dict.fromkeys(RoundWork, 0.0)

    # -- the training thread ---------------------------------------------------------------------

    def begin_step(self, now: float) -> None:
        """Record that the worker begins a step; its time begins with the first one."""
        if self._since is None:
            self._since = now
        self._began_at = now
        self._waited_before_s, self._waited_s = self._waited_s, 0.0
        self._load = 1.0

    def record_load(self, load: float) -> None:
        """Record how many samples of the present step this group was dealt, relative to an even
        share of them."""
        self._load = load

    def end_update(self, now: float) -> None:
        """Record that the update of the last committed step is in the weights."""
        self._updated_at = now

    def record_wait(self, seconds: float) -> None:
        """Record that the training thread has waited for others since the last call, and not for
        the round."""
        self._waited_s += seconds

    def stood_still(self, since: float, now: float) -> None:
        """Record that the program waited for the round meanwhile."""
        left_s = now - since
        for work, seconds in self._overlaps(since, now).items():
            self._still[work] += seconds
            left_s -= seconds
        self._still[RoundWork.WAITING] += max(0.0, left_s)  # for the thread itself
        self._still_s += now - since

    def sum_again(self, now: float) -> None:
        """Record that the sums of the step are made again without a lost group: what it has taken
        beyond a usual step so far was a wait for that."""
        usual_s = self._usual_step_s()
        if self._since is None or usual_s is None:
            return
        vain_s = now - self._since - self._still_s - usual_s
        if vain_s > 0:
            self._still[RoundWork.WAITING] += vain_s
            self._still_s += vain_s

    def end_committed(self, now: float, quorum_id: int, step: int = 0) -> Recovery | None:
        """Record that a step was committed in ``quorum_id``, and that this is ``step`` now; the
        recovery, if that is another quorum than that of the last commit.

        What its first step takes beyond a usual one, such as the state that it offers to others, is
        a part of the change. A wait for the same quorum is a part of the step; of a wait for
        another one, as much as fits into a usual step. Steps that the others have committed
        meanwhile were of use to the job.
        """
        is_same = quorum_id == self._quorum_id
        usual_s = None if is_same and step == (self._step or 0) + 1 else self._usual_step_s()
        if is_same:  # another one is connected to first
            self._add_step_times(now)
        at_most_s = math.inf if is_same or usual_s is None else usual_s
        if is_same or usual_s is not None:  # usual steps contain waits for their quorum, too
            self._move_wait_into_step(now, at_most_s)
        took_s = self._end_step(now, committed=True, at_most_s=at_most_s)
        if self._step is not None and step > self._step + 1 and usual_s is not None:
            self._add_steps_of_others((step - self._step - 1) * usual_s)
        self._step, self._lost_at_commit = step, self._tally[1:5]
        self._last_steps_s.append(took_s)
        last_at, self._committed_at = self._committed_at, now
        if quorum_id == self._quorum_id:
            return None
        self._quorum_id = quorum_id
        spent, self._spent = self._spent, dict.fromkeys(RoundWork, 0.0)
        paused_s = None if last_at is None else max(0.0, now - last_at - (usual_s or took_s))
        return Recovery(paused_s, spent[RoundWork.RECONFIGURING], spent[RoundWork.HEALING] or None)

    def _usual_step_s(self) -> float | None:
        """What a usual step takes (None: there was none yet)."""
        return statistics.median(self._last_steps_s) if self._last_steps_s else None

    def _add_step_times(self, now: float) -> None:
        """Add the phases of the step that ends now to their means."""
        if self._num_warm_up_steps < NUM_WARM_UP_STEPS:
            self._num_warm_up_steps += 1
            return
        ended_at = self._began_at if self._since is None else self._since
        updated_at = self._updated_at
        if updated_at is None or updated_at < ended_at:
            updated_at = ended_at
        waited_s = self._still_s + self._waited_s
        trained_s = max(0.0, now - self._began_at - waited_s)
        updated_s = updated_at - ended_at
        between_s = max(0.0, self._began_at - updated_at - self._waited_before_s)
        waited_s += self._waited_before_s
        if self._means is None:
            self._means = (trained_s, updated_s, between_s, waited_s, self._load, 1)
            return
        train, update, between, wait, load, num = self._means
        num += 1
        part = max(1 / num, min(MOST_OF_ONE_STEP, (now - ended_at) / MEAN_OVER_S))
        self._means = (
            train + (trained_s - train) * part,
            update + (updated_s - update) * part,
            between + (between_s - between) * part,
            wait + (waited_s - wait) * part,
            load + (self._load - load) * part,
            num,
        )

    def _move_wait_into_step(self, now: float, at_most_s: float) -> None:
        """Count the wait of this step as a part of the step, as long as that has taken no more than
        ``at_most_s``."""
        since = now if self._since is None else self._since
        took_s = now - since - self._still_s
        moved_s = max(0.0, min(at_most_s - took_s, self._still[RoundWork.WAITING]))
        self._still_s -= moved_s
        self._still[RoundWork.WAITING] -= moved_s

    def _add_steps_of_others(self, seconds: float) -> None:
        """Count so much of what was lost since the last commit as committed, in which the others
        have trained: this group was frozen, cut off, or late."""
        commit_s, *lost, commits, discards, until = self._tally
        added = [now - then for now, then in zip(lost, self._lost_at_commit, strict=True)]
        total_s = sum(added)
        moved_s = min(seconds, total_s)
        if moved_s > 0:
            left = 1 - moved_s / total_s
            parts = [
                then + left * each for then, each in zip(self._lost_at_commit, added, strict=True)
            ]
            self._tally = (
                commit_s + moved_s, parts[0], parts[1], parts[2], parts[3], commits, discards, until
            )  # fmt: skip

    def end_discarded(self, now: float) -> float:
        """Record that a step was discarded; returns how long it took, without standing still."""
        return self._end_step(now, committed=False)

    def _end_step(self, now: float, *, committed: bool, at_most_s: float = math.inf) -> float:
        since = now if self._since is None else self._since
        took_s = max(0.0, now - since - self._still_s)
        commit_s, discard_s, wait_s, reconfigure_s, heal_s, commits, discards, _ = self._tally
        if took_s > at_most_s:
            reconfigure_s += took_s - at_most_s
            took_s = at_most_s
        if committed:
            commit_s += took_s
            commits += 1
        else:
            discard_s += took_s
            discards += 1
        if self._still_s:
            wait_s += self._still[RoundWork.WAITING]
            reconfigure_s += self._still[RoundWork.RECONFIGURING]
            heal_s += self._still[RoundWork.HEALING]
            self._still = dict.fromkeys(RoundWork, 0.0)
            self._still_s = 0.0
        self._since, self._waited_s = now, 0.0
        self._tally = (
            commit_s, discard_s, wait_s, reconfigure_s, heal_s, commits, discards, now
        )  # fmt: skip
        return took_s

    # -- the background thread -------------------------------------------------------------------

    def begin_round(self) -> None:
        """Forget the work of the round before; no round is running."""
        self._changes = []

    def change_work(self, work: RoundWork | None, now: float) -> None:
        """Record what the round does from now on (None: nothing of these)."""
        if self._changes:
            since, before = self._changes[-1]
            if before is not None:
                self._spent[before] += now - since
        self._changes.append((now, work))

    def _overlaps(self, since: float, now: float) -> dict[RoundWork, float]:
        """How long the round did what between these instants."""
        # The last one ends now; of a round that has not begun to run, there is none.
        changes = [*self._changes, (now, None)]
        found: dict[RoundWork, float] = {}
        for (began_at, work), (ended_at, _) in pairwise(changes):
            seconds = min(ended_at, now) - max(began_at, since)
            if work is not None and seconds > 0:
                found[work] = found.get(work, 0.0) + seconds
        return found

    # -- for any thread --------------------------------------------------------------------------

    def tally(self, now: float) -> Tally | None:
        """What the time was spent on until the end of the last step (None: there was none)."""
        commit_s, discard_s, wait_s, reconfigure_s, heal_s, commits, discards, until = self._tally
        if not commits and not discards:
            return None
        step_times = None
        if (means := self._means) is not None:
            train, update, between, wait, load, num = means
            step_times = StepTimes(train, update, between, wait, num, load=load)
        return Tally(
            committed_s=commit_s,
            discarded_s=discard_s,
            waiting_s=wait_s,
            reconfiguring_s=reconfigure_s,
            healing_s=heal_s,
            num_committed=commits,
            num_discarded=discards,
            ago_s=max(0.0, now - until),
            step_times=step_times,
        )
