"""Tests the rules that judge a run: each falls when what it promises is broken."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tools.chaos.bounds import change_of_members_s
from tools.chaos.cluster import EventLog
from tools.chaos.director import Incident
from tools.chaos.faults import Fault, Kind
from tools.chaos.observed import observe
from tools.chaos.options import PROCESS_GROUPS
from tools.chaos.records import Record, read_records
from tools.chaos.report import print_faults, write_json
from tools.chaos.stretches import Reading, find_stretches
from tools.chaos.verdicts import (
    Run,
    judge_bounds,
    judge_discards,
    judge_end,
    judge_exits,
    judge_goodput,
    judge_identity,
    judge_ids,
    judge_leftovers,
    judge_progress,
    judge_records,
)
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
from tools.demo.promises import Outcome, Verdict
from torchft_svc.core.quorum.lighthouse.incidents import Goodput

_FAULT = Fault(kind=Kind.WORKER_KILLED, group=0, worker=0, length_s=0.0, pause_s=0.0)


def who(group: int, at: float, incarnation: int = 0) -> dict[str, Any]:
    return {"group": group, "incarnation": incarnation, "at": at}


def commit(
    group: int, step: int, at: float, digest: str = "", quorum_id: int = 1, **fields: Any
) -> Committed:
    return Committed(
        **who(group, at, fields.pop("incarnation", 0)),
        step=step,
        loss=0.0,
        digest=digest or f"bits of {step}",
        num_participants=2,
        participating=True,
        quorum_id=quorum_id,
        **{"members": "a b", **fields},
    )


def begins(group: int, step: int, at: float, incarnation: int = 0) -> PhaseBegan:
    return PhaseBegan(**who(group, at, incarnation), step=step, phase="forward")


def ended(group: int, at: float, status: int) -> Exited:
    return Exited(**who(group, at), status=status, expected=True)


def run(*events: Event, incidents: list[Incident] | None = None, **fields: Any) -> Run:
    return Run(seen=[("job", event) for event in events], incidents=incidents or [], **fields)


def incident(stall_s: float | None) -> Incident:
    return Incident(1, _FAULT, "job", 0.0, 0.5, stall_s=stall_s)


GOOD = (
    begins(0, 0, 0.0),
    begins(1, 0, 0.0),
    commit(0, 1, 1.0),
    commit(1, 1, 1.1),
    Discarded(**who(0, 2.0), step=1, digest="bits of 1"),
    begins(0, 1, 2.0),
    commit(0, 2, 3.0, quorum_id=2),
    Killed(**who(1, 3.0), whole_group=False),
    ended(1, 3.1, -9),
    begins(1, 0, 4.0, incarnation=1),
    Healed(**who(1, 4.5, 1)),
    commit(1, 3, 5.0, quorum_id=3, incarnation=1),
    ended(0, 6.0, 0),
)

RULES = [judge_ids, judge_identity, judge_progress, judge_discards, judge_exits, judge_leftovers]


@pytest.mark.parametrize("rule", RULES)
def test_a_good_run_passes(rule: Callable[[Run], Verdict]) -> None:
    verdict = rule(run(*GOOD))
    assert verdict.outcome is Outcome.PASS, verdict


def other(job: str, *events: Event) -> list[tuple[str, Event]]:
    return [(job, event) for event in events]


@pytest.mark.parametrize(
    ("rule", "events", "detail"),
    [
        (judge_ids, [commit(0, 1, 1, members="a"), commit(1, 1, 1)], "two lists of members"),
        (judge_ids, [commit(0, 1, 1, quorum_id=5), commit(0, 2, 2)], "went back to quorum 1"),
        (
            judge_identity,
            [commit(0, 1, 1), commit(1, 1, 1, "others"), commit(0, 2, 2), commit(1, 2, 2)],
            "step 1: groups 0 and 1 differ",
        ),
        (
            judge_progress,
            [*GOOD[:4], begins(1, 0, 2.0), commit(1, 1, 3.0)],
            "committed step 1 again",
        ),
        (
            judge_discards,
            [commit(0, 1, 1), Discarded(**who(0, 2), step=1, digest="?")],
            "changed while it discarded",
        ),
        (
            judge_progress,
            [begins(0, 0, 0), commit(0, 1, 1), commit(0, 2, 2), begins(1, 0, 3), commit(1, 1, 4)],
            "committed step 1 again",
        ),
        (
            judge_discards,
            [
                Healed(**who(0, 1)),
                *(Discarded(**who(0, at), step=1, digest=f"{at}") for at in (2, 3)),
            ],
            "changed while it discarded",
        ),
        (judge_exits, [Started(**who(0, 1), pid=1)], "the end of 1 workers was not seen"),
        (judge_exits, [ended(0, 1, 1)], "ended with status 1"),
        (judge_exits, [ended(0, 1, -15)], "ended with status -15"),
    ],
)
def test_what_is_broken_is_found(
    rule: Callable[[Run], Verdict], events: list[Event], detail: str
) -> None:
    verdict = rule(run(*events))
    assert verdict.outcome is Outcome.FAIL
    assert detail in verdict.detail


@pytest.mark.parametrize("end", [Healed(**who(0, 2.0)), ended(0, 2.0, -9)])
def test_a_commit_that_was_given_up_is_set_apart(end: Event) -> None:
    """The group of the commit was lost, or healed, and the others did the step again."""
    again = [commit(group, 5, 3, quorum_id=2) for group in (1, 2)]
    verdict = judge_identity(run(commit(0, 5, 1, "alone"), end, *again))
    assert verdict.outcome is Outcome.PASS
    assert "1 given up" in verdict.detail


def begins_anew(heals: bool = True, members: str = "c", first: int = 1) -> list[Event]:
    """Group 2 commits steps that are done, from 3.5 s on, and may heal then."""
    alone = [
        commit(2, step, 3.5 + step / 10, "others", quorum_id=4, members=members)
        for step in (first, first + 1)
    ]
    both = [*GOOD[:7], commit(1, 2, 3.1, quorum_id=2)]
    return [*both, *alone, *([Healed(**who(2, 4.0))] if heals else [])]


@pytest.mark.parametrize("rule", [judge_progress, judge_identity])
def test_a_newcomer_may_begin_anew_at_a_restarted_lighthouse(
    rule: Callable[[Run], Verdict],
) -> None:
    """The newcomer was the first there, and heals when the members are back (rule F8)."""
    killed = Fault(kind=Kind.LIGHTHOUSE_KILLED, group=0, worker=0, length_s=0.0, pause_s=0.0)
    restarted = [Incident(1, killed, "job", 3.0, 0.5)]
    assert rule(run(*begins_anew(), incidents=restarted)).outcome is Outcome.PASS
    for events in (begins_anew(heals=False), begins_anew(members="b c"), begins_anew(first=2)):
        assert judge_progress(run(*events, incidents=restarted)).outcome is Outcome.FAIL
    assert judge_progress(run(*begins_anew())).outcome is Outcome.FAIL
    earlier = [Incident(1, killed, "job", -3.0, 0.5)]
    assert judge_progress(run(*begins_anew(), incidents=earlier)).outcome is Outcome.FAIL


def test_a_commit_beside_others_of_its_quorum_is_not_set_apart() -> None:
    events = [commit(0, 5, 1, "other"), ended(0, 2, -9), commit(1, 5, 3)]
    assert judge_identity(run(*events)).outcome is Outcome.FAIL


def test_a_commit_that_something_was_built_on_is_not_set_apart() -> None:
    events = [commit(0, 5, 1, "alone"), commit(0, 6, 2), ended(0, 3, -9), commit(1, 5, 3)]
    assert judge_identity(run(*events)).outcome is Outcome.FAIL


def test_jobs_are_judged_apart() -> None:
    seen = other("one", commit(0, 1, 1)) + other("two", commit(1, 1, 1, "others", members="c"))
    for rule in (judge_ids, judge_identity):
        assert rule(Run(seen=seen, incidents=[])).outcome is Outcome.PASS


def test_what_an_operator_gave_up_may_be_done_again() -> None:
    """The steps are done again by whoever was let go back, and by those who heal from it."""
    lost = [begins(0, 0, 0.0), commit(0, 1, 1), commit(1, 1, 1.1), commit(0, 2, 2), commit(1, 2, 2)]
    again = [begins(2, 1, 4.0), commit(2, 2, 5, "others", quorum_id=2)]
    stale = Fault(kind=Kind.STALE_SURVIVOR, group=2, worker=0, length_s=0.0, pause_s=0.0)
    accepted = [Incident(1, stale, "job", 3.0, 0.5)]
    for rule in (judge_identity, judge_progress):
        assert rule(run(*lost, *again)).outcome is Outcome.FAIL
        assert rule(run(*lost, *again, incidents=accepted)).outcome is Outcome.PASS
        too_soon = [begins(2, 1, 2.5), commit(2, 2, 2.9, "others", quorum_id=2)]
        assert rule(run(*lost, *too_soon, incidents=accepted)).outcome is Outcome.FAIL


def test_a_peer_of_a_killed_worker_may_end_with_an_error() -> None:
    killed = Killed(**who(0, 1.0), worker=1, whole_group=False)
    assert judge_exits(run(killed, ended(0, 1.1, 1))).outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("stall_s", "outcome"), [(0.4, Outcome.PASS), (0.6, Outcome.FAIL), (None, Outcome.PASS)]
)
def test_bounds(stall_s: float | None, outcome: Outcome) -> None:
    assert judge_bounds(run(incidents=[incident(stall_s)])).outcome is outcome


def test_a_change_of_members_may_take_longer_with_nccl_and_in_an_isolated_process() -> None:
    allowed = {each: change_of_members_s(each) for each in PROCESS_GROUPS}
    assert allowed == {"gloo": 0.0, "nccl": 1.0, "isolated-gloo": 0.0, "isolated-nccl": 2.5}


def test_a_run_without_an_end_or_without_faults_fails() -> None:
    assert judge_end(run(incidents=[incident(0.1)])).outcome is Outcome.PASS
    assert judge_end(run()).outcome is Outcome.FAIL
    broken = judge_end(run(incidents=[incident(0.1)], failure="group 1 died"))
    assert broken.detail == "group 1 died"
    assert judge_end(run(interrupted=True)).outcome is Outcome.NOT_JUDGED


def test_leftovers_are_named() -> None:
    assert judge_leftovers(run(leftovers=["12: python"])).detail == "12: python"


# -- records and goodput ---------------------------------------------------------------------------


def record(kind: str, group: int, at: float, cause: str = "") -> Record:
    return Record("one", kind, cause, frozenset({group}), at)


def after_a_kill(*records: Record, kind: Kind = Kind.WORKER_KILLED, length_s: float = 0.0) -> Run:
    fault = Fault(kind=kind, group=0, worker=0, length_s=length_s, pause_s=0.0)
    incident = Incident(1, fault, "one", 10.0, 1.0, back_s=1.8)
    return Run(seen=[("one", commit(0, 1, 1.0))], incidents=[incident], records=records)


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (after_a_kill(), "has no record"),
        (
            after_a_kill(record("lost", 1, 10.1)),
            "has no record; .* has .'lost of groups .1. at 10.1 s",
        ),
        (after_a_kill(record("lost", 0, 5.0)), "has no record"),
        (after_a_kill(record("lost", 0, 10.1), record("discarded", 0, 10.2)), "has 2 records"),
        (after_a_kill(record("drained", 0, 10.1)), "a record of another kind"),
        (
            after_a_kill(kind=Kind.STEP_HANGS, length_s=5.0),
            "has no record",
        ),
    ],
)
def test_each_fault_needs_one_record_with_its_cause(run: Run, fault: str) -> None:
    verdict = judge_records(run)
    assert verdict.outcome is Outcome.FAIL
    assert re.search(fault, verdict.detail)


@pytest.mark.parametrize(
    "run",
    [
        after_a_kill(record("lost", 0, 10.1), record("joined", 0, 11.0)),
        after_a_kill(kind=Kind.STEP_HANGS, length_s=1.0),
        after_a_kill(record("evicted", 0, 11.5), kind=Kind.STEP_HANGS, length_s=5.0),
        after_a_kill(kind=Kind.SUM_FAILS),
        after_a_kill(record("manager_died", 0, 12.0), kind=Kind.MANAGER_KILLED),
    ],
)
def test_a_fault_that_nobody_has_to_notice_needs_no_record(run: Run) -> None:
    assert judge_records(run).outcome is Outcome.PASS


def test_a_fault_before_the_lighthouse_is_back_is_not_judged() -> None:
    run = after_a_kill()
    assert judge_records(run).outcome is Outcome.FAIL
    run.incidents[0].is_unseen = True
    verdict = judge_records(run)
    assert verdict.outcome is Outcome.PASS
    assert "1 faults before the lighthouse was back" in verdict.detail


def test_the_goodput_is_compared_with_the_commits() -> None:
    commits = [("one", commit(0, step, 100.0 + step)) for step in range(41)]
    commits += [("one", commit(0, step, 110.0 + step, quorum_id=2)) for step in range(41, 81)]
    # 10 s were lost between two quorums.
    for committed_s, outcome in ((80.0, Outcome.PASS), (89.0, Outcome.FAIL)):
        goodput = Goodput(wall_s=90.0, committed_s=committed_s, lost_s={"waiting": 1.0})
        run = Run(seen=commits, incidents=[], readings=[Reading("one", 190.0, "fault 1", goodput)])
        assert judge_goodput(run).outcome is outcome


def test_a_goodput_that_nobody_could_read_is_not_judged() -> None:
    assert judge_goodput(Run(seen=[], incidents=[])).outcome is Outcome.NOT_JUDGED


def test_the_stretches_in_which_the_goodput_differs_are_named() -> None:
    """A commit each second; after the second fault the ledger has 5 s more, and no other."""
    commits = [("one", commit(0, step, 100.0 + step)) for step in range(91)]
    shown = [(110.0, 10.0), (130.0, 30.0), (150.0, 55.0), (170.0, 75.0), (190.0, 95.0)]
    readings = [
        Reading("one", at, f"fault {number}", Goodput(wall_s=at - 100.0, committed_s=committed_s))
        for number, (at, committed_s) in enumerate(shown)
    ]
    run = Run(seen=commits, incidents=[], readings=readings, began_at=100.0)
    whole, *differing = judge_goodput(run).faults
    assert "0.0 to 90.0 s: the ledger has 95.00 s of 90.00 s, seen were 90.00 s" in whole
    assert len(differing) == 1
    assert "30.0 to 50.0 s: the ledger has 25.00 s of 20.00 s, seen were 20.00" in differing[0]
    assert differing[0].endswith("fault 2")


def test_a_newcomer_that_begins_anew_takes_no_goodput_from_the_others() -> None:
    """A newcomer commits steps 1 and 2 alone while the others are at step 34."""
    killed = Fault(kind=Kind.LIGHTHOUSE_KILLED, group=0, worker=0, length_s=0.0, pause_s=0.0)
    commits: list[Event] = [commit(0, step, step / 10) for step in range(91)]
    alone = [commit(2, step, 3.35 + step / 10, quorum_id=4, members="c") for step in (1, 2)]
    reading = Reading("job", 9.0, "fault 1", Goodput(wall_s=9.0, committed_s=9.0))
    events = [*commits, *alone, Healed(**who(2, 4.0))]
    judged = run(*events, incidents=[Incident(1, killed, "job", 3.0, 0.5)], readings=[reading])
    assert judge_goodput(judged).outcome is Outcome.PASS


def test_other_accounts_are_compared_from_their_beginning_on() -> None:
    """A lighthouse that was restarted begins with the time of a group that has lived for 60 s."""
    commits = [commit(0, step, 100.0 + step) for step in range(91)]
    readings = [
        Reading("one", 150.0, "fault 1", Goodput(wall_s=50.0, committed_s=50.0)),
        Reading("one", 180.0, "fault 2", Goodput(wall_s=60.0, committed_s=59.0)),
    ]
    first, second = find_stretches(readings, commits)
    assert (first.began_at, first.ended_at, first.excess_s) == (100.0, 150.0, 0.0)
    assert (second.began_at, second.ended_at, second.excess_s) == (120.0, 180.0, -1.0)


def test_the_report_names_what_has_missed_a_promise() -> None:
    """All of it, or the first ten."""
    faults = [f"fault {number}" for number in range(1, 13)]
    for num_faults, lines in ((1, []), (3, faults[:3]), (12, [*faults[:10], "and 2 more"])):
        output = StringIO()
        verdict = Verdict.of("a promise", faults[:num_faults], "kept")
        print_faults(Console(file=output, width=80), verdict)
        found = output.getvalue().splitlines()[1:]
        assert [line.strip().partition(",")[0] for line in found] == lines


def test_the_figures_have_what_was_wrong(tmp_path: Path) -> None:
    run = after_a_kill(record("lost", 1, 10.1, "its host is gone"))
    reading = Reading("one", 12.0, "fault 1", Goodput(wall_s=11.0, committed_s=9.0))
    run = replace(run, readings=[reading])
    write_json(run, [judge_records(run)], 7, tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    (wrong,) = figures["wrong_records"]
    assert (wrong["at"], wrong["group"], wrong["expected"]) == (10.0, 0, ["lost"])
    assert wrong["found"][0]["groups"] == [1]
    assert wrong["found"][0]["cause"] == "its host is gone"
    assert [each["ledger_s"] for each in figures["stretches"]] == [9.0]
    assert len(figures["verdicts"][0]["faults"]) == 1


def test_steps_that_a_job_goes_back_behind_are_no_goodput() -> None:
    commits = [commit(0, step, 100.0 + step) for step in range(41)]
    commits += [commit(1, step, 120.0 + step, quorum_id=2) for step in range(31, 51)]
    seen = observe(commits, 100.0, 170.0)
    assert seen.committed_s == 50.0, "10 steps of the first group are done again"


def test_what_a_restarted_lighthouse_repeats_is_one_record(tmp_path: Path) -> None:
    line = {"job": "one", "number": 5, "kind": "lost", "cause": "", "groups": ["group-3:x"]}
    before, after = (EventLog(tmp_path / f"{since}", since) for since in (-math.inf, 30.0))
    lines = [
        {**line, "at": 1010.0},
        {**line, "at": 1010.5},
        {**line, "number": 6, "kind": "drained", "at": 1020.0},
    ]
    away = {**line, "kind": "lighthouse_away", "at": 1025.0}  # known to the next but one only
    again = [{**line, "number": 9, "at": 1011.0}, {**line, "number": 10, "at": 1031.0}, away]
    before.path.write_text("\n".join(map(json.dumps, lines)))
    third = EventLog(tmp_path / "third", 40.0)
    # Its manager had died when no lighthouse was there, which the second one learns first.
    died = {**line, "number": 11, "kind": "manager_died", "at": 1029.5}
    after.path.write_text("\n".join(map(json.dumps, [*again, died])))
    repeated = [{**away, "at": 1025.25}, {**died, "at": 1029.75}]
    third.path.write_text("\n".join(map(json.dumps, repeated)))
    missing = EventLog(tmp_path / "missing", 50.0)
    found = read_records([before, after, third, missing], wall_offset_s=1000.0)
    assert [(each.kind, each.groups, each.at) for each in found] == [
        ("lost", frozenset({3}), 10.5),
        ("drained", frozenset({3}), 20.0),
        ("lighthouse_away", frozenset({3}), 25.0),
        ("manager_died", frozenset({3}), 29.5),
        ("lost", frozenset({3}), 31.0),
    ]


def test_what_prepares_the_next_fault_is_no_record_of_the_one_before() -> None:
    run = after_a_kill(
        record("manager_died", 0, 10.1), record("lost", 0, 14.0), kind=Kind.MANAGER_KILLED
    )
    assert judge_records(run).outcome is Outcome.FAIL, "group 0 is lost 4 s later"
    stale = Fault(kind=Kind.STALE_SURVIVOR, group=1, worker=0, length_s=0.0, pause_s=0.0)
    following = Incident(2, stale, "one", 12.0, 1.0)
    following.at = 20.0
    judged = replace(run, incidents=[*run.incidents, following])
    assert judge_records(judged).outcome is Outcome.PASS
