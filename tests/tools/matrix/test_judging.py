"""Tests the rules that judge a program: each falls when what it promises is broken."""

from __future__ import annotations

import pytest

from tools.demo.events import Committed, Event, Exited, Finished, Healed, Killed, PhaseBegan
from tools.matrix.program import Feature, Program
from tools.matrix.verdicts import MAX_STALL_S, Run, judge, report_failure

PROGRAM = Program(seed=0)
REFUSED = Program(seed=0, features=frozenset({Feature.SPARSE}))


def commit(group: int, step: int, at: float, digest: str = "") -> Committed:
    return Committed(
        group=group,
        incarnation=0,
        at=at,
        step=step,
        loss=0.0,
        digest=digest or f"bits of {step}",
        num_participants=2,
        participating=True,
        quorum_id=1,
        members="a b",
    )


def finished(group: int, at: float) -> Finished:
    return Finished(group=group, incarnation=0, at=at, step=2)


def ended(group: int, at: float, status: int) -> Exited:
    return Exited(group=group, incarnation=0, at=at, status=status, expected=False)


def begun(group: int, step: int, whole: str) -> PhaseBegan:
    return PhaseBegan(group=group, incarnation=0, at=0.0, step=step, phase="forward", whole=whole)


def healed(group: int, step: int, whole: str) -> Healed:
    return Healed(group=group, incarnation=0, at=0.0, step=step, whole=whole)


def killed(group: int, at: float) -> Killed:
    return Killed(group=group, incarnation=0, at=at, whole_group=False)


GOOD: tuple[Event, ...] = (
    commit(0, 1, 1.0),
    commit(1, 1, 1.1),
    killed(1, 1.2),
    ended(1, 1.3, -9),
    commit(0, 2, 2.0),
    finished(0, 2.1),
    ended(0, 2.2, 0),
)


def faults(*events: Event, program: Program = PROGRAM, missed: str = "", **words: str) -> str:
    run = Run(program=program, events=events, missed=missed, words=words)
    return " ".join(verdict.detail for verdict in judge(run))


def test_a_good_run_has_no_faults() -> None:
    assert not faults(*GOOD)


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([*GOOD, commit(1, 2, 3.0, "others")], "step 2: groups 0 and 1 differ"),
        ([*GOOD[:2], ended(1, 1.2, 1), *GOOD[4:]], "group 1 ended with status 1"),
        ([*GOOD[:2], ended(1, 1.2, 70), killed(1, 1.3), *GOOD[4:]], "ended with status 70"),
        (GOOD[:5], "no group finished"),
        ([*GOOD[:4], commit(0, 2, 2.0 + MAX_STALL_S), finished(0, 30.0)], "stalled for"),
    ],
)
def test_what_is_broken_is_found(events: list[Event], fault: str) -> None:
    assert fault in faults(*events)


@pytest.mark.parametrize("whole", ["bits and averages", ""])
def test_who_heals_has_all_that_its_source_has(whole: str) -> None:
    """No state is compared where it is not reported, or where the source may have died."""
    source = begun(0, 1, "bits and averages")
    assert not faults(source, begun(0, 1, "changed since"), healed(1, 1, whole), *GOOD)
    found = faults(source, healed(1, 1, "bits, and averages of its own"), *GOOD)
    assert found == "group 1 has the state of no other group at step 1"
    assert not faults(source, healed(1, 2, "of the other"), *GOOD)
    of_three = Program(seed=0, num_groups=3)
    assert not faults(source, healed(1, 1, "of the third"), *GOOD, program=of_three)


def test_what_did_not_come_in_time_is_found() -> None:
    assert faults(*GOOD, missed="not all groups trained together") == (
        "not all groups trained together"
    )


def test_what_is_refused_names_its_reason_and_commits_nothing() -> None:
    good = {"group-0.0.0": "errors.ConfigError: table.sparse=True cannot work"}
    assert not faults(program=REFUSED, **good)
    assert not faults(program=REFUSED, **good, **{"group-0.0.1": "the other one has ended"})
    assert faults(program=REFUSED, **good, **{"group-1.0.0": ""}) == "group-1.0 was not refused"
    found = faults(commit(0, 1, 1.0), program=REFUSED, **good)
    assert found == "steps were committed"


ENDS = Program(seed=0, features=frozenset({Feature.ASSIGN}))
ERROR = "torchft_svc.errors.ConfigError: load_state_dict: copy, without assign=True"


def test_who_heals_by_replacing_parameters_is_ended_with_the_cause() -> None:
    others = {"group-0.0.0": "healthy", "group-1.0.0": ERROR}
    alone = [commit(0, 1, 1.0), commit(0, 2, 2.0)]
    assert not faults(*alone, program=ENDS, **others)
    unnamed = {**others, "group-1.0.0": "torchft_svc.errors.ConfigError: something"}
    assert "group-0.0 and group-1.0 were not refused" in faults(*alone, program=ENDS, **unnamed)
    both = faults(*alone, commit(1, 1, 1.1), program=ENDS, **others)
    assert both == "groups {0, 1} committed steps"
    assert "not in time" in faults(program=ENDS, missed="not in time", **others)


def test_a_failure_is_reported_with_the_last_words() -> None:
    report = report_failure(
        Run(program=PROGRAM, events=GOOD[:5], words={"group-0.0.0": "one\ntwo\n"})
    )
    assert "no group finished" in report
    assert "two" in report


def test_a_run_that_lost_its_newest_state_with_those_that_had_it_proves_nothing() -> None:
    events = [commit(0, 1, 1.0), killed(0, 1.1), ended(0, 1.2, -9)]
    faults = judge(Run(program=PROGRAM, events=events))
    assert any("no group finished" in fault.detail for fault in faults)
    assert not judge(Run(program=PROGRAM, events=events, is_lost=True))
