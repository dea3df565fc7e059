"""Plants mistakes in the ledger and the accounts; the tests of their rules must find each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from core.quorum.worker import test_time_use as of_workers
from torchft_svc.core.quorum.lighthouse.goodput import TimeAccounts
from torchft_svc.core.quorum.lighthouse.incidents import JobLedger, _Entry
from torchft_svc.core.quorum.worker.time_use import TimeUse

from . import test_goodput as of_jobs
from . import test_incidents as of_records


def nothing(*_: Any, **__: Any) -> None:
    """Stands for a step that was forgotten."""


def no(*_: Any, **__: Any) -> bool:
    return False


def yes(*_: Any, **__: Any) -> bool:
    return True


def counts_repeated_events(ledger: JobLedger, *event: Any) -> tuple[str, ...]:
    ledger._seen.clear()
    return _record_event(ledger, *event)


def blames_nobody(ledger: JobLedger, entry: Any, _: Any) -> None:
    ledger._update(entry)


def adds_each_difference_whole(accounts: TimeAccounts, before: Any, now: Any, until: float) -> None:
    accounts._until = until - (now.total_s - before.total_s)
    _add_delta(accounts, before, now, until)


def accepts_any_reference(accounts: TimeAccounts, _: Any, at: float) -> None:
    _record_quorum(accounts, {"a", "b", "c"}, at)


def forgets_what_it_has_reported(accounts: TimeAccounts, replica_id: str) -> None:
    accounts._known.pop(replica_id)


_record_event = JobLedger.record_event
_add_delta = TimeAccounts._add_delta
_record_quorum = TimeAccounts.record_quorum

PLANTED: list[tuple[type, str, Callable[..., Any], Callable[..., Any]]] = [
    (
        JobLedger,
        "_explain",
        no,
        of_records.test_n2_the_step_that_a_loss_costs_belongs_to_its_record,
    ),
    (
        JobLedger,
        "_explain",
        no,
        of_records.test_n2_the_step_in_which_a_difference_is_found_belongs_to_that,
    ),
    (
        JobLedger,
        "_blame",
        blames_nobody,
        of_records.test_n2_a_late_report_of_the_cause_replaces_what_the_others_noticed,
    ),
    (
        JobLedger,
        "record_event",
        counts_repeated_events,
        of_records.test_n5_an_event_that_is_repeated_counts_once,
    ),
    (JobLedger, "drop_oldest", nothing, of_records.test_n3_the_ledger_of_a_job_is_bounded),
    (JobLedger, "_complete", nothing, of_records.test_n1_the_first_commit_completes_the_anatomy),
    (
        JobLedger,
        "record_moved",
        nothing,
        of_records.test_n2_a_group_that_goes_on_by_itself_ends_its_hang,
    ),
    (
        JobLedger,
        "_find_open",
        nothing,
        of_records.test_n2_a_hang_that_ends_in_a_kill_or_an_eviction_is_one_record,
    ),
    (
        JobLedger,
        "_record_dead_manager",
        lambda *_: (),
        of_records.test_n2_a_manager_that_died_in_a_term_costs_nothing_and_is_a_record,
    ),
    (
        _Entry,
        "only_seemed_to_hang",
        no,
        partial(of_records.test_n2_a_silent_group_that_seemed_to_hang_is_lost, "evict"),
    ),
    (
        _Entry,
        "only_seemed_to_hang",
        yes,
        of_records.test_n2_a_group_that_hangs_with_signs_of_life_stays_hung_when_it_is_gone,
    ),
    (
        JobLedger,
        "_explain_hang",
        nothing,
        partial(
            of_records.test_n2_a_group_seems_to_hang_while_it_is_cut_off,
            5.0,
            "lighthouse_away",
            102.0,
        ),
    ),
    (TimeAccounts, "blame_hang", nothing, of_jobs.test_n6_what_is_lost_to_a_hang_is_blamed_on_it),
    (
        TimeAccounts,
        "confirm_hang",
        nothing,
        of_jobs.test_n2_a_hang_that_has_ended_stays_one_when_its_group_is_lost_later,
    ),
    *(
        (
            TimeAccounts,
            "exonerate",
            nothing,
            partial(of_jobs.test_n2_the_ledger_and_the_goodput_agree_on_what_a_hang_was, later),
        )
        for later in ("lost", "its manager had died", "cut off")
    ),
    (
        TimeAccounts,
        "forget_group",
        forgets_what_it_has_reported,
        of_jobs.test_n6_a_job_that_was_cut_off_has_trained_on,
    ),
    (
        TimeAccounts,
        "_adopt",
        nothing,
        of_jobs.test_n5_a_new_lighthouse_begins_with_the_oldest_group,
    ),
    (
        TimeAccounts,
        "_add_delta",
        adds_each_difference_whole,
        of_jobs.test_n6_another_reference_follows_and_no_time_counts_twice,
    ),
    (
        TimeAccounts,
        "record_quorum",
        accepts_any_reference,
        of_jobs.test_n6_a_group_that_heals_is_no_reference,
    ),
    (
        TimeUse,
        "sum_again",
        nothing,
        of_workers.test_a_step_that_is_summed_again_has_waited_beyond_a_usual_step,
    ),
    (
        TimeUse,
        "_usual_step_s",
        lambda use: statistics.fmean(use._last_steps_s or [1.0]),
        of_workers.test_a_step_in_which_all_stood_still_makes_no_later_one_longer,
    ),
    (
        TimeUse,
        "stood_still",
        nothing,
        of_workers.test_what_the_program_stood_still_for_is_what_the_round_did_meanwhile,
    ),
    (
        TimeUse,
        "_overlaps",
        lambda *_: {},
        of_workers.test_what_the_program_stood_still_for_is_what_the_round_did_meanwhile,
    ),
]


@pytest.mark.parametrize(
    ("where", "name", "mistake", "test"),
    PLANTED,
    ids=[f"{where.__name__}.{name}-{number}" for number, (where, name, *_) in enumerate(PLANTED)],
)
def test_a_planted_mistake_is_found(
    monkeypatch: pytest.MonkeyPatch,
    where: type,
    name: str,
    mistake: Callable[..., Any],
    test: Callable[[], None],
) -> None:
    test()
    monkeypatch.setattr(where, name, mistake)
    with pytest.raises(AssertionError):
        test()
