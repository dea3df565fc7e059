"""Tests how a trainer goes on when its workers are lost: stories of inputs and orders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchft_svc.errors import ConfigError
from torchft_svc.trainer.retry.budget import UNLIMITED, ProgramError, Retries, RetryBudget
from torchft_svc.trainer.retry.incident import MAX_FORMINGS, IncidentCause, Remedy, ReportBroken
from torchft_svc.trainer.retry.initial_state import (
    DropHandle,
    FindCheckpoint,
    KnownState,
    RejectState,
    StateSource,
)
from torchft_svc.trainer.retry.machine import (
    RUN_TRANSITIONS,
    EndCommand,
    KillWorker,
    LetAbandon,
    LetEnd,
    LetJoin,
    LookForResources,
    ReportFormed,
    ReportLeftAlone,
    ReportNoResources,
    ReportPlaceFilled,
    ReportSpareLost,
    RequestWorkers,
    RetryMachine,
    RetryOrder,
    RetryRules,
    RunChange,
    RunPhase,
    SendCommand,
    StartWorker,
)

RULES = RetryRules(num_workers=3)
PER_STEP = replace(RULES, keeps_others=True)


class Story:
    """A machine and its shell: the shell's own answers are given at once."""

    def __init__(self, rules: RetryRules = RULES, num_startable: int = 3) -> None:
        self.rules = rules
        self.now = 0.0
        self.machine = RetryMachine(rules, 0.0)
        self.num_startable = num_startable
        self.checkpoint: KnownState | None = None
        self.orders: list[RetryOrder] = []  # of the last input
        self.running: set[int] = set()

    def do(self, name: str, *arguments: Any, **keywords: Any) -> list[RetryOrder]:
        """Apply one input; return the orders, also those that followed the shell's answers."""
        left = list(getattr(self.machine, name)(*arguments, self.now, **keywords))
        self.orders = []
        while left:
            order = left.pop(0)
            self.orders.append(order)
            if isinstance(order, LookForResources):
                num = self.num_startable - len(self.running)
                left += self.machine.resources_found(max(0, num), self.now, 0.0)
            elif isinstance(order, FindCheckpoint):
                left += self.machine.checkpoint_found(self.checkpoint, self.now)
            elif isinstance(order, StartWorker):
                self.running.add(order.worker)
        return self.orders

    def of(self, kind: type[Any]) -> list[Any]:
        """The last orders of this kind."""
        return [order for order in self.orders if isinstance(order, kind)]

    def begin_command(
        self, max_retries: int = 3, reset_after: int | None = None, **kind: Any
    ) -> None:
        self.do(
            "begin_command", RetryBudget(max_retries=max_retries, reset_after=reset_after), **kind
        )

    def form(self, step: int = 0) -> list[int]:
        """All workers that were started join; returns them."""
        started = [order.worker for order in self.of(StartWorker)]
        joins: list[int] = []
        for worker in started:
            self.do("started", worker)
            joins += [order.worker for order in self.of(LetJoin)]
        if not self.rules.keeps_others:
            assert joins == started[:1]
            self.do("store_opened", started[0], self.machine._world, "host:1")
            joins += [order.worker for order in self.of(LetJoin)]
        assert joins == started
        sent: list[int] = []
        for worker in started:
            self.do("joined", worker, self.machine._world, step)
            sent += [order.worker for order in self.of(SendCommand)]
        assert sent == started
        return started

    def train(self, workers: list[int], step: int) -> None:
        for worker in workers:
            self.do("progressed", worker, step)

    def lose(self, worker: int, reason: str = "killed") -> list[RetryOrder]:
        self.running.discard(worker)
        return self.do("lost", worker, reason)

    def offer(self, worker: int, step: int) -> None:
        handle = KnownState(source=StateSource.PEER, step=step, handle=f"{worker}@{step}")
        self.do("offered", worker, handle)

    def fail(self, worker: int, kind: str = "ValueError", is_peers: bool = False) -> None:
        step = self.machine.best_step
        error = ProgramError(kind=kind, message="", step=step, is_peers=is_peers)
        self.do("failed", worker, error)

    def refuse(self, worker: int) -> None:
        """Make ``worker`` fail to load the state that it was to begin with."""
        error = ProgramError(
            kind="ConfigError", message="unfit", step=0, is_peers=False, refuses_state=True
        )
        self.do("failed", worker, error)

    def end_all(self) -> None:
        """All that run end; the orders are those of the last end."""
        for worker in sorted(self.running):
            self.lose(worker)

    def beat_for(self, seconds: float) -> None:
        """Time passes, in which all workers say that they live."""
        until, given = self.now + seconds, []
        while self.now < until:
            self.now += 0.1
            for worker in sorted(self.running):
                given += self.do("progressed", worker, 0)
            given += self.do("tick")
        self.orders = given

    def wait(self, seconds: float) -> None:
        """Time passes, and the machine looks as often as it wants."""
        until = self.now + seconds
        given: list[RetryOrder] = []
        while (deadline := self.machine.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            given += self.do("tick")
        self.now = until
        self.orders = given


def trained(story: Story, step: int, **budget: Any) -> list[int]:
    story.begin_command(**budget)
    workers = story.form()
    story.train(workers, step)
    return workers


# -- the table -----------------------------------------------------------------------------------


def test_each_phase_is_left_and_entered() -> None:
    left = {phase for phase, _ in RUN_TRANSITIONS}
    assert left == set(RunPhase) == set(RUN_TRANSITIONS.values())
    assert {change for _, change in RUN_TRANSITIONS} == set(RunChange)


def test_every_phase_leads_back_to_idle() -> None:
    leads: set[RunPhase] = {RunPhase.IDLE}
    for _ in RunPhase:
        leads |= {phase for (phase, _), target in RUN_TRANSITIONS.items() if target in leads}
    assert leads == set(RunPhase)


# -- restart -------------------------------------------------------------------------------------


def test_a_command_is_carried_out_and_the_next_one_finds_its_workers() -> None:
    story = Story()
    story.begin_command()
    assert story.orders == [
        LookForResources(),
        RequestWorkers(0),
        FindCheckpoint(),
        StartWorker(0, 0),
        StartWorker(1, 1),
        StartWorker(2, 2),
    ]
    workers = story.form()
    begin = KnownState(source=StateSource.START)
    assert story.of(ReportFormed) == [ReportFormed(begin, 0, 3, is_first=True)]
    story.do("finished", 0, 5)
    story.do("finished", 1, 5)
    assert story.orders == []
    story.do("finished", 2, 5)
    assert story.orders == [EndCommand()]
    story.now += 1000.0  # nobody listens between two commands
    story.begin_command()
    assert story.orders == [SendCommand(worker) for worker in workers]


def test_a_lost_worker_ends_all_and_the_best_state_is_gone_on_with() -> None:
    story = Story()
    trained(story, 7)
    story.lose(1)
    reason = "worker 1: killed"
    broken = ReportBroken(remedy=Remedy.RESTART, cause=IncidentCause.LOST, reason=reason, rank=1)
    assert story.orders == [broken, LetAbandon(0, reason), LetAbandon(2, reason)]
    story.offer(0, 7)
    assert story.orders == []
    story.offer(2, 8)
    assert story.orders == [DropHandle("0@7")]
    story.lose(0)
    story.lose(2)
    assert len(story.of(StartWorker)) == 3
    assert not story.of(FindCheckpoint)
    story.do("started", 3)
    (join,) = story.of(LetJoin)
    assert (join.rank, join.world, join.world_size, join.address) == (0, 2, 3, "")
    assert join.begin.handle == "2@8"
    assert story.machine.retries.num == 1


def test_workers_that_offer_nothing_are_killed_after_a_while() -> None:
    story = Story()
    trained(story, 7)
    story.lose(1)
    story.offer(0, 7)
    story.wait(RULES.settle_s + 0.01)
    assert story.of(KillWorker) == [KillWorker(0), KillWorker(2)]
    story.wait(RULES.kill_timeout_s + 0.01)  # their ends are not seen, as on a lost node
    assert story.of(ReportLeftAlone) == [ReportLeftAlone(0, 0), ReportLeftAlone(2, 2)]
    assert story.of(StartWorker) == [StartWorker(3, 0)]  # what they hold is not free


def test_a_frozen_worker_is_killed_also_when_the_others_have_gone() -> None:
    story = Story()
    trained(story, 7)
    for _ in range(11):
        story.wait(0.5)
        story.train([0, 1], 7)
    assert story.machine.phase is RunPhase.ENDING
    story.lose(2)
    story.lose(1)
    assert story.machine.phase is RunPhase.ENDING
    for _ in range(11):  # the last one, too
        story.wait(0.5)
        if story.of(KillWorker):
            break
    assert story.of(KillWorker) == [KillWorker(0)]


def test_nobody_is_left_and_the_newest_state_is_taken() -> None:
    story = Story()
    trained(story, 7)
    story.checkpoint = KnownState(source=StateSource.CHECKPOINT, step=5, checkpoint="c")
    for worker in (0, 1, 2):
        story.lose(worker)
    story.form(step=5)
    (formed,) = story.of(ReportFormed)
    assert formed.state == story.checkpoint
    assert story.machine.best_step == 5


def test_without_a_checkpoint_the_held_state_is_taken() -> None:
    story = Story()
    trained(story, 7)
    story.do("hold_state", KnownState(source=StateSource.HELD, step=6, handle="h"))
    story.do("hold_state", KnownState(source=StateSource.HELD, step=3, handle="old"))
    assert story.orders == [DropHandle("old")]
    story.end_all()
    story.do("started", story.of(StartWorker)[0].worker)
    assert story.of(LetJoin)[0].begin.handle == "h"


def known(source: StateSource, place: tuple[int, int, int], handle: str) -> KnownState:
    step, epoch, num_samples = place
    return KnownState(source=source, step=step, epoch=epoch, num_samples=num_samples, handle=handle)


BEFORE_THE_END, AT_THE_END = (7, 0, 28), (7, 1, 0)  # of a pass


def test_a_late_report_does_not_replace_what_a_worker_has_offered() -> None:
    story = Story()
    trained(story, 7)
    story.lose(2)
    story.do("offered", 0, known(StateSource.PEER, AT_THE_END, "offered"))
    story.do("hold_state", known(StateSource.HELD, AT_THE_END, "late"))
    assert story.orders == [DropHandle("late")]
    story.end_all()
    story.form(step=7)
    (formed,) = story.of(ReportFormed)
    assert (formed.state.source, formed.state.handle) == (StateSource.PEER, "offered")


@pytest.mark.parametrize("num_formings", [1, 2])
def test_what_a_worker_has_offered_is_its_own_until_somebody_trains(num_formings: int) -> None:
    story = Story()
    trained(story, 7)
    story.lose(2)
    story.offer(0, 7)
    story.end_all()
    for _ in range(num_formings):  # the next workers are lost before all have joined
        assert not story.of(FindCheckpoint)
        first, *_ = story.of(StartWorker)
        story.do("started", first.worker)
        story.lose(first.worker)
        story.end_all()
    workers = story.form(step=7)
    (formed,) = story.of(ReportFormed)
    assert (formed.state.source, formed.state.handle) == (StateSource.PEER, "0@7")
    # All that train are lost: it is what the trainer has left now.
    story.train(workers, 8)
    story.end_all()
    assert story.of(FindCheckpoint)
    story.form(step=7)
    (formed,) = story.of(ReportFormed)
    assert (formed.state.source, formed.state.handle) == (StateSource.HELD, "0@7")


def why_not_peer(story: Story) -> str:
    """Why the next workers go on from what the trainer holds."""
    story.end_all()
    story.form(step=5)
    (formed,) = story.of(ReportFormed)
    assert formed.state.source is StateSource.HELD
    return str(formed.why_not_peer)


def held_story() -> Story:
    story = Story()
    trained(story, 7)
    story.do("hold_state", KnownState(source=StateSource.HELD, step=5, handle="held"))
    story.lose(2)
    return story


def test_why_no_state_of_a_worker_that_lived_was_taken() -> None:
    ended = held_story()
    ended.lose(0, "its process ended")
    assert why_not_peer(ended) == (
        "worker 0 ended before it offered one (its process ended); "
        "worker 1 ended before it offered one (killed)"
    )
    late = held_story()
    late.beat_for(RULES.offer_timeout_s + 0.2)
    assert why_not_peer(late).startswith("worker 0 offered none in 20")
    older = held_story()
    older.offer(0, 4)
    assert "worker 0 offered that of step 4, and that of step 5 is here" in why_not_peer(older)


def test_why_a_state_was_not_taken_belongs_to_one_incident() -> None:
    story = held_story()
    for _ in range(2):
        assert why_not_peer(story).count("before it offered one") == 2, "of the two that were left"
    story = held_story()
    story.offer(0, 7)
    story.end_all()
    story.form(step=7)
    (formed,) = story.of(ReportFormed)
    assert (formed.state.source, formed.why_not_peer) == (StateSource.PEER, ""), "one was"


@pytest.mark.parametrize("is_offered_first", [True, False])
def test_a_state_that_is_further_at_the_same_step_is_taken(is_offered_first: bool) -> None:
    """The last step of a pass is done before the pass has ended."""
    story = Story()
    trained(story, 7)
    story.lose(2)
    offer = "offered", 0, known(StateSource.PEER, BEFORE_THE_END, "offered")
    report = "hold_state", known(StateSource.HELD, AT_THE_END, "reported")
    for what in (offer, report) if is_offered_first else (report, offer):
        story.do(*what)
    assert DropHandle("offered") in story.orders
    story.checkpoint = KnownState(source=StateSource.CHECKPOINT, step=9, checkpoint="c")
    story.end_all()
    story.form(step=7)
    (formed,) = story.of(ReportFormed)
    assert formed.state.handle == "reported"
    assert formed.state.source is (StateSource.PEER if is_offered_first else StateSource.HELD)


def test_a_state_that_was_loaded_is_older_than_a_checkpoint() -> None:
    story = Story()
    trained(story, 7)
    for worker in (0, 1, 2):
        story.do("finished", worker, 7)
    story.checkpoint = KnownState(source=StateSource.CHECKPOINT, step=7, checkpoint="c")
    story.do("replace_state", KnownState(source=StateSource.GIVEN, step=2, handle="g"))
    assert story.orders == [LetEnd(0), LetEnd(1), LetEnd(2)]
    story.running.clear()
    story.begin_command()
    story.do("started", story.of(StartWorker)[0].worker)
    assert story.of(LetJoin)[0].begin.handle == "g"


def test_a_loss_explains_the_collective_that_failed_before_it_was_noticed() -> None:
    story = Story()
    trained(story, 7)
    story.fail(0, "RuntimeError", is_peers=True)
    assert story.of(ReportBroken)[0].cause is IncidentCause.COLLECTIVE
    story.lose(1)
    (broken,) = story.of(ReportBroken)
    assert (broken.cause, broken.explains) == (IncidentCause.LOST, True)
    story.end_all()
    assert story.machine.retries.num == 1


# -- retries -------------------------------------------------------------------------------------


def test_all_workers_that_are_lost_at_once_are_reported_in_one_incident() -> None:
    story = Story()
    first, second, third = trained(story, 7)
    story.lose(first, "SIGKILL")
    assert [each.rank for each in story.of(ReportBroken)] == [0]
    story.lose(second, "SIGKILL")
    (report,) = story.of(ReportBroken)
    assert (report.rank, report.cause, report.explains) == (1, IncidentCause.LOST, False)
    story.offer(third, 7)
    story.lose(third, "ended")  # in order
    assert not story.of(ReportBroken)
    assert story.of(ReportFormed) == []


def test_no_retry_is_left() -> None:
    story = Story()
    trained(story, 7, max_retries=0)
    story.lose(1)
    story.offer(0, 7)
    story.end_all()
    assert story.orders[-1] == EndCommand(reason="worker 1: killed")
    assert story.machine.phase is RunPhase.IDLE
    assert story.machine.held.handle == "0@7"  # the next command goes on with it
    story.begin_command()
    assert not story.of(FindCheckpoint)


def test_what_breaks_in_one_restart_is_one_incident_until_it_is_too_much() -> None:
    story = Story()
    trained(story, 7, max_retries=1)
    story.lose(1)
    story.end_all()
    for _ in range(MAX_FORMINGS - 1):
        (first, *_) = [order.worker for order in story.of(StartWorker)]
        story.lose(first)
        story.end_all()
        assert story.machine.retries.num == 1
    (first, *_) = [order.worker for order in story.of(StartWorker)]
    story.lose(first)
    story.end_all()
    assert isinstance(story.orders[-1], EndCommand)


def test_starts_that_fail_in_a_row_are_repeated_less_and_less_often() -> None:
    story = Story()
    story.begin_command(max_retries=UNLIMITED)
    pauses = []
    for _ in range(6):
        started = [order.worker for order in story.of(StartWorker)]
        assert started
        story.lose(started[0])
        story.end_all()
        before = story.now
        while not story.of(StartWorker):
            deadline = story.machine.next_deadline()
            assert deadline is not None
            story.now = deadline
            story.do("tick")
        pauses.append(story.now - before)
    assert pauses == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0]


def test_progress_that_only_an_offered_state_shows_counts() -> None:
    story = Story()
    workers = trained(story, 1, max_retries=1, reset_after=4)
    for step in (1, 6):
        story.lose(workers[0])
        for worker in workers[1:]:
            story.offer(worker, step)
        story.end_all()
        workers = story.form(step)
    assert story.machine.retries.num == 1


@pytest.mark.parametrize("max_retries", [UNLIMITED, 5])
def test_the_same_error_at_the_same_step_ends_early(max_retries: int) -> None:
    story = Story()
    trained(story, 7, max_retries=max_retries)
    story.fail(1)
    assert story.of(LetAbandon)[1].worker == 1  # it may have a state, too
    story.offer(0, 7)
    story.end_all()
    workers = story.form(step=7)
    story.fail(workers[2])
    story.end_all()
    (end,) = story.of(EndCommand)
    assert end.is_repeated
    assert (end.error.kind, end.error.step) == ("ValueError", 7)


def test_restarts_that_never_get_beyond_a_step_end_it() -> None:
    story = Story(replace(RULES, max_restarts_without_progress=2))
    workers = trained(story, 7, max_retries=UNLIMITED)
    for num_restarts in range(3):
        assert story.machine.retries.num == num_restarts
        story.lose(workers[0])
        story.end_all()
        if num_restarts < 2:
            assert not story.of(EndCommand)
            workers = story.form(step=5)  # from a checkpoint
            story.train(workers, 7)
    (end,) = story.of(EndCommand)
    assert end.is_final
    assert end.reason == "2 restarts in a row have not got beyond step 7: worker 0: killed"


def test_restarts_that_get_beyond_a_step_go_on() -> None:
    story = Story(replace(RULES, max_restarts_without_progress=1))
    workers = trained(story, 7, max_retries=UNLIMITED)
    for step in range(8, 14):
        story.lose(workers[0])
        story.end_all()
        workers = story.form(step=5)
        story.train(workers, step)
    assert story.machine.retries.num == 6


@pytest.mark.parametrize(("kind", "step"), [("KeyError", 7), ("ValueError", 8)])
def test_another_error_is_tried_again(kind: str, step: int) -> None:
    story = Story()
    trained(story, 7)
    story.fail(1)
    story.end_all()
    workers = story.form()
    story.train(workers, step)
    story.fail(workers[0], kind)
    story.end_all()
    assert story.of(StartWorker)
    assert story.machine.retries.num == 2


def test_progress_makes_retries_count_anew() -> None:
    retries = Retries(RetryBudget(max_retries=1, reset_after=10), step=0)
    assert retries.spend(5)
    retries.record_step(14)
    assert not retries.spend(14)
    retries.record_step(15)
    assert retries.spend(15)


@pytest.mark.parametrize("values", [{"max_retries": -2}, {"reset_after": 0}])
def test_budgets_that_cannot_work(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        RetryBudget(**values)


@pytest.mark.parametrize(
    "values",
    [{"num_workers": 0}, {"min_workers": 4}, {"min_workers": 0}, {"settle_s": 0.0}],
)
def test_rules_that_cannot_work(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RetryRules(**{"num_workers": 3, **values})


# -- states that cannot be loaded ----------------------------------------------------------------


def checkpoint(step: int) -> KnownState:
    return KnownState(source=StateSource.CHECKPOINT, step=step, checkpoint=f"at-{step}")


def begun(story: Story) -> list[KnownState | None]:
    """The states with which workers were sent to join last."""
    return [order.begin for order in story.of(LetJoin)]


def test_a_checkpoint_that_cannot_be_loaded_gives_way_to_the_one_before_and_costs_nothing() -> None:
    story = Story()
    story.checkpoint = newest = checkpoint(9)
    story.begin_command(max_retries=0)
    story.do("started", 0)
    assert begun(story) == [newest]
    story.checkpoint = older = checkpoint(6)
    story.refuse(0)
    assert story.of(RejectState) == [RejectState(newest, "unfit")]
    assert [order.worker for order in story.of(KillWorker)] == [0, 1, 2]
    assert not story.of(LetAbandon)  # nobody has another state
    story.refuse(1)
    assert story.orders == []
    story.end_all()
    story.form(step=6)
    assert story.machine.held == older
    assert story.machine.retries.num == 0
    assert not story.of(ReportBroken)


def test_the_error_is_reported_if_no_checkpoint_can_be_loaded() -> None:
    story = Story()
    story.checkpoint = newest = checkpoint(9)
    story.begin_command(max_retries=-1)
    story.checkpoint = None
    story.refuse(0)
    story.end_all()
    (end,) = story.of(EndCommand)
    assert end.error.message == "unfit"
    assert story.machine.held == newest  # the next command does not begin at the start


def test_a_state_in_memory_that_was_deleted_gives_way_to_a_checkpoint_or_the_start() -> None:
    story = Story()
    workers = trained(story, 7)
    story.lose(workers[0])
    story.offer(1, 7)
    story.end_all()
    story.checkpoint = older = checkpoint(4)
    worker = story.of(StartWorker)[0].worker
    story.do("started", worker)
    story.refuse(worker)
    assert story.of(DropHandle) == [DropHandle("1@7")]
    story.end_all()
    workers = story.form(step=4)
    assert (story.machine.held, story.machine.best_step) == (older, 4)
    story.do("hold_state", KnownState(source=StateSource.HELD, step=5, handle="held"))
    story.checkpoint = None
    story.end_all()
    worker = story.of(StartWorker)[0].worker
    story.refuse(worker)
    story.end_all()
    story.form(step=0)
    assert story.machine.held.source is StateSource.START
    assert story.machine.retries.num == 2  # the two losses


def test_a_state_that_the_user_gave_is_never_replaced_by_the_start() -> None:
    story = Story()
    given = KnownState(source=StateSource.GIVEN, step=3, handle="given")
    story.do("replace_state", given)
    story.begin_command(max_retries=-1)
    story.refuse(0)
    story.end_all()
    (end,) = story.of(EndCommand)
    assert end.error.refuses_state
    assert story.machine.held == given


def test_a_program_that_finds_out_late_goes_back_to_the_checkpoint_before() -> None:
    """A training function loads its state after all have joined."""
    story = Story()
    story.checkpoint = checkpoint(9)
    story.begin_command(max_retries=0)
    workers = story.form(step=9)
    story.checkpoint = checkpoint(6)
    story.refuse(workers[1])
    assert [order.worker for order in story.of(KillWorker)] == workers
    story.end_all()
    workers = story.form(step=6)
    story.train(workers, 7)
    story.refuse(workers[0])  # others could load it: this is another error
    assert not story.of(RejectState)
    assert story.of(ReportBroken)


@pytest.mark.parametrize("rules", [RULES, PER_STEP])
def test_an_error_that_would_come_again_ends_the_command_at_once(rules: RetryRules) -> None:
    story = Story(rules)
    workers = trained(story, 7)
    error = ProgramError(kind="ConfigError", message="", step=7, is_peers=False, is_final=True)
    story.do("failed", workers[1], error)
    assert [order.worker for order in story.of(LetAbandon)] == workers
    story.offer(0, 7)
    story.end_all()
    (end,) = story.of(EndCommand)
    assert (end.error, end.is_repeated) == (error, False)
    assert story.machine.held.step == 7


# -- resources -----------------------------------------------------------------------------------


def test_pauses_double_up_to_the_longest_and_jitter_shortens_them() -> None:
    story = Story(replace(RULES, max_pause_s=2.0, resources_timeout_s=1000.0), num_startable=0)
    pauses = []
    story.begin_command()
    for _ in range(5):
        pauses += [order.pause_s for order in story.of(ReportNoResources)]
        story.wait(pauses[-1])
    assert pauses == [0.5, 1.0, 2.0, 2.0, 2.0]
    machine = RetryMachine(RULES, 0.0)
    machine.begin_command(RetryBudget(), 0.0)
    shorter = [
        each for each in machine.resources_found(0, 0.0, 1.0) if isinstance(each, ReportNoResources)
    ]
    assert shorter == [ReportNoResources(0, 1, 0.25)]


def test_waiting_too_long_costs_retries() -> None:
    story = Story(replace(RULES, max_pause_s=2.0, resources_timeout_s=10.0), num_startable=0)
    story.begin_command(max_retries=1)
    story.wait(12.0)
    assert story.machine.retries.num == 1
    story.wait(12.0)
    (end,) = story.of(EndCommand)
    assert end.reason == "no resources for 1 workers"


def test_fewer_workers_train_and_more_come_with_the_next_command() -> None:
    story = Story(num_startable=2)
    story.begin_command(max_retries=0)
    workers = story.form()
    assert len(workers) == 2
    story.do("reported", 0, 1)
    assert story.orders == []  # it is too early to look
    for worker in workers:
        story.do("finished", worker, 4)
    story.num_startable = 5
    story.begin_command(max_retries=0)
    assert [order.worker for order in story.of(LetAbandon)] == workers
    story.offer(0, 4)
    story.end_all()
    assert len(story.of(StartWorker)) == 3
    assert story.machine.retries.num == 0


def test_a_report_lets_the_run_grow() -> None:
    story = Story(num_startable=2)
    story.begin_command(max_retries=0)
    workers = story.form()
    story.num_startable = 3
    for _ in range(11):
        story.wait(0.5)
        story.train(workers, 1)
    story.do("reported", 0, 1)
    assert story.of(ReportBroken)[0].remedy is Remedy.GROW
    story.lose(1)
    story.offer(0, 1)
    story.lose(0)
    assert len(story.of(StartWorker)) == 3
    assert story.machine.retries.num == 0


def test_growing_that_loses_all_states_costs_a_retry() -> None:
    story = Story(num_startable=2)
    story.begin_command(max_retries=1)
    workers = story.form()
    for worker in workers:
        story.do("finished", worker, 4)
    story.num_startable = 3
    story.begin_command(max_retries=1)
    story.end_all()
    assert story.machine.retries.num == 1


def test_too_few_resources_for_the_least_number() -> None:
    story = Story(replace(RULES, min_workers=2), num_startable=1)
    story.begin_command()
    assert story.of(ReportNoResources) == [ReportNoResources(1, 2, 0.5)]
    assert story.of(RequestWorkers) == [RequestWorkers(3)]
    story.num_startable = 2
    story.wait(0.5)
    assert len(story.of(StartWorker)) == 2


# -- per-step ------------------------------------------------------------------------------------


def test_a_lost_worker_is_replaced_while_the_others_train() -> None:
    story = Story(PER_STEP)
    workers = trained(story, 7, max_retries=0)
    story.train(workers, 8)
    story.lose(1)
    assert story.of(ReportBroken)[0].remedy is Remedy.REPLACE
    assert story.of(StartWorker) == [StartWorker(3, 1)]
    assert not story.of(LetAbandon)
    story.do("started", 3)
    (join,) = story.of(LetJoin)
    assert (join.rank, join.world_size, join.begin) == (1, 3, None)
    story.do("joined", 3, 1, 0)
    assert story.of(SendCommand) == [SendCommand(3)]
    story.train([0, 2, 3], 9)
    for worker in (0, 2, 3):
        story.do("finished", worker, 9)
    assert story.orders == [EndCommand()]


def stand_by(story: Story, spare: int) -> None:
    """The spare that was started has made its model, and waits for a place."""
    story.do("started", spare)
    (join,) = story.of(LetJoin)
    assert (join.is_spare, join.begin) == (True, None)
    story.do("joined", spare, 1, 0)
    assert story.of(SendCommand) == [SendCommand(spare)]


def with_spare(**rules: Any) -> Story:
    """Two workers train at step 7, and worker 2 stands by."""
    story = Story(replace(PER_STEP, num_workers=2, num_spares=1, **rules))
    story.begin_command(max_retries=0)
    assert story.form() == [0, 1]
    assert story.of(StartWorker) == [StartWorker(2, 2)]
    story.train([0, 1], 7)
    stand_by(story, 2)
    return story


def test_a_spare_takes_a_lost_workers_place_and_another_one_stands_by() -> None:
    story = with_spare()
    assert (story.machine.num_ready(), story.machine.num_spares()) == (2, 1)
    story.lose(1)
    assert story.of(ReportBroken)[0].remedy is Remedy.REPLACE
    assert story.of(StartWorker) == [StartWorker(3, 3)]  # a spare, as its rank shows
    story.train([2], 0)
    assert not story.orders  # it has no place yet, as far as anybody knows
    story.train([0, 2], 8)
    assert story.of(ReportPlaceFilled) == [ReportPlaceFilled(2, 1)]
    assert (story.machine.num_ready(), story.machine.num_spares()) == (2, 0)
    stand_by(story, 3)
    story.lose(0)
    assert not story.of(EndCommand), "worker 2 has the state"
    story.train([2, 3], 9)
    assert story.of(ReportPlaceFilled) == [ReportPlaceFilled(3, 0)]


def test_a_spare_that_stands_by_is_not_waited_for_and_stays() -> None:
    story = with_spare()
    for worker in (0, 1):
        story.do("finished", worker, 8)
    assert story.orders == [EndCommand()]
    story.begin_command(leader_only=True, trains=False)
    assert story.of(SendCommand) == [SendCommand(0)]
    assert story.machine.num_spares() == 1
    story.do("finished", 0, 8)
    story.begin_command()
    assert story.of(SendCommand) == [SendCommand(0), SendCommand(1), SendCommand(2)]
    assert not story.of(StartWorker)


def test_a_spare_of_a_training_function_ends_with_the_command() -> None:
    story = with_spare(ends_spares=True)
    for worker in (0, 1):
        story.do("finished", worker, 8)
    assert story.orders == [KillWorker(2), EndCommand()]
    story.lose(2)
    story.begin_command()
    assert story.of(StartWorker) == [StartWorker(3, 2)]


def test_a_lost_spare_is_no_incident_and_is_started_again() -> None:
    story = with_spare()
    story.lose(2)
    assert story.of(ReportSpareLost) == [ReportSpareLost(2, "worker 2: killed")]
    assert not story.of(ReportBroken)
    assert story.of(StartWorker) == [StartWorker(3, 2)]


def test_with_too_few_workers_left_a_spare_does_not_count() -> None:
    story = with_spare(min_workers=2)
    story.lose(1)
    assert story.machine.phase is RunPhase.ENDING
    assert KillWorker(2) in story.orders  # it has no state to offer


def test_a_place_that_nobody_has_had_is_for_an_ordinary_worker() -> None:
    story = Story(replace(PER_STEP, num_workers=2, num_spares=1), num_startable=1)
    story.begin_command()
    assert story.form() == [0]
    story.num_startable = 3
    story.now += 1.0
    story.do("tick")
    assert story.of(StartWorker) == [StartWorker(1, 1), StartWorker(2, 2)]
    story.do("started", 1)
    (join,) = story.of(LetJoin)
    assert not join.is_spare


@pytest.mark.parametrize("keeps_others", [True, False])
def test_spares_that_cannot_work_are_refused(keeps_others: bool) -> None:
    num_spares, sentence = (-1, "spares=-1") if keeps_others else (1, "use 'per-step'")
    with pytest.raises(ConfigError, match=sentence):
        replace(RULES, keeps_others=keeps_others, num_spares=num_spares)


def test_a_replacement_without_a_state_does_not_count() -> None:
    story = Story(replace(PER_STEP, num_workers=2))
    trained(story, 7)
    story.lose(1)
    story.do("started", 2)
    story.do("joined", 2, 1, 0)
    story.train([2], 0)
    story.lose(0)
    assert story.machine.phase is RunPhase.ENDING
    assert story.of(KillWorker) == [KillWorker(2)]
    assert story.of(ReportBroken)[0].remedy is Remedy.RESTART


def test_a_worker_that_is_behind_when_another_one_has_finished_is_lost() -> None:
    """A worker would wait for a quorum with the other one, which trains no more."""
    story = Story(PER_STEP)
    trained(story, 7, max_retries=0)
    story.train([1, 2], 9)
    story.do("finished", 1, 9)
    story.beat_for(PER_STEP.heartbeat_timeout_s - 0.5)
    assert not story.of(KillWorker)
    story.beat_for(1.0)
    assert story.of(KillWorker) == [KillWorker(0)]
    (broken,) = story.of(ReportBroken)
    assert broken.reason == "worker 0 is at step 7, and others have finished later ones"
    assert not story.of(EndCommand), "worker 2 is at the same step, and may take long to finish"
    story.do("finished", 2, 9)
    assert EndCommand() in story.orders


def test_a_worker_that_reports_its_last_step_late_is_not_behind() -> None:
    story = Story(PER_STEP)
    trained(story, 7, max_retries=0)
    for worker in (1, 2):
        story.do("finished", worker, 9)
    story.beat_for(1.0)
    story.train([0], 9)
    story.beat_for(60.0)
    assert not story.of(KillWorker)
    story.do("finished", 0, 9)
    assert EndCommand() in story.orders


def test_workers_that_train_by_themselves_may_do_fewer_steps() -> None:
    story = Story()
    trained(story, 7)
    story.do("finished", 1, 9)
    story.beat_for(60.0)
    assert not story.of(KillWorker)


def test_a_replacement_that_comes_too_late_is_not_waited_for() -> None:
    story = Story(replace(PER_STEP, num_workers=2))
    trained(story, 7)
    story.lose(1)
    story.do("started", 2)
    story.do("joined", 2, 1, 0)
    story.do("finished", 0, 8)
    assert story.orders == [KillWorker(2), EndCommand()]
    story.lose(2)
    story.begin_command()
    assert SendCommand(0) in story.orders
    assert len(story.of(StartWorker)) == 1


def test_a_replacement_validates_only_with_a_state() -> None:
    story = Story(replace(PER_STEP, num_workers=2))
    story.begin_command(trains=False)
    story.form()
    story.lose(1)
    story.do("started", 2)
    story.do("joined", 2, 1, 0)
    assert story.orders == []
    story.do("finished", 0, 0)
    assert story.of(EndCommand)
    story.begin_command()
    assert story.of(SendCommand) == [SendCommand(0), SendCommand(2)]


def test_fewer_than_the_least_number_start_anew() -> None:
    story = Story(replace(PER_STEP, min_workers=2))
    trained(story, 7)
    story.num_startable = 2
    story.lose(1)
    assert not story.of(LetAbandon)
    story.num_startable = 1
    story.lose(0)
    assert [order.worker for order in story.of(LetAbandon)] == [2]
    story.offer(2, 7)
    story.lose(2)
    assert story.of(ReportNoResources)
    assert story.machine.retries.num == 1


def test_replacements_that_die_are_started_less_and_less_often() -> None:
    story = Story(PER_STEP)
    workers = trained(story, 7, max_retries=0)
    story.lose(1)
    pauses = []
    for _ in range(4):
        (start,) = story.of(StartWorker)
        story.lose(start.worker)
        began_at = story.now
        while not story.of(StartWorker):
            story.wait(0.25)
            story.train(workers[:1] + workers[2:], 8)
            story.do("tick")
            if story.now > began_at + 30:
                pytest.fail("it is not replaced")
            if story.machine._num_started > start.worker + 1:
                break
        pauses.append(story.now - began_at)
        story.orders = [StartWorker(story.machine._num_started - 1, 1)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 4 * pauses[0]
    assert story.machine.phase is RunPhase.TRAINING


def test_an_error_of_the_program_costs_a_retry_and_comes_once() -> None:
    story = Story(PER_STEP)
    workers = trained(story, 7, max_retries=1)
    story.fail(0)
    assert story.of(KillWorker) == [KillWorker(0)]
    assert story.machine.retries.num == 1
    story.fail(workers[1])  # at the same moment: the same incident
    assert story.machine.retries.num == 1
    story.lose(0)
    (start,) = story.of(StartWorker)
    story.do("started", start.worker)
    story.do("joined", start.worker, 1, 0)
    story.train([start.worker], 7)
    story.fail(start.worker)
    story.end_all()
    (end,) = story.of(EndCommand)
    assert end.is_repeated


def test_the_only_worker_of_a_command_is_lost() -> None:
    story = Story(PER_STEP)
    workers = trained(story, 7)
    for worker in workers:
        story.do("finished", worker, 7)
    story.begin_command(leader_only=True, trains=False)
    assert story.orders == [SendCommand(0)]
    story.lose(0)
    assert SendCommand(1) in story.orders
    story.do("finished", 1, 7)
    assert story.of(EndCommand) == [EndCommand()]
