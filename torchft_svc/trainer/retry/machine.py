"""Decides how a trainer goes on when its workers are lost: who is ended, started, and told what.

    idle ── begin ──> waiting ── enough resources ──> forming ── all joined ──> training ── done ─┐
     ^                   ^ └ too few: again later         │                        │              │
     │                   └─────── all ended ─────────── ending <─── a worker is lost, or growth   │
     └─────────────────────── no retry is left ───────────┘ ─────────────────────────────> idle <─┘

Inputs are method calls with ``now``, the instant of a monotonic clock; each returns orders for the
shell, to be carried out one after another. Workers are numbers, each used once.

    machine.begin(budget, now)                  # a command; ends with EndCommand
    machine.found(num, now, jitter)             # answers LookForResources
    machine.joined(worker, world, step, now)    # and so on: what workers said
    machine.tick(now)                           # at next_deadline()
"""

from __future__ import annotations

import math

from torchft_svc.trainer.retry.begin import BeginState
from torchft_svc.trainer.retry.budget import Retries, RetryBudget
from torchft_svc.trainer.retry.incident import MAX_FORMINGS, OpenIncident
from torchft_svc.trainer.retry.members import RetryOrders, RunMembers
from torchft_svc.trainer.retry.orders import (
    DropHandle,
    EndCommand,
    IncidentCause,
    KnownState,
    LetAbandon,
    LetEnd,
    LetJoin,
    LookForResources,
    ProgramError,
    Remedy,
    ReportFormed,
    ReportNoResources,
    RequestWorkers,
    RetryRules,
    SendCommand,
    StateSource,
)
from torchft_svc.trainer.retry.states import KnownWorker, RunChange, RunPhase, WorkerStage

# So many reasons are kept of one incident.
MAX_REASONS = 8


class RetryMachine(RunMembers):
    """The decisions of one trainer, for one command after another."""

    def __init__(self, rules: RetryRules, now: float) -> None:
        super().__init__(rules, now)
        self.retries = Retries()
        self.best_step = 0  # that was completed
        self._world = 0
        self._address = ""
        self._leader_only, self._trains = False, True
        self._wants_look = False  # an IDLE command waits for what resources there are
        self._broken: tuple[IncidentCause, str, int] | None = None  # while idle
        self._open = OpenIncident()
        self._error: ProgramError | None = None  # of the open incident
        self._num_started_at_error = 0
        self._verdict: EndCommand | None = None
        self._begin = BeginState()
        self._why_not_peer: list[str] = []  # why states of workers that ended were not taken
        # Instants of what is to be done in the present phase.
        self._end_by = self._alone_at = self._grow_at = math.inf
        self._waits_since: float | None = None

    @property
    def held(self) -> KnownState:
        """The state to go on from if nobody offers one."""
        return self._begin.held

    # -- the shell's inputs ----------------------------------------------------------------------

    def begin(
        self, budget: RetryBudget, now: float, *, leader_only: bool = False, trains: bool = True
    ) -> RetryOrders:
        """A command is to be carried out by all workers, or by one (``leader_only``).

        ``trains``: workers that have no state yet get it with this command.
        """
        assert self.phase is RunPhase.IDLE
        self._clock.skip_to(now)
        at = self._time(now)
        self._leader_only, self._trains = leader_only, trains
        self.retries = Retries(budget, self.best_step)
        self._error = self._verdict = None
        self._why_not_peer = []
        for worker in self._workers.values():
            worker.heard_at = at
            worker.has_command = worker.is_done = False
            worker.behind_since = math.inf
        if self._broken is not None:
            cause, reason, rank = self._broken
            self._broken = None
            self._orders += self._open.interrupt(Remedy.RESTART, cause, reason, rank)
            self._end_world(RunChange.BEGAN_BROKEN)
        elif not self._workers:
            self._move(RunChange.BEGAN_NEW)
            self._orders.append(LookForResources())
        elif self._num_missing() and trains:
            self._wants_look = True
            self._orders.append(LookForResources())
        else:
            self._carry_on()
        return self._done()

    def found(self, num_startable: int, now: float, jitter: float) -> RetryOrders:
        """So many more workers could be started now; ``jitter`` is drawn from 0 to 1."""
        self._time(now)
        if self.phase is RunPhase.WAITING:
            self._found_for_world(num_startable, jitter)
        elif self._wants_look and num_startable and not self.rules.keeps_others:
            self._wants_look = False
            self._grow(RunChange.BEGAN_BROKEN)
        elif self._wants_look:
            self._wants_look = False
            self._fill(num_startable, jitter)
            self._carry_on()
        elif self.phase in (RunPhase.TRAINING, RunPhase.FORMING):
            if self.rules.keeps_others:
                self._fill(num_startable, jitter)
            elif num_startable and self._num_missing():
                self._grow(RunChange.GROWS)
        return self._done()

    def checkpoint_found(self, state: KnownState | None, now: float) -> RetryOrders:
        """The newest good checkpoint of this run; None: there is none."""
        self._time(now)
        if self._begin.refusal is None:
            self._orders += self._begin.found(state)
        else:
            self._fall_back(self._begin.refusal, state)
        return self._done()

    def replace_state(self, state: KnownState, now: float) -> RetryOrders:
        """Begin the next world with ``state``, which may be an older one; workers end.

        Called while no command is carried out.
        """
        assert self.phase is RunPhase.IDLE
        self._time(now)
        self._orders += self._begin.settle(state)
        self.best_step = state.step
        return self.dismiss(now)

    def hold(self, state: KnownState, now: float) -> RetryOrders:
        """The shell has this state, which is at least as new as the one before."""
        self._time(now)
        is_ending = self.phase is RunPhase.ENDING
        hold = self._begin.reported if is_ending else self._begin.hold_newer
        self._orders += hold(state)
        return self._done()

    def interrupt(self, reason: str, now: float, *, waits: bool = True) -> RetryOrders:
        """The user wants the command to end; a state that is offered is kept if it ``waits``."""
        self._time(now)
        self._verdict = EndCommand(reason=reason)
        if self.phase is RunPhase.WAITING:
            self._give_up()
        elif self.phase in (RunPhase.FORMING, RunPhase.TRAINING):
            self._end_world(RunChange.BROKE)
        if not waits and self.phase is RunPhase.ENDING:
            self._leave_alone(*self._workers)
            self._ended()
        return self._done()

    def dismiss(self, now: float) -> RetryOrders:
        """The workers are not needed any more; called while no command is carried out."""
        self._time(now)
        for number, worker in self._workers.items():
            if worker.counts:
                worker.stage = WorkerStage.LEAVING
                self._orders.append(LetEnd(number))
        self._workers.clear()
        self._broken = None
        return self._done()

    # -- what workers said -----------------------------------------------------------------------

    def started(self, worker: int, now: float) -> RetryOrders:
        """It runs, and has created what it trains."""
        found = self._heard(worker, now)
        if found is not None and found.stage is WorkerStage.STARTING:
            found.move(WorkerStage.STARTED, self._at)
            if self.phase in (RunPhase.TRAINING, RunPhase.IDLE):
                self._let_join(worker, found, None)
            elif self.phase is RunPhase.FORMING:
                self._form()
        return self._done()

    def store_opened(self, worker: int, world: int, address: str, now: float) -> RetryOrders:
        """It hosts the store of ``world``."""
        found = self._heard(worker, now)
        if found is not None and world == self._world and self.phase is RunPhase.FORMING:
            self._address = address
            self._form()
        return self._done()

    def joined(self, worker: int, world: int, step: int, now: float) -> RetryOrders:
        """It is in ``world``, with the state of ``step``."""
        found = self._heard(worker, now)
        if found is None or found.stage is not WorkerStage.JOINING or world != self._world:
            return self._done()
        found.move(WorkerStage.JOINED, self._at)
        found.step = step
        if self.phase is RunPhase.TRAINING:
            if self._trains:
                self._send_command(worker, found)
        elif self.phase is RunPhase.FORMING:
            found.has_state = True
            if all(each.stage is WorkerStage.JOINED for each in self._alive().values()):
                self._formed(step)
        return self._done()

    def progressed(self, worker: int, step: int, now: float) -> RetryOrders:
        """It has completed ``step`` steps, and lives."""
        found = self._heard(worker, now)
        if found is not None and found.stage in (WorkerStage.JOINED, WorkerStage.FAILED):
            self._reach(found, step)
        return self._done()

    def reported(self, worker: int, step: int, now: float) -> RetryOrders:
        """Its program has reported something: a good moment to grow."""
        found = self._heard(worker, now)
        if found is not None and found.stage is WorkerStage.JOINED:
            self._reach(found, step)
            may_grow = not self.rules.keeps_others and self.phase is RunPhase.TRAINING
            if may_grow and self._num_missing() and self._at >= self._grow_at:
                self._grow_at = self._at + self.rules.grow_every_s
                self._orders.append(LookForResources())
        return self._done()

    def offered(self, worker: int, state: KnownState, now: float) -> RetryOrders:
        """It offers its state, and ends."""
        found = self._heard(worker, now)
        if found is not None and state.place < self.held.place:
            self._note_why_not_peer(
                f"worker {found.rank} offered that of step {state.step}, and that of step "
                f"{self.held.step} is here"
            )
        if state.step < self.held.step or (found is None and self.phase is not RunPhase.ENDING):
            self._orders.append(DropHandle(state.handle))
        else:
            self._orders += self._begin.offered(state)
            self.best_step = max(self.best_step, state.step)
            self.retries.reach(self.best_step)
        if found is not None:
            found.has_offered = True
            if self.phase is RunPhase.ENDING:
                self._end_by = min(self._end_by, self._at + self.rules.settle_s)
        return self._done()

    def finished(self, worker: int, step: int, now: float) -> RetryOrders:
        """It has carried out the command."""
        found = self._heard(worker, now)
        if found is not None and found.stage is WorkerStage.JOINED and found.has_command:
            self._reach(found, step)
            found.is_done = found.has_state = True
            if self.phase is RunPhase.TRAINING:
                self._finish_if_done()
        return self._done()

    def failed(self, worker: int, error: ProgramError, now: float) -> RetryOrders:
        """Its program raised ``error``."""
        found = self._heard(worker, now)
        if found is None or not found.counts:
            return self._done()
        found.move(WorkerStage.FAILED, self._at)
        cause = IncidentCause.COLLECTIVE if error.is_peers else IncidentCause.PROGRAM
        reason = f"{error.kind}: {error.message}" if error.message else error.kind
        is_forming = self.phase is RunPhase.FORMING
        is_running = is_forming or self.phase is RunPhase.TRAINING
        if is_running and self._begin.refuses(error, 0 if is_forming else self.best_step):
            self._orders += self._begin.refuse(error)
            return self._done()
        if not error.is_peers:
            self._error = error
        if error.is_final and is_running:
            self._verdict = EndCommand(reason=reason, error=error)
            self._orders += self._open.interrupt(Remedy.RESTART, cause, reason, found.rank)
            self._end_world(RunChange.BROKE)
        if self.phase is RunPhase.TRAINING and self._can_go_on() and not error.is_peers:
            self._judge_program(worker, found, error, reason)
        if self._verdict is None:
            self._break(found, cause, reason)
        if self.phase in (RunPhase.FORMING, RunPhase.TRAINING):  # the others have the state
            self._kill(worker, found)
        return self._done()

    def lost(self, worker: int, reason: str, now: float) -> RetryOrders:
        """It has ended."""
        self._time(now)
        found = self._workers.pop(worker, None)
        if found is None:
            return ()
        if found.stage is WorkerStage.LEAVING and not found.has_offered:
            self._note_why_not_peer(f"worker {found.rank} ended before it offered one ({reason})")
        if found.counts:
            self._break(found, IncidentCause.LOST, f"worker {found.rank}: {reason}")
        elif found.stage is WorkerStage.LEAVING and not found.has_offered and self._open.is_loss:
            self._orders += self._open.merge(
                IncidentCause.LOST, f"worker {found.rank}: {reason}", found.rank
            )
        if self.phase is RunPhase.ENDING and not self._workers:
            self._ended()
        elif self.rules.keeps_others and self.phase in (RunPhase.FORMING, RunPhase.TRAINING):
            self._look_for_missing()
        return self._done()

    def tick(self, now: float) -> RetryOrders:
        """Time has passed; call it at `next_deadline`, or more often."""
        at = self._time(now)
        if self.phase is RunPhase.ENDING:
            self._tick_ending(at)
        elif self.phase is not RunPhase.IDLE:
            for number, worker in list(self._workers.items()):
                if at >= worker.silent_at(self.rules):
                    self._give_up_on(number, worker)
            if at >= self._look_at:
                self._look_at = math.inf
                self._orders.append(LookForResources())
        return self._done()

    def next_deadline(self) -> float | None:
        """When to `tick`, on the clock of ``now``; may be too early, never too late."""
        if self.phase is RunPhase.IDLE:
            return None
        instants = [self._look_at]
        is_ending = self.phase is RunPhase.ENDING
        if is_ending:
            instants += [self._end_by, self._alone_at]
        for worker in self._workers.values():
            if not is_ending or worker.stage is WorkerStage.LEAVING:
                instants.append(worker.silent_at(self.rules))
        return self._clock.look_by(min(instants))

    # -- a world ---------------------------------------------------------------------------------

    def _found_for_world(self, num: int, jitter: float) -> None:
        num = min(num, self.rules.num_workers)
        if num >= self.rules.min_workers:
            self._waits_since, self._num_pauses, self._look_at = None, 0, math.inf
            self._orders.append(RequestWorkers(self.rules.num_workers - num))
            self._move(RunChange.ENOUGH)
            self._start_world(num)
            return
        if self._waits_since is None:
            self._waits_since = self._at
        if self._at >= self._waits_since + self.rules.resources_timeout_s:
            self._waits_since = self._at
            reason = f"no resources for {self.rules.min_workers} workers"
            self._orders += self._open.interrupt(
                Remedy.RESTART, IncidentCause.NO_RESOURCES, reason, None
            )
            if not self._spend(None):
                self._give_up()
                return
        pause_s = self._pause(jitter)
        self._orders += [
            RequestWorkers(self.rules.num_workers),
            ReportNoResources(num, self.rules.min_workers, pause_s),
        ]

    def _start_world(self, num: int) -> None:
        self._world += 1
        self._address = ""
        self._grow_at = self._at + self.rules.grow_every_s
        self._orders += self._begin.begin_world()
        for rank in range(num):
            self._start(rank)

    def _form(self) -> None:
        """Let those join that can."""
        alive = self._alive()
        if self.rules.keeps_others:  # the first quorum has all of them
            if any(each.stage is WorkerStage.STARTING for each in alive.values()):
                return
            for number, worker in alive.items():
                if worker.stage is WorkerStage.STARTED:
                    self._let_join(number, worker, self._begin.of_world)
            return
        for number, worker in alive.items():
            if worker.stage is WorkerStage.STARTED and (worker.rank == 0 or self._address):
                self._let_join(number, worker, self._begin.of_world)

    def _let_join(self, number: int, worker: KnownWorker, begin: KnownState | None) -> None:
        worker.move(WorkerStage.JOINING, self._at)
        size = self.rules.num_workers if self.rules.keeps_others else len(self._alive())
        self._orders.append(
            LetJoin(
                worker=number,
                world=self._world,
                rank=worker.rank,
                world_size=size,
                address="" if worker.rank == 0 else self._address,
                begin=begin,
            )
        )

    def _formed(self, step: int) -> None:
        self._move(RunChange.FORMED)
        self._num_failed_starts = 0
        self.best_step = step
        self.retries.begin_at(step)
        begin = self._begin.of_world
        is_first = self._open.cause is None
        why_not_peer = "" if begin.source is StateSource.PEER else "; ".join(self._why_not_peer)
        self._orders.append(ReportFormed(begin, step, len(self._alive()), is_first, why_not_peer))
        self._why_not_peer = []
        self._open.close()
        for worker in self._alive().values():
            worker.from_step = step
        if self.rules.keeps_others:
            self._look_for_missing()
        self._carry_on()

    def _carry_on(self) -> None:
        """Send the command to those who are ready."""
        if self.phase is RunPhase.IDLE:
            self._move(RunChange.BEGAN_WHOLE)
        ready = [(each.rank, n) for n, each in self._alive().items() if self._may_do(each)]
        for _, number in sorted(ready)[: 1 if self._leader_only else None]:
            self._send_command(number, self._workers[number])

    def _may_do(self, worker: KnownWorker) -> bool:
        return worker.stage is WorkerStage.JOINED and (worker.has_state or self._trains)

    def _send_command(self, number: int, worker: KnownWorker) -> None:
        if not worker.has_state:
            worker.from_step = self.best_step
        worker.has_command, worker.is_done = True, False
        self._orders.append(SendCommand(number))

    def _finish_if_done(self) -> None:
        asked = {n: each for n, each in self._alive().items() if each.has_command}
        if not any(each.is_done for each in asked.values()):
            if not asked:  # the only one that was asked is lost
                self._carry_on()
            return
        late = {n: each for n, each in asked.items() if not (each.is_done or each.has_state)}
        if any(not each.is_done for n, each in asked.items() if n not in late):
            self._note_behind(asked.values())
            return
        for number, worker in late.items():  # nobody is left whose state it could get
            self._kill(number, worker)
        self._look_at = math.inf
        self._move(RunChange.DONE)
        self._orders.append(EndCommand())

    def _end_world(self, change: RunChange, *, offers: bool = True) -> None:
        """All workers end; those who have a state offer it before, unless nobody ``offers``."""
        if self.phase is not RunPhase.FORMING:  # else nobody has trained since a state was offered
            self._begin.is_settled = False
        self._move(change)
        reason = self._open.reason or "the command was interrupted"
        self._look_at = math.inf
        self._end_by = self._at + self.rules.offer_timeout_s
        self._alone_at = math.inf
        for number, worker in list(self._workers.items()):
            if worker.stage is WorkerStage.KILLED:
                continue
            if worker.has_state and offers and worker.stage is not WorkerStage.LEAVING:
                worker.move(WorkerStage.LEAVING, self._at)
                self._orders.append(LetAbandon(number, reason))
            else:
                self._kill(number, worker)
        if not self._workers:
            self._ended()

    def _fall_back(self, error: ProgramError, checkpoint: KnownState | None) -> None:
        """Nobody can load the state of this world: begin with another one, or give up."""
        self._end_world(RunChange.BROKE, offers=False)
        orders = self._begin.fall_back(checkpoint)
        if orders is None:
            self._verdict = EndCommand(reason=error.message, error=error)
        else:
            self._orders += orders

    def _tick_ending(self, at: float) -> None:
        for number, worker in self._workers.items():
            end_by = min(self._end_by, worker.silent_at(self.rules))
            if worker.stage is WorkerStage.LEAVING and at >= end_by:
                if not worker.has_offered:
                    waited_s = at - worker.stage_at
                    self._note_why_not_peer(
                        f"worker {worker.rank} offered none in {waited_s:.3g} s"
                    )
                self._kill(number, worker)
        is_killed = all(each.stage is WorkerStage.KILLED for each in self._workers.values())
        if is_killed and self._alone_at == math.inf:
            self._end_by, self._alone_at = math.inf, at + self.rules.kill_timeout_s
        if at >= self._alone_at:
            self._leave_alone(*self._workers)
            self._ended()

    def _note_why_not_peer(self, reason: str) -> None:
        """The state of a worker that lived is not taken; only if no other one's is either."""
        if self.phase is RunPhase.ENDING and not self._begin.is_settled:
            self._why_not_peer = [*self._why_not_peer, reason][-MAX_REASONS:]

    def _ended(self) -> None:
        """No worker is left: go on, or give up."""
        self._end_by = self._alone_at = math.inf
        if self._verdict is None and self._open.cause is not None:
            if self._open.cause is IncidentCause.GROWTH and not self._begin.is_settled:
                self._orders += self._open.merge(
                    IncidentCause.LOST, "all workers ended without a state", None
                )
            error = self._error if self._open.cause is IncidentCause.PROGRAM else None
            if error is not None and self.retries.is_repeated(error):
                self._verdict = EndCommand(reason=self._open.reason, error=error, is_repeated=True)
            elif not self._open.is_spent and self._open.cause is not IncidentCause.GROWTH:
                self._spend(error)
        self._error = None
        if self._verdict is not None:
            self._give_up()
            return
        self._move(RunChange.ALL_ENDED)
        self._look_for_all()

    def _give_up(self) -> None:
        assert self._verdict is not None
        for number, worker in self._workers.items():
            self._kill(number, worker)
        self._open.close()
        self._look_at = math.inf
        self._move(RunChange.GAVE_UP)
        self._orders.append(self._verdict)

    # -- incidents -------------------------------------------------------------------------------

    def _break(self, worker: KnownWorker, cause: IncidentCause, reason: str) -> None:
        """This worker trains no more: decide what becomes of the others."""
        if self.phase is RunPhase.ENDING:
            self._orders += self._open.merge(cause, reason, worker.rank)
        elif self.phase is RunPhase.IDLE:
            is_worse = self._broken is None or cause.weight > self._broken[0].weight
            if is_worse and not self._can_go_on():
                self._broken = cause, reason, worker.rank
        elif self.phase is RunPhase.FORMING:
            self._break_forming(worker, cause, reason)
        elif not self._can_go_on():
            self._orders += self._open.interrupt(Remedy.RESTART, cause, reason, worker.rank)
            self._end_world(RunChange.BROKE)
        else:
            self._num_failed_starts += not worker.has_state
            self._report(Remedy.REPLACE, cause, reason, worker.rank)
            self._finish_if_done()

    def _break_forming(self, worker: KnownWorker, cause: IncidentCause, reason: str) -> None:
        alive = self._alive()
        self._num_failed_starts += 1
        is_hopeless = not alive or self._num_failed_starts > MAX_FORMINGS
        if not self.rules.keeps_others or is_hopeless or cause is IncidentCause.PROGRAM:
            self._orders += self._open.interrupt(Remedy.RESTART, cause, reason, worker.rank)
            self._end_world(RunChange.BROKE)
        elif all(each.stage is WorkerStage.JOINED for each in alive.values()):
            self._formed(max(each.step for each in alive.values()))
        else:
            self._form()

    def _judge_program(
        self, number: int, worker: KnownWorker, error: ProgramError, reason: str
    ) -> None:
        """The program of one worker failed while the others train: it costs a retry."""
        self._error = None
        if self.retries.is_known(error) and number < self._num_started_at_error:
            return  # what it met were the same data, or the same moment
        self._num_started_at_error = self._num_started
        if self.retries.is_repeated(error):
            self._verdict = EndCommand(reason=reason, error=error, is_repeated=True)
        elif self._spend(error, reason):
            return
        self._orders += self._open.interrupt(
            Remedy.RESTART, IncidentCause.PROGRAM, reason, worker.rank
        )
        self._end_world(RunChange.BROKE)

    def _spend(self, error: ProgramError | None, reason: str = "") -> bool:
        """Whether a retry is left; it is spent."""
        if not self.retries.spend(self.best_step):
            told = reason or self._open.reason
            self._verdict = EndCommand(reason=told, error=error)
            return False
        self._open.is_spent = True
        return True

    # -- single workers --------------------------------------------------------------------------

    def _reach(self, worker: KnownWorker, step: int) -> None:
        worker.step = max(worker.step, step)
        if self.rules.keeps_others and step > worker.from_step and not worker.has_state:
            worker.has_state, self._num_failed_starts = True, 0
        self.best_step = max(self.best_step, step)
        self.retries.reach(self.best_step)
        if worker.step == self.best_step:
            worker.behind_since = math.inf

    def _give_up_on(self, number: int, worker: KnownWorker) -> None:
        """It is silent, or did not start or join in time."""
        if worker.stage is WorkerStage.KILLED:
            self._leave_alone(number)
            if self.rules.keeps_others:
                self._look_for_missing()
            return
        did_count, reason = worker.counts, worker.silence(self.rules, self._at)
        self._kill(number, worker)
        if did_count:
            self._break(worker, IncidentCause.SILENT, reason)

    def _grow(self, change: RunChange) -> None:
        reason = f"{self._num_missing()} more workers were asked for"
        self._orders += self._open.interrupt(Remedy.GROW, IncidentCause.GROWTH, reason, None)
        self._end_world(change)
