"""Tests the demo's promises: a good run keeps each, and each planted fault breaks its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.stories import HEALED_AT, KILL_AT, commit, good_events, run_of

from tools.demo import promises
from tools.demo.events import Committed, Discarded, Event, Exited, Joined, Killed, Started
from tools.demo.promises import Outcome, Run, Verdict, judge


def broken_promises(run: Run) -> list[str]:
    """Names of the rules that failed."""
    return [rule.__name__ for rule in promises._RULES if rule(run).outcome is Outcome.FAIL]


def changed(match: Callable[[Event], bool], change: Callable[[Event], Event]) -> list[Event]:
    """The good run, with ``change`` applied to the events that ``match``: at least one."""
    events = good_events()
    assert any(match(event) for event in events)
    return [change(event) if match(event) else event for event in events]


def is_commit(event: Event, group: int, step: int) -> bool:
    return isinstance(event, Committed) and (event.group, event.step) == (group, step)


def test_a_good_run_keeps_every_promise() -> None:
    discarded = Discarded(group=0, incarnation=0, at=5.05, step=50, digest="bits-50")
    verdicts = judge(run_of([*good_events(), discarded]))
    assert {verdict.outcome for verdict in verdicts} == {Outcome.PASS}
    assert len(verdicts) == 10


def test_one_differing_hash_is_found() -> None:
    events = changed(lambda e: is_commit(e, 1, 30), lambda e: replace(e, digest="other"))  # type: ignore[call-arg]
    assert broken_promises(run_of(events)) == ["judge_identity"]


def test_a_healed_group_that_differs_is_found() -> None:
    def after_heal(event: Event) -> bool:
        return isinstance(event, Committed) and event.incarnation == 1

    events = changed(after_heal, lambda e: replace(e, digest=f"{e.group}"))  # type: ignore[call-arg]
    assert broken_promises(run_of(events)) == ["judge_identity"]


def test_identity_is_not_granted_when_nothing_could_be_compared() -> None:
    events = [event for event in good_events() if event.group == 0]
    assert "judge_identity" in broken_promises(run_of(events, num_groups=2))


def test_one_group_alone_has_nothing_to_compare() -> None:
    events = [event for event in good_events() if event.group == 0]
    assert broken_promises(run_of(events, num_groups=1, num_kills_planned=0)) == []


class TestLostCommit:
    """The victim's last commit, which nobody shared, and which the survivors did again."""

    def with_lost(self, *, at: float = KILL_AT - 0.001) -> list[Event]:
        # Update 51 of the good run is committed by the others at 5.1 s, after the kill.
        return [*good_events(), commit(2, 51, at=at, digest="died with group 2")]

    def test_is_not_a_difference_between_groups(self) -> None:
        run = run_of(self.with_lost())
        assert [event.digest for event in promises.lost_commits(run)] == ["died with group 2"]
        assert broken_promises(run) == []
        assert "1 lost" in promises.judge_identity(run).detail

    def test_counts_when_another_group_had_committed_the_step_before_the_kill(self) -> None:
        early = changed(lambda e: is_commit(e, 0, 50), lambda e: replace(e, at=KILL_AT - 0.002))
        early = [*early, commit(2, 50, at=KILL_AT - 0.001, digest="differs")]
        early = [
            event for event in early if not (is_commit(event, 2, 50) and event.digest == "bits-50")
        ]  # type: ignore[attr-defined]
        assert broken_promises(run_of(early)) == ["judge_identity"]

    def test_counts_when_the_group_was_not_killed(self) -> None:
        events = [event for event in self.with_lost() if not isinstance(event, Killed)]
        assert "judge_identity" in broken_promises(run_of(events, num_kills_planned=0))

    def test_counts_when_it_was_not_the_last_commit_of_that_life(self) -> None:
        events = [*self.with_lost(at=KILL_AT - 0.002), commit(2, 52, at=KILL_AT - 0.001)]
        assert broken_promises(run_of(events)) == ["judge_identity"]


def test_a_step_committed_twice_with_different_bits_is_found() -> None:
    again = [*good_events(), commit(2, 40, incarnation=1, at=HEALED_AT - 0.1, digest="new")]
    assert set(broken_promises(run_of(again))) >= {"judge_single_commit", "judge_progress"}


def test_a_discard_that_changed_the_state_is_found() -> None:
    def discard(digest: str) -> list[Event]:
        event = Discarded(group=0, incarnation=0, at=3.05, step=30, digest=digest)
        return [*good_events(), event]

    assert broken_promises(run_of(discard("bits-30"))) == []
    assert promises.judge_discards(run_of(discard("bits-30"))).detail == "1 discards compared"
    assert broken_promises(run_of(discard("changed"))) == ["judge_discards"]


def test_a_group_that_starts_over_from_zero_is_found() -> None:
    def restart(event: Event) -> Event:
        assert isinstance(event, Committed)
        return replace(event, step=event.step - 75)

    events = changed(lambda e: isinstance(e, Committed) and e.incarnation == 1, restart)
    assert "judge_progress" in broken_promises(run_of(events))


def test_a_step_that_is_counted_twice_in_one_life_is_found() -> None:
    events = [*good_events(), commit(0, 30, at=3.05)]
    assert broken_promises(run_of(events)) == ["judge_progress"]


def test_survivors_that_stand_still_are_found() -> None:
    def in_pause(event: Event) -> bool:
        return event.group == 0 and KILL_AT < event.at < KILL_AT + 0.7

    events = [event for event in good_events() if not in_pause(event)]
    assert broken_promises(run_of(events)) == ["judge_survivors"]
    assert broken_promises(run_of(events, max_stall_s=1.0)) == []


def test_a_survivor_that_never_commits_again_is_found() -> None:
    events = [event for event in good_events() if not (event.group == 0 and event.at > KILL_AT)]
    verdict = promises.judge_survivors(run_of(events))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.detail == "a survivor never committed after kill 1 (group 2 in backward)"


def test_a_group_that_is_not_restarted_is_found() -> None:
    events = [event for event in good_events() if event.incarnation == 0]
    assert broken_promises(run_of(events)) == ["judge_healing"]


def test_a_group_that_never_takes_part_again_is_found() -> None:
    def watch_only(event: Event) -> Event:
        return replace(event, participating=False)  # type: ignore[call-arg]

    events = changed(lambda e: isinstance(e, Committed) and e.incarnation == 1, watch_only)
    assert broken_promises(run_of(events)) == ["judge_healing"]


@pytest.mark.parametrize("last_loss", [4.6, 3.8, float("nan"), float("inf")])
def test_a_loss_that_does_not_fall_is_found(last_loss: float) -> None:
    events = changed(
        lambda e: isinstance(e, Committed) and e.group == 1 and e.step > 100,
        lambda e: replace(e, loss=last_loss),  # type: ignore[call-arg]
    )
    assert broken_promises(run_of(events)) == ["judge_loss"]


def test_a_group_that_joins_late_is_measured_against_the_beginning_of_the_run() -> None:
    late = [event for event in good_events() if event.group != 1 or event.at > 8.0]
    assert promises.judge_loss(run_of(late)).outcome is Outcome.PASS


def test_a_run_too_short_to_learn_is_not_judged_by_its_loss() -> None:
    verdict = promises.judge_loss(run_of(good_events(num_steps=30)))
    assert verdict == Verdict(
        promise="the loss of every group fell clearly",
        outcome=Outcome.NOT_JUDGED,
        detail="group 0 has only 30 commits",
    )


def test_a_trainer_that_dies_by_itself_is_found() -> None:
    died = Exited(group=1, incarnation=0, at=11.0, status=1, expected=False)
    assert broken_promises(run_of([*good_events(), died])) == ["judge_exits"]


def test_a_process_that_is_left_over_is_found() -> None:
    assert broken_promises(run_of(good_events(), leftovers=["77: sidecar"])) == ["judge_leftovers"]


def test_a_kill_that_did_not_take_place_is_found() -> None:
    assert broken_promises(run_of(good_events(), num_kills_planned=2)) == ["judge_completion"]


def test_a_run_that_could_not_go_on_is_found() -> None:
    run = run_of(good_events(), failure="no group committed anything for 60 s")
    assert broken_promises(run) == ["judge_completion"]


def test_a_run_in_which_nothing_happens_fails() -> None:
    events: list[Event] = [
        Started(group=0, incarnation=0, at=0.0, pid=1),
        Joined(group=0, incarnation=0, at=1.0),
    ]
    run = run_of(events, num_kills_planned=0)
    assert "judge_completion" in broken_promises(run)
    passed = [verdict.promise for verdict in judge(run) if verdict.outcome is Outcome.PASS]
    assert passed == ["no trainer died by itself", "no process was left over"]


class TestInterrupted:
    """Promises after Ctrl-C, by which only what has happened until then is judged."""

    def test_kills_still_to_come_are_not_missed(self) -> None:
        run = run_of(good_events(num_steps=60), num_kills_planned=5, interrupted=True)
        assert broken_promises(run) == []

    def test_groups_that_had_no_time_to_meet_are_not_judged(self) -> None:
        events = [event for event in good_events() if event.group == 0]
        assert broken_promises(run_of(events, num_groups=2, interrupted=True)) == []

    def test_a_difference_is_still_one(self) -> None:
        events = changed(lambda e: is_commit(e, 1, 30), lambda e: replace(e, digest="other"))  # type: ignore[call-arg]
        assert broken_promises(run_of(events, interrupted=True)) == ["judge_identity"]
