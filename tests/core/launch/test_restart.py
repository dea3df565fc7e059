"""Tests the table of restart policies as a table."""

from __future__ import annotations

import itertools

import pytest

from torchft_svc.core.launch.restart import (
    REACTIONS,
    Reaction,
    RestartPolicy,
    RunEvent,
    event_of_failure,
)

SOFT = [policy for policy in RestartPolicy if policy.is_soft]
CHANGES = (RunEvent.SCALE_UP, RunEvent.SCALE_DOWN)


def test_there_is_an_entry_for_each_policy_and_event() -> None:
    assert set(REACTIONS) == set(RestartPolicy)
    for table in REACTIONS.values():
        assert set(table) == set(RunEvent)


@pytest.mark.parametrize("event", CHANGES)
def test_hard_terminates_workers_and_uses_no_restart(event: RunEvent) -> None:
    steps = (Reaction.STOP_WORKERS, Reaction.RENDEZVOUS, Reaction.START_WORKERS)
    assert REACTIONS[RestartPolicy.HARD][event] == steps
    failure = REACTIONS[RestartPolicy.HARD][RunEvent.WORKER_FAILURE]
    assert failure == (Reaction.USE_RESTART, *steps)


@pytest.mark.parametrize(("policy", "event"), list(itertools.product(SOFT, CHANGES)))
def test_soft_pauses_and_resumes_workers(policy: RestartPolicy, event: RunEvent) -> None:
    assert REACTIONS[policy][event] == (Reaction.PAUSE, Reaction.RENDEZVOUS, Reaction.RESUME)


@pytest.mark.parametrize("policy", RestartPolicy)
def test_a_restart_is_used_for_failures_alone_and_once(policy: RestartPolicy) -> None:
    for event, steps in REACTIONS[policy].items():
        is_failure = event in (RunEvent.WORKER_FAILURE, RunEvent.REPEATED_FAILURE)
        goes_on = policy is not RestartPolicy.SOFT_NO_REPLACE
        assert steps.count(Reaction.USE_RESTART) == (1 if is_failure and goes_on else 0)


@pytest.mark.parametrize("policy", SOFT)
def test_the_others_learn_of_a_failure_before_its_workers_are_ended(policy: RestartPolicy) -> None:
    for event in (RunEvent.WORKER_FAILURE, RunEvent.REPEATED_FAILURE, RunEvent.NO_RESTART_LEFT):
        steps = REACTIONS[policy][event]
        said = [each for each in steps if each in (Reaction.LEAVE_WORLD, Reaction.LEAVE_RUN)]
        assert len(said) == 1
        if Reaction.STOP_WORKERS in steps:
            assert steps.index(said[0]) < steps.index(Reaction.STOP_WORKERS)


@pytest.mark.parametrize("policy", RestartPolicy)
def test_only_the_hard_policy_closes_the_run_for_a_failure_of_one_node(
    policy: RestartPolicy,
) -> None:
    closing = {event for event, steps in REACTIONS[policy].items() if Reaction.CLOSE_RUN in steps}
    of_hard = {RunEvent.NO_RESTART_LEFT, RunEvent.FINAL_FAILURE}
    assert closing - {RunEvent.NO_PROGRESS} == (of_hard if policy is RestartPolicy.HARD else set())
    assert RunEvent.NO_PROGRESS in closing, "all nodes are at one step"


FAILURES = [
    # policy, restarts left, failures so far, at most, event
    (RestartPolicy.SOFT, 1, 1, 3, RunEvent.WORKER_FAILURE),
    (RestartPolicy.SOFT, 0, 1, 3, RunEvent.NO_RESTART_LEFT),
    (RestartPolicy.SOFT_REPLACE, 5, 3, 3, RunEvent.WORKER_FAILURE),
    (RestartPolicy.SOFT_REPLACE, 5, 4, 3, RunEvent.REPEATED_FAILURE),
    (RestartPolicy.SOFT_REPLACE, 0, 4, 3, RunEvent.NO_RESTART_LEFT),
    (RestartPolicy.SOFT_NO_REPLACE, 0, 1, 3, RunEvent.WORKER_FAILURE),
    (RestartPolicy.HARD, 0, 1, 3, RunEvent.NO_RESTART_LEFT),
]


@pytest.mark.parametrize(("policy", "left", "number", "most", "event"), FAILURES)
def test_what_a_failure_is(
    policy: RestartPolicy, left: int, number: int, most: int, event: RunEvent
) -> None:
    assert event_of_failure(policy, left, number, most) is event
