"""Tests the demo's incidents: what is measured for each kill."""

from __future__ import annotations

import pytest
from support.stories import commit, good_events, in_order

from tools.demo.events import Event, Joined, Killed, PhaseBegan, Started
from tools.demo.incidents import Incident, incidents_of


def forward(group: int, at: float) -> PhaseBegan:
    return PhaseBegan(group=group, incarnation=0, at=at, step=0, phase="forward")


def kill(group: int, at: float) -> Killed:
    return Killed(group=group, incarnation=0, at=at, whole_group=True)


def only_incident(events: list[Event]) -> Incident:
    (incident,) = incidents_of(in_order(events))
    return incident


def test_times_of_the_good_run() -> None:
    incident = only_incident(good_events())
    assert incident.survivors == (0, 1)
    # Update 50 of group 1 was under way at the kill; update 51 was begun after it.
    assert incident.stall_s == pytest.approx(0.1)
    assert incident.without_s == pytest.approx(0.101)
    assert incident.restart_s == pytest.approx(0.03)
    assert incident.join_s == pytest.approx(2.47)
    assert incident.heal_s == pytest.approx(3.0 + 0.002 - 0.03)


def test_the_slowest_survivor_counts() -> None:
    before = [commit(group, 1, at=0.1) for group in range(3)]
    after = [commit(0, 2, at=1.2), commit(1, 2, at=1.7)]
    assert only_incident([*before, kill(2, 1.0), *after]).stall_s == pytest.approx(0.7)


def test_an_update_begun_before_the_kill_is_not_one_without_the_dead() -> None:
    events: list[Event] = [commit(0, 1, at=0.1), commit(1, 1, at=0.1), forward(0, 0.9)]
    events += [kill(1, 1.0), commit(0, 2, at=1.1), forward(0, 1.2), commit(0, 3, at=1.5)]
    incident = only_incident(events)
    assert (incident.stall_s, incident.without_s) == (pytest.approx(0.1), pytest.approx(0.5))


def test_a_survivor_that_is_killed_too_is_not_waited_for() -> None:
    events: list[Event] = [commit(group, 1, at=0.1) for group in range(3)]
    events += [kill(2, 1.0), kill(1, 1.1), commit(0, 2, at=1.4)]
    first, second = incidents_of(in_order(events))
    assert first.stall_s == pytest.approx(0.4)
    assert second.survivors == (0,)


def test_a_group_that_only_watches_is_no_survivor() -> None:
    events: list[Event] = [commit(0, 1, at=0.1), commit(1, 1, at=0.1, participating=False)]
    assert only_incident([*events, kill(0, 1.0)]).survivors == ()


def test_what_never_happened_has_no_time() -> None:
    incident = only_incident([commit(0, 1, at=0.1), commit(1, 1, at=0.1), kill(1, 1.0)])
    assert incident.stall_s is None
    assert incident.without_s is None
    assert (incident.restart_s, incident.join_s, incident.heal_s) == (None, None, None)


def test_the_phase_is_what_the_victim_wrote_last_in_that_life() -> None:
    assert only_incident(good_events()).phase == "backward"
    events: list[Event] = [commit(1, 1, at=0.4), forward(1, 0.5), commit(0, 1, at=0.6)]
    events.append(PhaseBegan(group=0, incarnation=0, at=0.7, step=1, phase="backward"))
    late = Killed(group=1, incarnation=1, at=1.0, whole_group=False)
    assert only_incident([*events, kill(1, 1.0)]).phase == "forward"
    assert only_incident([*events, late]).phase == "start"


def test_a_group_killed_again_while_it_heals_is_healed_by_its_last_life() -> None:
    events: list[Event] = [commit(0, 1, at=0.1), commit(1, 1, at=0.1), kill(1, 1.0)]
    events.append(Started(group=1, incarnation=1, at=2.0, pid=5))
    events.append(Joined(group=1, incarnation=1, at=3.0))
    events.append(PhaseBegan(group=1, incarnation=1, at=3.0, step=0, phase="forward"))
    events.append(Killed(group=1, incarnation=1, at=3.25, whole_group=False))
    events.append(Started(group=1, incarnation=2, at=4.0, pid=6))
    events.append(Joined(group=1, incarnation=2, at=5.0))
    first, second = incidents_of(in_order(events))
    assert (first.heal_s, second.heal_s) == (None, None)
    events.append(commit(1, 30, incarnation=2, at=5.5))
    first, second = incidents_of(in_order(events))
    assert (first.restart_s, second.restart_s) == (1.0, 0.75)
    assert (first.join_s, first.heal_s) == (second.join_s, second.heal_s) == (1.0, 1.5)
    assert second.phase == "heal"


def test_healing_ends_with_the_first_update_with_own_gradients() -> None:
    events: list[Event] = [commit(0, 1, at=0.1), kill(1, 1.0)]
    events.append(Started(group=1, incarnation=1, at=2.0, pid=5))
    events.append(Joined(group=1, incarnation=1, at=3.0))
    events.append(commit(1, 20, incarnation=1, at=3.5, participating=False))
    events.append(commit(1, 21, incarnation=1, at=3.75))
    incident = only_incident(events)
    assert incident.heal_s == pytest.approx(1.75)
