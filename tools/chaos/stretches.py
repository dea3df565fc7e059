"""Compares what a lighthouse says of a job's time with its commits, from one fault to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tools.chaos.observed import observe
from tools.demo.events import Committed
from torchft_svc.core.quorum.lighthouse.incidents import Goodput

# Accounts that begin so much earlier or later are others: of a restarted lighthouse, or of a group
# that knows more.
_SAME_S = 0.5
# What the step under way may add to the goodput of a stretch, and take from that of the next one.
_STEP_S = 0.2


@dataclass(frozen=True, slots=True)
class Reading:
    """The goodput of a job as its lighthouse said at ``at``, after the fault named ``fault``."""

    job: str
    at: float
    fault: str
    goodput: Goodput

    @property
    def began_at(self) -> float:
        """The beginning of the accounts of the lighthouse."""
        return self.at - self.goodput.wall_s

    def continues(self, before: Reading) -> bool:
        """Whether this is of the same accounts as the reading ``before``."""
        return abs(self.began_at - before.began_at) < _SAME_S


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a job's time: how much of it ended in committed steps, as its lighthouse says, and
    as an observer of the commits has seen.

    ``fault``: the last one in it. ``lost_s``: what the rest was lost to, by cause.
    """

    job: str
    fault: str
    began_at: float
    ended_at: float
    ledger_s: float
    seen_s: float
    lost_s: dict[str, float]

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.ended_at - self.began_at

    @property
    def excess_s(self) -> float:
        """What the lighthouse counts as committed beyond what was seen."""
        return self.ledger_s - self.seen_s

    def differs_by_more_than(self, share: float) -> bool:
        """Whether both differ by more than this share of the time."""
        return abs(self.excess_s) > max(share * self.length_s, _STEP_S)

    def sentence(self, zero: float) -> str:
        """All of it, with times since ``zero``."""
        lost = {cause: round(s, 2) for cause, s in self.lost_s.items() if abs(s) >= 0.05}
        return (
            f"job {self.job}, {self.began_at - zero:.1f} to {self.ended_at - zero:.1f} s: the "
            f"ledger has {self.ledger_s:.2f} s of {self.length_s:.2f} s, seen were "
            f"{self.seen_s:.2f} s, lost {lost}; {self.fault}"
        )


def whole_stretch(reading: Reading, commits: Iterable[Committed]) -> Stretch:
    """All time that the accounts of a reading cover."""
    since, goodput = reading.began_at, reading.goodput
    seen_s = observe(commits, since, reading.at).committed_s
    lost_s = dict(goodput.lost_s)
    return Stretch(
        reading.job, reading.fault, since, reading.at, goodput.committed_s, seen_s, lost_s
    )


def find_stretches(readings: Sequence[Reading], commits: Iterable[Committed]) -> Iterator[Stretch]:
    """The time from one reading of a job to the next; where a lighthouse has begun other accounts,
    all that they cover."""
    commits = sorted(commits, key=lambda each: each.at)
    last, known = None, None
    for reading in readings:
        whole = whole_stretch(reading, commits)
        if last is None or known is None or not reading.continues(last):
            yield whole
        else:
            yield Stretch(
                whole.job,
                whole.fault,
                known.ended_at,
                whole.ended_at,
                whole.ledger_s - known.ledger_s,
                whole.seen_s - known.seen_s,
                {each: s - known.lost_s.get(each, 0.0) for each, s in whole.lost_s.items()},
            )
        last, known = reading, whole
