"""Decides whether the run kept what is promised: pure rules over what was seen."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tools.chaos.director import Incident
from tools.chaos.faults import Kind
from tools.chaos.records import Record, WrongRecord, compare_records
from tools.chaos.samples import PROGRAM, ledger_of
from tools.chaos.stretches import Reading, Stretch, find_stretches, whole_stretch
from tools.demo.events import (
    Committed,
    Discarded,
    Event,
    Exited,
    Healed,
    Killed,
    PhaseBegan,
    Started,
)
from tools.demo.promises import Verdict

E = TypeVar("E", bound=Event)
# The share of the time by which a lighthouse and an observer may differ.
GOODPUT_WITHIN = 0.02
Seen = Sequence[tuple[str, Event]]  # the job that it happened in, and the event
Life = tuple[int, int, int]  # group, incarnation, group rank

_RESTARTS = (Kind.LIGHTHOUSE_KILLED, Kind.LIGHTHOUSES_AWAY)
# A lighthouse is back, and a newcomer that asked it first has committed, by then.
_BEGINS_ANEW_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All that is known when the run is over; the events of one worker are in order.

    ``began_at``: from when on the seconds count that are shown.
    """

    seen: Seen
    incidents: Sequence[Incident]
    leftovers: Sequence[str] = ()
    records: Sequence[Record] = ()
    readings: Sequence[Reading] = ()
    began_at: float = 0.0
    interrupted: bool = False
    failure: str = ""

    def events(self, kind: type[E], job: str | None = None) -> Iterator[E]:
        for where, event in self.seen:
            if isinstance(event, kind) and job in (None, where):
                yield event

    def _by_time(self, job: str) -> list[Event]:
        return sorted(self.events(Event, job), key=lambda event: event.at)

    def begun_anew(self, job: str) -> set[Event]:
        """The commits of newcomers that were the first at a restarted lighthouse, trained alone,
        and gave that up when they healed from the members that came back (rule F8)."""
        back_at = [
            incident.at + incident.fault.length_s
            for incident in self.incidents
            if incident.fault.kind in _RESTARTS
        ]
        known: set[Life] = set()  # they have committed or healed
        alone: dict[Life, list[Event]] = {}
        given_up: set[Event] = set()
        for event in self._by_time(job):
            life = (*event.life, event.worker)
            if isinstance(event, Committed):
                follows_restart = any(0 <= event.at - at <= _BEGINS_ANEW_S for at in back_at)
                if life not in known and event.step == 1 and follows_restart:
                    alone[life] = []
                if " " in event.members:
                    alone.pop(life, None)
                elif life in alone:
                    alone[life].append(event)
            elif isinstance(event, Healed):
                given_up.update(alone.pop(life, ()))
            else:
                continue
            known.add(life)
        return given_up

    def jobs(self) -> list[str]:
        return sorted({job for job, _ in self.seen})

    def wrong_records(self) -> list[WrongRecord]:
        return list(compare_records(self.records, self.incidents, self.jobs()))

    def useful_commits(self, job: str) -> list[Committed]:
        """The job's commits without what `begun_anew` holds: others have done these steps."""
        anew = self.begun_anew(job)
        return [event for event in self.events(Committed, job) if event not in anew]

    def stretches(self, job: str) -> list[Stretch]:
        readings = [each for each in self.readings if each.job == job]
        return list(find_stretches(readings, self.useful_commits(job)))

    def histories(self, job: str) -> Iterator[Sequence[Event]]:
        """The job's events by time, without what `begun_anew` holds; where an operator let it go
        back, another history begins."""
        anew = self.begun_anew(job)
        events = [event for event in self._by_time(job) if event not in anew]
        for incident in self.incidents:
            if incident.job == job and incident.fault.kind is Kind.STALE_SURVIVOR:
                yield [event for event in events if event.at < incident.at]
                events = [event for event in events if event.at >= incident.at]
        yield events


def judge(run: Run) -> list[Verdict]:
    """The verdict on every promise, in the order in which the report shows them."""
    return [rule(run) for rule in _RULES]


def judge_end(run: Run) -> Verdict:
    promise = "the run reached its end"
    if run.interrupted:
        return Verdict.not_judged(promise, "interrupted")
    faults = [run.failure] if run.failure else []
    if not run.incidents:
        faults.append("nothing went wrong, so nothing was shown")
    return Verdict.of(promise, faults, f"{len(run.incidents)} faults")


def judge_bounds(run: Run) -> Verdict:
    late = [
        f"{incident.stall_s:.2f} s, allowed are {incident.allowed_s:.2f} s, at {incident.name()}"
        for incident in run.incidents
        if incident.stall_s is not None and incident.stall_s > incident.allowed_s
    ]
    return Verdict.of("the others continued within the limit of each fault", late, "see the table")


def _histories(run: Run) -> Iterator[tuple[str, Sequence[Event]]]:
    return ((job, events) for job in run.jobs() for events in run.histories(job))


def _commits(events: Sequence[Event]) -> Iterator[Committed]:
    return (event for event in events if isinstance(event, Committed))


def judge_ids(run: Run) -> Verdict:
    """I1: per job, one id names one list of members; per worker's place, ids do not go back."""
    faults, num_ids = [], 0
    for job in run.jobs():
        members: dict[int, str] = {}
        last: dict[tuple[int, int], int] = {}
        for commit in run.events(Committed, job):
            if members.setdefault(commit.quorum_id, commit.members) != commit.members:
                faults.append(f"job {job}: quorum {commit.quorum_id} has two lists of members")
            place = commit.group, commit.worker
            if commit.quorum_id < last.get(place, 0):
                faults.append(f"group {commit.group} went back to quorum {commit.quorum_id}")
            last[place] = commit.quorum_id
        num_ids += len(members)
    return Verdict.of("I1: quorum ids grow, and each names one quorum", faults, f"{num_ids} ids")


def judge_identity(run: Run) -> Verdict:
    """I3: equal steps, equal bits; a commit that was nobody else's is set apart (`lone_ends`)."""
    faults, num_compared, num_lone = [], 0, 0
    for job, events in _histories(run):
        lone = lone_ends(events)
        num_lone += len(lone)
        first: dict[tuple[int, int], Committed] = {}
        for commit in _commits(events):
            if commit in lone:
                continue
            other = first.setdefault((commit.worker, commit.step), commit)
            num_compared += other is not commit
            if other.digest != commit.digest:
                faults.append(
                    f"job {job}, step {commit.step}: groups {other.group} and {commit.group} differ"
                )
    aside = f"; {num_lone} given up with their group and done again" if num_lone else ""
    promise = "I3: groups that committed the same step are identical, bit for bit"
    return Verdict.of(promise, faults, f"{num_compared} comparisons{aside}")


def lone_ends(events: Sequence[Event]) -> set[Committed]:
    """Commits that differ from everybody else's, and that nothing was built on.

    A group decides its commit alone. If it is lost, or cut off, before the others commit that step,
    they do it again without it, in another quorum; what it did is given up when it dies or heals.
    """
    ends: set[Committed] = set()
    last: dict[Life, Committed] = {}
    for event in events:
        life = (*event.life, event.worker)
        if isinstance(event, Committed):
            last[life] = event
        elif isinstance(event, (Healed, Exited)) and life in last:
            ends.add(last.pop(life))
    others: dict[tuple[int, int], list[Committed]] = defaultdict(list)
    for commit in _commits(events):
        if commit not in ends:
            others[commit.worker, commit.step].append(commit)
    return {end for end in ends if _is_lone(end, others[end.worker, end.step])}


def _is_lone(end: Committed, others: Sequence[Committed]) -> bool:
    digests = {other.digest for other in others}
    quorum_ids = {other.quorum_id for other in others}
    return bool(others) and end.digest not in digests and end.quorum_id not in quorum_ids


def judge_progress(run: Run) -> Verdict:
    """I4: a step that two groups have committed is never begun again, nor one that one has gone on
    from: the quorum for that has shown it to the lighthouse."""
    faults, top_of_all = [], 0
    num_anew = sum(len(run.begun_anew(job)) for job in run.jobs())
    for job, events in _histories(run):
        begun: dict[Life, float] = {}
        done_by: dict[int, set[int]] = defaultdict(set)  # the groups, by step
        final: list[tuple[float, int]] = []  # from when on a step is not to be done again
        for event in events:
            life = (*event.life, event.worker)
            if isinstance(event, PhaseBegan) and event.phase == "forward":
                begun[life] = event.at
            elif isinstance(event, Committed):
                top = _top_before(final, begun.get(life, event.at))
                if event.step <= top:
                    faults.append(
                        f"job {job}: group {event.group} committed step {event.step} again, "
                        f"step {top} was done"
                    )
                done_by[event.step].add(event.group)
                step = event.step if len(done_by[event.step]) > 1 else event.step - 1
                if step > _top_before(final, math.inf):
                    final.append((event.at, step))
                top_of_all = max(top_of_all, event.step)
    promise = "I4: no committed step was lost or done again"
    aside = f"; {num_anew} of newcomers that began anew given up" if num_anew else ""
    return Verdict.of(promise, faults, f"up to step {top_of_all}{aside}")


def _top_before(final: Sequence[tuple[float, int]], at: float) -> int:
    """The highest step that was final before ``at``; instants grow, and so do steps."""
    for done_at, step in reversed(final):
        if done_at < at:
            return step
    return 0


def judge_discards(run: Run) -> Verdict:
    """I6: after a discarded update the state is that of the commit before it."""
    faults, num_checked = [], 0
    last: dict[Life, Committed | Discarded] = {}
    for event in run.events(Event):
        life = (*event.life, event.worker)
        if isinstance(event, Committed):
            last[life] = event
        elif isinstance(event, Healed):
            last.pop(life, None)
        elif isinstance(event, Discarded):
            before = last.setdefault(life, event)  # the first one after a heal shows what it was
            num_checked += before is not event
            if (event.step, event.digest) != (before.step, before.digest):
                faults.append(f"group {event.group} changed while it discarded at {event.step}")
    return Verdict.of("I6: a discarded update changed nothing", faults, f"{num_checked} discards")


def judge_exits(run: Run) -> Verdict:
    """SIGTERM ends a worker with status 0; nobody dies by himself, and all have ended."""
    faults, statuses = [], []
    unseen = {(*event.life, event.worker) for event in run.events(Started)}
    killed = {(*event.life, event.worker) for event in run.events(Killed)}
    for event in run.events(Exited):
        statuses.append(event.status)
        unseen.discard((*event.life, event.worker))
        if (*event.life, event.worker) not in killed and event.status != 0:
            is_consequence = _peer_was_killed(event, killed)
            if not is_consequence:
                faults.append(f"group {event.group} ended with status {event.status}")
    if unseen and not (run.failure or run.interrupted):
        faults.append(f"the end of {len(unseen)} workers was not seen: {sorted(unseen)}")
    proof = f"{len(statuses)} ends, {statuses.count(0)} with status 0"
    return Verdict.of("no worker died by itself, SIGTERM ends with status 0", faults, proof)


def _peer_was_killed(event: Exited, killed: Iterable[Life]) -> bool:
    return any((group, incarnation) == event.life for group, incarnation, _ in killed)


def judge_samples(run: Run) -> Verdict:
    """Each sample of an epoch is in one committed step (rule D1)."""
    faults, num_steps = [], 0
    for job, events in _histories(run):
        ledger = ledger_of(events, PROGRAM["samples"], PROGRAM["batch"])
        faults += [f"job {job}: {fault}" for fault in ledger.faults()]
        num_steps += ledger.num_steps
    promise = "every sample of an epoch was in one committed step"
    return Verdict.of(promise, faults, f"{num_steps} steps")


def judge_records(run: Run) -> Verdict:
    """Each fault is one record with its cause (rules N1, N2)."""
    faults = [wrong.sentence(run.began_at) for wrong in run.wrong_records()]
    kinds = Counter(record.kind for record in run.records)
    num_unseen = sum(incident.is_unseen for incident in run.incidents)
    proof = ", ".join(f"{num} {kind}" for kind, num in kinds.most_common())
    proof += f"; {num_unseen} faults before the lighthouse was back" * (num_unseen > 0)
    return Verdict.of("each fault is one record with its cause", faults, proof)


def judge_goodput(run: Run) -> Verdict:
    """A job's goodput is what its commits show (rule N6); if not, where it differs most."""
    promise = "the goodput is what an observer sees"
    if not run.readings:
        return Verdict.not_judged(promise, "no lighthouse could be asked for it")
    faults, proofs = [], []
    for job, last in {each.job: each for each in run.readings}.items():
        whole = whole_stretch(last, run.useful_commits(job))
        proofs.append(
            f"job {job}: {whole.ledger_s:.1f} s of {whole.length_s:.1f} s, "
            f"seen {whole.seen_s:.1f} s"
        )
        if abs(whole.excess_s) > GOODPUT_WITHIN * whole.length_s:
            faults.append(whole.sentence(run.began_at))
            parts = [each for each in run.stretches(job) if each.began_at >= whole.began_at - 1]
            parts.sort(key=lambda each: -abs(each.excess_s))
            differing = filter(lambda each: each.differs_by_more_than(GOODPUT_WITHIN), parts)
            faults += [each.sentence(run.began_at) for each in differing]
    return Verdict.of(promise, faults, "; ".join(proofs))


def judge_leftovers(run: Run) -> Verdict:
    return Verdict.of("no process was left over", list(run.leftovers), "none found")


_RULES = (
    judge_end,
    judge_bounds,
    judge_ids,
    judge_identity,
    judge_progress,
    judge_discards,
    judge_samples,
    judge_exits,
    judge_records,
    judge_goodput,
    judge_leftovers,
)
