"""Reads the ledger that the lighthouses have written, and compares it with the faults."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.chaos.cluster import EventLog
from tools.chaos.director import Incident
from tools.chaos.faults import FOR_ALL, Kind

# From here on a fault that lasts is longer than all timeouts, and has to have a record.
LONG_S = 3.0
# What groups report to the next lighthouse, and to the one after that; it may have been over before
# the one that learns of it first has begun.
_REPORTED = frozenset({"lighthouse_away", "manager_died"})
_SAME_S = 1.0
# A record may be older than the fault as it was noted.
_EARLY_S = 0.2
# What a record about the group that was hit may be.
_LEFT_OUT = frozenset({"lost", "hung", "evicted", "straggled"})
CAUSES: Mapping[Kind, frozenset[str]] = {
    Kind.WORKER_KILLED: frozenset({"lost"}),
    Kind.GROUP_KILLED: frozenset({"lost"}),
    Kind.MANAGER_KILLED: frozenset({"manager_died"}),
    Kind.GROUP_FROZEN: _LEFT_OUT,
    Kind.WORKER_FROZEN: _LEFT_OUT,
    Kind.WORKER_HANGS: _LEFT_OUT,
    Kind.STEP_HANGS: _LEFT_OUT,
    Kind.SUM_FAILS: frozenset({"discarded"}),
    Kind.CUT_OFF: frozenset({"lost", "lighthouse_away"}),
    Kind.DRAINED: frozenset({"drained"}),
    Kind.LIGHTHOUSE_KILLED: frozenset({"lighthouse_away"}),
    Kind.LIGHTHOUSES_AWAY: frozenset({"lighthouse_away"}),
}
# The sums may be made again before anybody discards the step (rule E9); one of two lighthouses may
# not be in use; a group may be cut off before it is back at a restarted one.
_MAY_HAVE_NONE = frozenset({Kind.SUM_FAILS, Kind.LIGHTHOUSE_KILLED, Kind.CUT_OFF})
_COMES = frozenset({"joined", "run_changed"})


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a ledger; ``at`` is on the clock of the events, ``groups`` are their numbers."""

    job: str
    kind: str
    cause: str
    groups: frozenset[int]
    at: float

    @classmethod
    def parsed(cls, line: Mapping[str, Any], wall_offset_s: float) -> Record:
        names = (each.partition(":")[0].rpartition("-")[2] for each in line["groups"])
        groups = frozenset(int(name) for name in names if name.isdigit())
        return cls(line["job"], line["kind"], line["cause"], groups, line["at"] - wall_offset_s)

    def is_new(self, since: float, before: Sequence[Record]) -> bool:
        """Whether no lighthouse that died up to ``since`` has written this, or ``before``."""
        return not any(map(self._repeats, before)) if self.kind in _REPORTED else self.at >= since

    def _repeats(self, other: Record) -> bool:
        """Whether groups have reported the same to another lighthouse."""
        is_about_all = self.kind == "lighthouse_away"
        return (
            (other.kind, other.job) == (self.kind, self.job)
            and abs(other.at - self.at) < _SAME_S
            and (is_about_all or bool(other.groups & self.groups))
        )


@dataclass(frozen=True, slots=True)
class WrongRecord:
    """A fault, at ``at``, whose records in the ledger of ``job`` are not what was expected.

    ``what``: how they differ; ``expected``: the kinds of which its one record may be; ``found``:
    its records, or if it has none, those of the same time.
    """

    fault: str
    job: str
    at: float
    group: int
    what: str
    expected: tuple[str, ...]
    found: tuple[Record, ...]

    def sentence(self, zero: float) -> str:
        """All of it, with times since ``zero``."""
        found = [
            f"{each.kind} of groups {sorted(each.groups)} at {each.at - zero:.1f} s: {each.cause}"
            for each in self.found
        ]
        return (
            f"job {self.job}, {self.at - zero:.1f} s: {self.fault} {self.what}; expected is one of "
            f"{' or '.join(self.expected)}, the ledger has {found}"
        )


def read_records(logs: Iterable[EventLog], wall_offset_s: float) -> list[Record]:
    """The latest state of all records, each once, by time: without what groups repeat to a
    restarted lighthouse."""
    records: list[Record] = []
    for log in logs:
        if not log.path.exists():
            continue
        latest: dict[tuple[str, int], dict[str, Any]] = {}
        for line in log.path.read_text().splitlines():
            parsed = json.loads(line)
            latest[parsed["job"], parsed["number"]] = parsed
        found = [Record.parsed(each, wall_offset_s) for each in latest.values()]
        records += [each for each in found if each.is_new(log.since, records)]
    return sorted(records, key=lambda each: each.at)


def compare_records(
    records: Sequence[Record], incidents: Sequence[Incident], jobs: Iterable[str]
) -> Iterator[WrongRecord]:
    """The faults whose records are wrong: each fault has one about the group that it has hit."""
    jobs = list(jobs)
    for number, incident in enumerate(incidents):
        causes = CAUSES.get(incident.fault.kind)
        if causes is None or incident.is_unseen:
            continue
        following = incidents[number + 1 :]
        until = following[0].began_at - _EARLY_S if following else float("inf")
        # The next one may be felt later than it began. A group goes on without its manager, and may
        # notice its death later.
        if incident.back_s is not None and incident.fault.kind is not Kind.MANAGER_KILLED:
            until = min(until, incident.at + incident.back_s)
        within = [
            each
            for each in records
            if incident.at - _EARLY_S <= each.at < until and each.kind not in _COMES
        ]
        for job in jobs if incident.fault.kind in FOR_ALL else [incident.job]:
            of_job = [each for each in within if each.job == job]
            yield from _compare_one(incident, job, causes, of_job)


def _compare_one(
    incident: Incident, job: str, causes: frozenset[str], records: Sequence[Record]
) -> Iterator[WrongRecord]:
    fault = incident.fault
    if fault.kind in FOR_ALL:
        mine = [each for each in records if each.kind == "lighthouse_away"]
    else:
        mine = [each for each in records if fault.group in each.groups]
    is_short = 0 < fault.length_s < LONG_S
    if not mine and not is_short and fault.kind not in _MAY_HAVE_NONE:
        what = "has no record"
    elif len(mine) > 1:
        what = f"has {len(mine)} records"
    elif mine and mine[0].kind not in causes:
        what = "has a record of another kind"
    else:
        return
    yield WrongRecord(
        incident.name(),
        job,
        incident.at,
        fault.group,
        what,
        tuple(sorted(causes)),
        tuple(mine or records),
    )
