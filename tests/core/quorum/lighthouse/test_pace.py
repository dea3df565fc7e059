"""Tests of which groups count as slow (rules N9 and N10), and which is drained (rule Q26)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from support.core.scenes import JOB, Scene, config

from torchft_svc.core.quorum.lighthouse import jobs as jobs_module
from torchft_svc.core.quorum.lighthouse.incidents import Incident, IncidentKind, JobLedger
from torchft_svc.core.quorum.lighthouse.jobs import ReportPace
from torchft_svc.core.quorum.lighthouse.membership import Membership
from torchft_svc.core.quorum.lighthouse.pace import MIN_STEPS, Pace, PaceChange, PaceWatch
from torchft_svc.core.quorum.lighthouse.quorum import can_lose_a_group
from torchft_svc.core.quorum.session_messages import Departure, Drain, Kill, Leave
from torchft_svc.core.quorum.tally import StepTimes, Tally
from torchft_svc.errors import ConfigError, RequestRefused

FACTOR, AFTER_S = 1.5, 8.0
ALL = frozenset({"a:1", "b:1", "c:1"})


def times(training_s: float, num_steps: int = MIN_STEPS, **changes: Any) -> StepTimes:
    """A step of a second, of which the rest is a wait for others."""
    fields = {"updating_s": 0.0, "between_s": 0.0, "waiting_s": 1.0 - training_s, **changes}
    return StepTimes(training_s=training_s, num_steps=num_steps, **fields)


def watch(**training_s: float) -> PaceWatch:
    made = PaceWatch(FACTOR, AFTER_S)
    for name, seconds in training_s.items():
        made.record_times(f"{name}:1", times(seconds))
    return made


def dealt(**times_and_load: tuple[float, ...]) -> PaceWatch:
    """Groups with their training time, load, and time of the update."""
    made = PaceWatch(FACTOR, AFTER_S)
    for name, (training_s, load, *updating_s) in times_and_load.items():
        made.record_times(f"{name}:1", times(training_s, load=load, updating_s=sum(updating_s)))
    return made


def run(made: PaceWatch, until: float, **training_s: float) -> list[PaceChange]:
    """Report these times each second, with two steps more each; returns what was found."""
    return run_dealt(made, until, **{name: (each, 1.0) for name, each in training_s.items()})


def run_dealt(
    made: PaceWatch, until: float, **times_and_load: tuple[float, float]
) -> list[PaceChange]:
    found = []
    for second in range(int(until) + 1):
        for name, (seconds, load) in times_and_load.items():
            made.record_times(f"{name}:1", times(seconds, MIN_STEPS + 2 * second, load=load))
        found += made.find_changes(ALL, float(second))
    return found


# -- which group is slow (N9, N10) -----------------------------------------------------------------


def test_n9_the_own_work_is_compared_and_not_the_step() -> None:
    made = watch(a=0.25, b=0.5)
    paces = made.paces(ALL)
    assert paces["a:1"][:2] == (
        Pace(phase="step", seconds=0.25),
        Pace(phase="training", seconds=0.25),
    )
    assert paces["b:1"][0] == Pace(phase="step", seconds=0.5, to_best=2.0)


def test_n9_a_group_is_compared_with_its_own_best_too() -> None:
    made = watch(a=0.25)
    made.record_times("a:1", times(0.75, updating_s=0.125))
    (step, training, updating, between) = made.paces(ALL)["a:1"]
    assert (step.seconds, step.to_best, step.to_own_best) == (0.875, 1.0, 3.5)
    assert (training.to_own_best, updating.to_own_best) == (3.0, 125.0)
    assert between == Pace(phase="between", seconds=0.0)


def test_n9_the_best_is_a_member_of_the_quorum_in_force() -> None:
    made = watch(a=0.25, b=0.5)
    assert made.paces({"b:1"})["b:1"][0].to_best == 1.0
    assert made.paces(set())["b:1"][0].to_best == 1.0, "there is nothing to compare with"


def test_n9_who_is_dealt_more_is_compared_for_as_many_samples() -> None:
    """Four microbatches for three groups."""
    made = dealt(a=(0.25, 0.75), b=(0.25, 0.75), c=(0.5, 1.5))
    paces = made.paces(ALL)
    assert [paces[each][0].to_best for each in sorted(ALL)] == [1.0, 1.0, 1.0]
    assert (paces["c:1"][0].seconds, paces["c:1"][1].seconds) == (0.5, 0.5)
    made.record_times("c:1", times(1.0, load=1.5))
    (step, training, *_) = made.paces(ALL)["c:1"]
    assert (step.to_best, training.to_best, step.to_own_best) == (2.0, 2.0, 2.0)


def test_n9_who_is_dealt_less_and_takes_as_long_is_not_behind() -> None:
    """A group whose time hardly grows with its samples costs nobody anything."""
    made = dealt(a=(0.25, 0.75), b=(0.25, 0.75), c=(0.25, 1.5))
    assert [each[0].to_best for each in made.paces(ALL).values()] == [1.0, 1.0, 1.0]


def test_n9_an_update_does_not_grow_with_the_samples() -> None:
    made = dealt(a=(0.25, 1.0, 0.25), b=(0.75, 2.0, 0.5))
    step, training, updating, _ = made.paces({"a:1", "b:1"})["b:1"]
    assert (training.to_best, updating.to_best) == (1.5, 2.0)
    assert step.to_best == (0.375 + 0.5) / 0.5


def test_n9_a_mean_of_a_few_steps_says_nothing() -> None:
    made = PaceWatch(FACTOR, AFTER_S)
    made.record_times("a:1", times(0.25, MIN_STEPS - 1))
    assert made.paces(ALL) == {}


def test_n10_a_group_is_slow_after_the_time_and_once() -> None:
    made = watch()
    assert run(made, AFTER_S - 1, a=0.25, b=0.375) == []
    assert not made.is_slow("b:1")
    (change,) = run(watch(), 30, a=0.25, b=0.375)
    assert (change.replica_id, change.is_slow, change.for_s) == ("b:1", True, AFTER_S)
    assert change.cause == (
        "its own work takes 0.375 s a step, 1.5 times that of group a (0.250 s); the most of it in "
        "phase training, by group rank 0: 0.375 s, there 0.250 s"
    )


def test_n10_the_groups_are_compared_once_a_second() -> None:
    """A thousand groups beat some times a second; each look compares all of them."""
    made = watch(a=0.25)
    assert made.is_due(0.0)
    made.find_changes(ALL, 0.0)
    assert not made.is_due(0.75)
    assert made.is_due(1.0)


def test_n10_who_is_dealt_more_is_not_slow() -> None:
    few = {"a": (0.25, 0.75), "b": (0.25, 0.75)}
    assert run_dealt(watch(), 30, **few, c=(0.5, 1.5)) == []
    assert run_dealt(watch(), 30, **few, c=(0.5, 0.75)) != []
    assert run_dealt(watch(), 30, **few, c=(0.5, 0.0)) != [], "it does not know its load"
    (change,) = run_dealt(watch(), 30, **few, c=(0.75, 1.5))
    assert change.cause == (
        "its own work takes 0.750 s a step, 1.5 times that of group a (0.500 s for as many "
        "samples); the most of it in phase training, by group rank 0: 0.750 s, there 0.500 s"
    )


def test_n10_who_is_dealt_less_and_takes_as_long_is_not_slow() -> None:
    most = {"a": (0.25, 1.2), "b": (0.25, 1.2)}
    assert run_dealt(watch(), 30, **most, c=(0.25, 0.6)) == []
    assert run_dealt(watch(), 30, **most, c=(0.5, 0.6)) != []


def test_n10_what_is_below_the_factor_is_not_slow() -> None:
    assert run(watch(), 30, a=0.25, b=0.37) == []


def test_n10_a_pause_is_not_slow() -> None:
    """A checkpoint, an evaluation: the mean is high for some seconds."""
    made = watch()
    for second in range(40):
        b = 0.75 if second % 8 < 6 else 0.25
        made.record_times("a:1", times(0.25, 10 + second * 2))
        made.record_times("b:1", times(b, 10 + second * 2))
        assert made.find_changes(ALL, float(second)) == []


def test_n10_two_long_steps_are_not_slow() -> None:
    made = watch(a=0.25, b=0.75)
    for second in range(40):
        assert made.find_changes(ALL, float(second)) == [], "no step has ended since"


def test_n10_what_costs_the_others_nothing_is_not_slow() -> None:
    waits_long = {"waiting_s": 10.0}
    made = PaceWatch(FACTOR, AFTER_S)
    for second in range(30):
        made.record_times("a:1", times(0.01, 10 + second, **waits_long))
        made.record_times("b:1", times(0.1, 10 + second, **waits_long))
        assert made.find_changes(ALL, float(second)) == []


def test_n10_a_group_that_recovers_is_usual_again_after_the_time() -> None:
    made = watch()
    assert len(run(made, 20, a=0.25, b=0.5)) == 1
    again = []
    for second in range(21, 60):
        for name in ("a", "b"):
            made.record_times(f"{name}:1", times(0.25, MIN_STEPS + 2 * second))
        again += made.find_changes(ALL, float(second))
    (change,) = again
    assert (change.is_slow, change.for_s) == (False, AFTER_S)


def test_n10_a_group_that_is_gone_is_forgotten() -> None:
    made = watch()
    run(made, 20, a=0.25, b=0.5)
    made.forget_group("b:1")
    assert (made.is_slow("b:1"), made.slowest(ALL)) == (False, None)


@pytest.mark.parametrize("field", ["training_s", "updating_s", "between_s", "waiting_s"])
@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e300])
def test_times_that_cannot_be_are_refused(field: str, seconds: float) -> None:
    with pytest.raises(RequestRefused, match=field):
        dataclasses.replace(times(0.5), **{field: seconds}).check()


@pytest.mark.parametrize("load", [float("nan"), float("inf"), -1.0, 1e-9, 1e300])
def test_a_load_that_cannot_be_is_refused(load: float) -> None:
    with pytest.raises(RequestRefused, match="load"):
        times(0.5, load=load).check()


def test_a_tally_whose_sum_is_no_number_is_refused() -> None:
    with pytest.raises(RequestRefused, match="committed_s"):
        Tally(committed_s=1.7e308, waiting_s=1.7e308).check()


# -- which group is drained (Q26) ------------------------------------------------------------------


def settings(**changes: Any) -> Any:
    fields = {"slow_factor": FACTOR, "slow_after_s": AFTER_S, "on_slow": "evict", **changes}
    return config(**fields)


class Job:
    """A job whose groups report how long their own work takes, each second."""

    def __init__(
        self, *names: str, min_replicas: int = 1, steady: bool = False, **changes: Any
    ) -> None:
        self.scene = scene = Scene(settings(min_replicas=min_replicas, **changes))
        scene.now = 100.0
        ids = [f"{name}:1" for name in names]
        scene.beat(*ids)
        for each in ids:
            scene.ask(each, 7, steady=steady)
        assert scene.pop_quorums() == [(1, ids)]
        self.num_steps = MIN_STEPS

    def run(
        self, seconds: int, load: dict[str, float] | None = None, **training_s: float
    ) -> list[tuple[str, bool, bool]]:
        """Returns what was reported: the group, whether it is slow, whether it is drained."""
        scene = self.scene
        for _ in range(seconds):
            scene.until(scene.now + 1.0)
            self.num_steps += 2
            for name, own_s in training_s.items():
                reported = times(own_s, self.num_steps, load=(load or {}).get(name, 1.0))
                tally = Tally(committed_s=1.0, num_committed=1, step_times=reported)
                scene.beat(f"{name}:1")
                scene._record(scene.jobs.record_report(JOB, f"{name}:1", tally, (), scene.now))
        reports = [each for each in scene.pop_orders() if isinstance(each, ReportPace)]
        return [(each.replica_id[0], each.is_slow, each.evict) for each in reports]

    def leaves(self, name: str) -> None:
        """The drained group ends its step, and the others form the next quorum."""
        leave = Leave("drained", True, True, Departure.DRAINED)
        self.scene._record(self.scene.jobs.leave(JOB, f"{name}:1", leave, self.scene.now))

    def ask_all(self, *names: str) -> None:
        self.scene.ask_all(*(f"{name}:1" for name in names), step=8)

    def incidents(self) -> list[Incident]:
        found: list[Incident] = self.scene.jobs.incidents(JOB)
        return [each for each in found if each.kind is not IncidentKind.JOINED]


def test_q26_a_slow_group_is_drained_and_its_record_ends_with_the_next_quorum() -> None:
    job = Job("a", "b", "c")
    assert job.run(20, a=0.25, b=0.25, c=0.75) == [("c", True, False), ("c", True, True)]
    assert job.scene.group("c:1").slow
    (slow,) = job.incidents()
    assert (slow.kind, slow.groups, slow.is_open) == (IncidentKind.SLOW, ("c:1",), True)
    assert slow.cause.startswith("it is evicted because it is slow: its own work takes 0.750 s")
    job.leaves("c")
    job.ask_all("a", "b")
    (slow,) = job.incidents()
    assert slow.kind is IncidentKind.EVICTED
    assert slow.decided_after_s is not None


def test_q26_by_default_a_slow_group_is_only_reported() -> None:
    job = Job("a", "b", "c", on_slow="report")
    assert job.run(20, a=0.25, b=0.25, c=0.75) == [("c", True, False)]
    assert job.run(20, a=0.25, b=0.25, c=0.25) == [("c", False, False)]
    (slow,) = job.incidents()
    assert (slow.kind, slow.is_open) == (IncidentKind.SLOW, False)


def test_q26_never_below_min_replicas() -> None:
    job = Job("a", "b", "c", min_replicas=3)
    assert job.run(30, a=0.25, b=0.25, c=0.75) == [("c", True, False)]


@pytest.mark.parametrize("what", ["drained", "killed", "silent"])
def test_q26_never_below_min_replicas_if_another_one_may_end_too(what: str) -> None:
    job = Job("a", "b", "c", "d", min_replicas=3, steady=True, heartbeat_timeout_s=100.0)
    if what == "silent":
        job.scene.session_ends("a:1")
    else:
        command = Drain("by an operator") if what == "drained" else Kill("by an operator")
        job.scene.jobs.commanded(JOB, "a:1", command, job.scene.now)
    fast = {"b": 0.25, "c": 0.25} if what == "silent" else {"a": 0.25, "b": 0.25, "c": 0.25}
    reports = job.run(30, **fast, d=0.75)
    assert ("d", True, True) not in reports
    assert job.scene.group("d:1").slow


def test_q26_an_operator_drains_none_beside_it_if_too_few_would_remain() -> None:
    job = Job("a", "b", "c", min_replicas=2)
    assert job.run(20, a=0.25, b=0.25, c=0.75)[-1] == ("c", True, True)
    jobs, drain = job.scene.jobs, Drain("by an operator")
    with pytest.raises(RequestRefused, match=r"'c:1' is being evicted.*without 'b:1' too few"):
        jobs.commanded(JOB, "b:1", drain, job.scene.now)
    assert jobs.missed_command(JOB, "b:1", job.scene.now) is None
    jobs.commanded(JOB, "c:1", drain, job.scene.now)  # it is the one
    jobs.commanded(JOB, "b:1", Kill("by an operator"), job.scene.now)
    job = Job("a", "b", "c", "d", min_replicas=2)
    assert job.run(20, a=0.25, b=0.25, c=0.25, d=0.75)[-1] == ("d", True, True)
    job.scene.jobs.commanded(JOB, "b:1", drain, job.scene.now)  # enough remain
    with pytest.raises(RequestRefused, match="too few"):
        job.scene.jobs.commanded(JOB, "c:1", drain, job.scene.now)
    job.leaves("d")
    job.scene.jobs.commanded(JOB, "c:1", drain, job.scene.now)


def test_q26_who_hangs_does_not_count_for_min_replicas() -> None:
    job = Job("a", "b", "c", "d", min_replicas=3, steady=True)
    job.scene.jobs._jobs[JOB].members.evicted(["a:1"])
    assert job.run(30, b=0.25, c=0.25, d=0.75) == [("d", True, False)]


def test_q26_an_order_that_was_lost_with_its_session_is_repeated() -> None:
    """The order is repeated until the group is gone; no other one is drained meanwhile."""
    job = Job("a", "b", "c", "d", "e", steady=True)
    fast = {"a": 0.25, "b": 0.25, "c": 0.25}
    assert job.run(int(AFTER_S) + 2, **fast, d=0.5, e=0.75)[-1] == ("e", True, True)
    jobs = job.scene.jobs
    for _ in range(2):
        job.scene.session_ends("e:1")
        assert job.run(1, **fast, d=0.5) == []
        order = jobs.missed_command(JOB, "e:1", job.scene.now)
        assert isinstance(order, Drain)
        assert order.reason.startswith("it is evicted because it is slow")
        assert job.run(20, **fast, d=0.5, e=0.75) == []
    job.leaves("e")
    job.ask_all("a", "b", "c", "d")
    assert job.run(20, **fast, d=0.5) == [("d", True, True)]


def test_q26_never_the_last_group() -> None:
    job = Job("a", "b")
    job.leaves("a")
    assert job.run(30, b=0.75) == []


def test_q26_never_more_than_one_at_once() -> None:
    job = Job("a", "b", "c", "d", "e")
    fast = {"a": 0.25, "b": 0.25, "c": 0.25}
    assert job.run(30, **fast, d=0.5, e=0.75) == [
        ("d", True, False),
        ("e", True, False),
        ("e", True, True),
    ], "e does not leave: d stays as long"
    job.leaves("e")
    job.ask_all("a", "b", "c", "d")
    assert job.run(20, **fast, d=0.5) == [("d", True, True)]


def test_q26_the_next_one_has_its_time_again() -> None:
    job = Job("a", "b", "c", "d", "e")
    fast = {"a": 0.25, "b": 0.25, "c": 0.25}
    job.run(int(AFTER_S) + 2, **fast, d=0.5, e=0.75)
    job.leaves("e")
    job.ask_all("a", "b", "c", "d")
    assert job.run(int(AFTER_S) - 4, **fast, d=0.5) == []
    assert job.run(8, **fast, d=0.5) == [("d", True, True)]


def test_q26_a_group_whose_session_is_broken_is_drained_when_it_is_back() -> None:
    job = Job("a", "b", "c", steady=True)
    fast = {"a": 0.25, "b": 0.25}
    job.run(int(AFTER_S) - 2, **fast, c=0.75)
    job.scene.session_ends("c:1")
    assert job.run(6, **fast) == [("c", True, False)], "the order would not arrive"
    assert job.run(2, **fast, c=0.75) == [("c", True, True)]


def test_q26_where_most_are_slow_the_best_is_the_exception() -> None:
    job = Job("a", "b", "c")
    assert job.run(30, a=0.25, b=0.75, c=0.75) == [("b", True, False), ("c", True, False)]


def test_q26_who_was_dealt_more_stays_and_counts_for_as_many_samples() -> None:
    load = {"a": 0.8, "b": 0.8, "c": 1.6, "d": 0.8, "e": 0.8}
    fast = {"a": 0.25, "b": 0.25, "c": 0.5}
    assert Job(*"abcde").run(20, load, **fast, d=0.25, e=0.25) == []
    assert Job(*"abcde").run(20, load, **fast, d=0.25, e=0.5)[-1] == ("e", True, True)
    # Beside half of them it is not: for as many samples, the others take nearly as long.
    assert Job(*"abcde").run(20, load, a=0.25, b=0.35, c=0.8, d=0.35, e=0.35) == [
        ("c", True, False)
    ]


@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan"), float("inf")])
def test_a_factor_that_every_group_exceeds_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="slow_factor"):
        config(slow_factor=factor)


# -- planted mistakes ------------------------------------------------------------------------------


def _no(*_: Any, **__: Any) -> bool:
    return False


def _yes(*_: Any, **__: Any) -> bool:
    return True


def compares_whole_steps(made: StepTimes) -> float:
    return made.training_s + made.updating_s + made.between_s + made.waiting_s


def counts_all(members: Membership, _: Any) -> bool:
    return can_lose_a_group(members, frozenset())


def as_if_even(made: StepTimes, _: float) -> StepTimes:
    return made


_best_of = PaceWatch._best_of


def compares_each_sample(made: PaceWatch, members: Any) -> Any:
    best = _best_of(made, members)
    for each in made._groups.values():
        each.times = each.times.at_load(1.0)
    return best._replace(as_it_is=best.when_even)


def forgets_nothing(_: PaceWatch, __: str) -> None:
    pass


def takes_the_slowest(made: PaceWatch, members: Any) -> str | None:
    slow = [each for each in made._groups if each in members and made.is_slow(each)]
    return max(slow, key=lambda each: made._groups[each].times.own_s, default=None)


PLANTED: list[tuple[Any, str, Any, Callable[[], None]]] = [
    (
        StepTimes,
        "own_s",
        property(compares_whole_steps),
        test_n9_the_own_work_is_compared_and_not_the_step,
    ),
    (StepTimes, "at_load", as_if_even, test_n10_who_is_dealt_more_is_not_slow),
    (
        StepTimes,
        "at_load",
        as_if_even,
        test_q26_who_was_dealt_more_stays_and_counts_for_as_many_samples,
    ),
    (
        PaceWatch,
        "_best_of",
        compares_each_sample,
        test_n10_who_is_dealt_less_and_takes_as_long_is_not_slow,
    ),
    (PaceWatch, "forget_group", forgets_nothing, test_n10_a_group_that_is_gone_is_forgotten),
    (PaceWatch, "_is_above", _no, test_n10_a_group_is_slow_after_the_time_and_once),
    (
        PaceWatch,
        "slowest",
        takes_the_slowest,
        test_q26_where_most_are_slow_the_best_is_the_exception,
    ),
    (jobs_module, "can_lose_a_group", _yes, test_q26_never_below_min_replicas),
    (
        jobs_module,
        "can_lose_a_group",
        counts_all,
        lambda: test_q26_never_below_min_replicas_if_another_one_may_end_too("drained"),
    ),
    (
        jobs_module,
        "can_lose_a_group",
        counts_all,
        lambda: test_q26_never_below_min_replicas_if_another_one_may_end_too("silent"),
    ),
    (jobs_module, "can_lose_a_group", _no, test_q26_never_more_than_one_at_once),
    (
        JobLedger,
        "record_slow_eviction",
        _no,
        test_q26_a_slow_group_is_drained_and_its_record_ends_with_the_next_quorum,
    ),
    (JobLedger, "record_usual", _no, test_q26_by_default_a_slow_group_is_only_reported),
    (
        "torchft_svc.core.quorum.lighthouse.pace",
        "MIN_STEPS",
        0,
        test_n10_two_long_steps_are_not_slow,
    ),
    (
        "torchft_svc.core.quorum.lighthouse.pace",
        "LEAST_LOSS",
        0.0,
        test_n10_what_costs_the_others_nothing_is_not_slow,
    ),
]


@pytest.mark.parametrize(("owner", "name", "planted", "test"), PLANTED)
def test_a_planted_mistake_is_found(
    owner: Any, name: str, planted: Any, test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", planted)
    else:
        monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, ValueError)):
        test()
