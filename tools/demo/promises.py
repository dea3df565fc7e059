"""Decides whether the run kept what is promised: pure rules over the events, a verdict for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from tools.demo.events import Committed, Discarded, Event, Exited, Killed, Started
from tools.demo.incidents import Incident, incidents_of

# Losses are drawn from small batches: so many are averaged at each end before they are compared.
_LOSS_WINDOW = 10
# With fewer commits than this a run is too short to say anything about its loss.
_MIN_COMMITS_FOR_LOSS = 40
_LOSS_MUST_FALL_TO = 0.8


class Outcome(Enum):
    PASS = "PASS"  # noqa: S105 - a verdict, no password
    FAIL = "FAIL"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether ``promise`` was kept, and the ``detail`` that shows it; ``faults``: all that missed
    it."""

    promise: str
    outcome: Outcome
    detail: str
    faults: tuple[str, ...] = ()

    @classmethod
    def of(cls, promise: str, faults: Sequence[str], proof: str) -> Verdict:
        """Missed if there are ``faults``: the first of them is shown, else the ``proof``."""
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            detail, all_faults = faults[0] + more, tuple(faults)
            return cls(promise=promise, outcome=Outcome.FAIL, detail=detail, faults=all_faults)
        return cls(promise=promise, outcome=Outcome.PASS, detail=proof)

    @classmethod
    def not_judged(cls, promise: str, reason: str) -> Verdict:
        return cls(promise=promise, outcome=Outcome.NOT_JUDGED, detail=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All that is known when the run is over; ``events`` in order of time.

    ``max_stall_s`` bounds the time from a kill until all survivors have committed without the dead.
    ``leftovers`` are processes that had to be ended by force, ``failure`` is what stopped the run
    before its end.
    """

    num_groups: int
    events: Sequence[Event]
    num_kills_planned: int
    max_stall_s: float
    leftovers: Sequence[str] = ()
    interrupted: bool = False
    failure: str = ""

    def commits(self, group: int | None = None) -> list[Committed]:
        return [
            event
            for event in self.events
            if isinstance(event, Committed) and group in (None, event.group)
        ]


def judge(run: Run) -> list[Verdict]:
    """The verdict on every promise, in the order in which the report shows them."""
    return [rule(run) for rule in _RULES]


def judge_completion(run: Run) -> Verdict:
    promise = "the run reached its end"
    if run.interrupted:
        return Verdict.not_judged(promise, "interrupted")
    num_kills = sum(isinstance(event, Killed) for event in run.events)
    faults = [run.failure] if run.failure else []
    if num_kills < run.num_kills_planned:
        faults.append(f"only {num_kills} of {run.num_kills_planned} kills took place")
    if not run.commits():
        faults.append("nothing was committed")
    return Verdict.of(promise, faults, f"kills: {num_kills}")


def judge_identity(run: Run) -> Verdict:
    """I3. A commit that was lost with its group is set apart, see ``lost_commits``."""
    promise = "groups that committed the same step are identical, bit for bit"
    lost = set(lost_commits(run))
    first: dict[int, Committed] = {}
    faults, num_compared = [], 0
    for commit in run.commits():
        if commit in lost:
            continue
        other = first.setdefault(commit.step, commit)
        num_compared += other.group != commit.group
        if other.digest != commit.digest and other.group != commit.group:
            faults.append(f"step {commit.step}: groups {other.group} and {commit.group} differ")
    if run.num_groups > 1 and not num_compared and not faults:
        if run.interrupted:
            return Verdict.not_judged(promise, "no step was committed by two groups yet")
        faults.append("no step was committed by two groups, so nothing was compared")
    aside = f"; {len(lost)} lost with its group and done again" if lost else ""
    return Verdict.of(promise, faults, f"{num_compared} comparisons{aside}")


def lost_commits(run: Run) -> list[Committed]:
    """Commits that nobody shared with a group that was killed right after, and that were redone.

    A group decides its commit alone. If it is killed before any other commits the step, the others
    never saw the update, and do the step again without it. So it counts as lost only if it was the
    last of a killed incarnation, and every other group committed the step after the kill.
    """
    killed_at = {event.life: event.at for event in run.events if isinstance(event, Killed)}
    last: dict[tuple[int, int], Committed] = {}
    of_step: dict[int, list[Committed]] = defaultdict(list)
    for commit in run.commits():
        last[commit.life] = commit
        of_step[commit.step].append(commit)
    lost = []
    for life, commit in last.items():
        others = [other for other in of_step[commit.step] if other.life != life]
        differs = any(other.digest != commit.digest for other in others)
        if life in killed_at and differs and all(other.at > killed_at[life] for other in others):
            lost.append(commit)
    return lost


def judge_single_commit(run: Run) -> Verdict:
    promise = "no group committed one step twice with different bits"
    lost = set(lost_commits(run))
    seen: dict[tuple[int, int], str] = {}
    faults = []
    commits = [commit for commit in run.commits() if commit not in lost]
    if not commits:
        return Verdict.not_judged(promise, "nothing was committed")
    for commit in commits:
        if seen.setdefault((commit.group, commit.step), commit.digest) != commit.digest:
            faults.append(f"group {commit.group} committed step {commit.step} twice, differently")
    return Verdict.of(promise, faults, f"{len(commits)} commits")


def judge_discards(run: Run) -> Verdict:
    """I6: after a discarded update the state is that of the step it names."""
    promise = "a discarded update changed nothing"
    digest_at: dict[tuple[int, int], str] = {}
    faults, num_checked = [], 0
    for event in run.events:
        if isinstance(event, Committed):
            digest_at[event.group, event.step] = event.digest
        elif isinstance(event, Discarded) and (event.group, event.step) in digest_at:
            num_checked += 1
            if digest_at[event.group, event.step] != event.digest:
                faults.append(f"group {event.group} changed while it discarded at {event.step}")
    if not num_checked:
        return Verdict.not_judged(promise, "no update was discarded")
    return Verdict.of(promise, faults, f"{num_checked} discards compared")


def judge_progress(run: Run) -> Verdict:
    """I4: in every life steps grow, and a group that came back goes on where the others are."""
    promise = "no committed step was lost or counted twice"
    faults = []
    step_of: dict[tuple[int, int], int] = {}
    started_step: dict[tuple[int, int], int] = {}
    top = 0
    for event in run.events:
        if isinstance(event, Started):
            started_step[event.life] = top
        elif isinstance(event, Committed):
            before = step_of.get(event.life, started_step.get(event.life, 0))
            if event.step <= before:
                faults.append(f"group {event.group} went from step {before} to {event.step}")
            step_of[event.life] = event.step
            top = max(top, event.step)
    if not top:
        return Verdict.not_judged(promise, "nothing was committed")
    return Verdict.of(promise, faults, f"{top} steps")


def judge_survivors(run: Run) -> Verdict:
    promise = f"survivors committed without the dead within {run.max_stall_s:.2f} s of a kill"
    incidents = [incident for incident in incidents_of(run.events) if incident.survivors]
    if not incidents:
        return Verdict.not_judged(promise, "no group was killed while another group trained")
    faults = []
    for incident in incidents:
        stall = incident.without_s
        if stall is None and not run.interrupted:
            faults.append(f"a survivor never committed after {_name(incident)}")
        elif stall is not None and stall > run.max_stall_s:
            faults.append(f"{stall:.2f} s after {_name(incident)}")
    stalls = [incident.without_s for incident in incidents if incident.without_s is not None]
    return Verdict.of(promise, faults, f"longest {max(stalls, default=0.0):.2f} s")


def judge_healing(run: Run) -> Verdict:
    promise = "every killed group healed and took part again"
    incidents = incidents_of(run.events)
    if not incidents:
        return Verdict.not_judged(promise, "no group was killed")
    if run.interrupted:
        incidents = [incident for incident in incidents if incident.heal_s is not None]
    faults = [
        f"it did not, after {_name(incident)}" for incident in incidents if incident.heal_s is None
    ]
    times = [incident.heal_s for incident in incidents if incident.heal_s is not None]
    return Verdict.of(promise, faults, f"longest {max(times, default=0.0):.2f} s from restart")


def _name(incident: Incident) -> str:
    return f"kill {incident.number} (group {incident.kill.group} in {incident.phase})"


def judge_loss(run: Run) -> Verdict:
    """Judge each loss against the run's first commits: a later group starts with others' state."""
    promise = "the loss of every group fell clearly"
    faults, proofs = [], []
    first = [commit.loss for commit in run.commits() if commit.participating][:_LOSS_WINDOW]
    for group in range(run.num_groups):
        losses = [commit.loss for commit in run.commits(group) if commit.participating]
        if len(losses) < _MIN_COMMITS_FOR_LOSS:
            return Verdict.not_judged(promise, f"group {group} has only {len(losses)} commits")
        begin, end = fmean(first), fmean(losses[-_LOSS_WINDOW:])
        # Written so that a loss that is not a number fails.
        if not end <= _LOSS_MUST_FALL_TO * begin:
            faults.append(f"group {group}: from {begin:.2f} to {end:.2f}")
        proofs.append(f"{begin:.2f} to {end:.2f}")
    return Verdict.of(promise, faults, ", ".join(proofs))


def judge_exits(run: Run) -> Verdict:
    promise = "no trainer died by itself"
    faults = [
        f"group {event.group} ended with status {event.status}"
        for event in run.events
        if isinstance(event, Exited) and not event.expected
    ]
    return Verdict.of(promise, faults, "all ended when asked to")


def judge_leftovers(run: Run) -> Verdict:
    return Verdict.of("no process was left over", list(run.leftovers), "none found")


_RULES: tuple[Callable[[Run], Verdict], ...] = (
    judge_completion,
    judge_identity,
    judge_single_commit,
    judge_discards,
    judge_progress,
    judge_survivors,
    judge_healing,
    judge_loss,
    judge_exits,
    judge_leftovers,
)
