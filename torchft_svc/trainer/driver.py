"""Executes a trainer's commands: between `RetryMachine`, which decides, and the backend."""

from __future__ import annotations

import logging
import pickle
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchft_svc.coordination import LighthouseServer
from torchft_svc.errors import CheckpointError, TrainingFailed, WorkerFailed
from torchft_svc.trainer.backend import Backend, Lost, Received
from torchft_svc.trainer.checkpoint import Checkpoint, CheckpointStore
from torchft_svc.trainer.history import Rung, RunHistory, Source
from torchft_svc.trainer.messages import (
    Abandon,
    CheckpointWritten,
    Command,
    End,
    Failed,
    Finished,
    Joined,
    JoinWorld,
    Position,
    Progress,
    Reported,
    Started,
    StateHandle,
    StateOffered,
    StoreOpened,
)
from torchft_svc.trainer.retry.budget import ProgramError, RetryBudget
from torchft_svc.trainer.retry.incident import IncidentCause, Remedy, ReportBroken
from torchft_svc.trainer.retry.initial_state import (
    DropHandle,
    FindCheckpoint,
    KnownState,
    RejectState,
    StateSource,
)
from torchft_svc.trainer.retry.machine import (
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
    RetryOrders,
    RetryRules,
    RunPhase,
    SendCommand,
    StartWorker,
)

log = logging.getLogger(__name__)

# Longest wait for messages without a look at the time.
_WAIT_S = 1.0
# Workers that are asked to end leave their world and write their last checkpoint.
_END_S = 30.0
_INTERRUPT_S = 5.0
# The worker that sent the last report, and the position of that.
_NO_REPORT = -1, (-1, -1, -1)
_SOURCES: dict[StateSource, Source] = {
    StateSource.START: "start",
    StateSource.HELD: "trainer",
    StateSource.CHECKPOINT: "checkpoint",
    StateSource.PEER: "peer",
    StateSource.GIVEN: "trainer",  # or a checkpoint that was loaded
}
_RUNGS: dict[Remedy, Rung] = {
    Remedy.REPLACE: "per-step",
    Remedy.GROW: "growth",
    Remedy.RESTART: "restart",
}


class TrainerTask(Protocol):
    """A task for all workers, or for one of them."""

    leader_only: bool
    trains: bool

    def message(self, number: int, worker: int, position: Position) -> Command | None:
        """The command for ``worker``, at the beginning or again after it was replaced.

        ``number`` has to be in it. None: nothing is left to do for this worker.
        """

    def finished(self, worker: int, result: Any) -> None:
        """Record the ``result`` of a worker that has done its part."""

    def restarted(self) -> None:
        """Forget all results: all workers are new ones, and begin again."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The backend, rules, job and resources that a `TrainerDriver` works with."""

    backend: Backend
    rules: RetryRules
    job: bytes
    resources: Mapping[str, float]
    lighthouse_bind: str = "127.0.0.1:0"


class RunObserver:
    """Receives what happens while a task runs; a subclass overrides what it wants."""

    def moved(self, position: Position, num_workers: int) -> None:
        """Training has come to ``position``."""

    def reported(self, position: Position, metrics: Mapping[str, Any]) -> None:
        """The program has reported something."""

    def warned(self, sentence: str) -> None:
        """A user wants to know this."""


class TrainerDriver:
    """Runs one task after another. All calls come from one thread at a time."""

    def __init__(self, parts: RunParts, observer: RunObserver) -> None:
        now = time.monotonic()
        self._parts = parts
        self._backend = parts.backend
        self._observer = observer
        self._machine = RetryMachine(parts.rules, now)
        self.history = RunHistory(now, parts.rules.num_workers)
        self.store: CheckpointStore | None = None  # of this run's checkpoints
        self.position = Position()
        self._foreign: set[str] = set()  # checkpoints in the store that are not this run's
        self._is_continued = False  # all of them are
        self._unexplained = ""  # a collective has failed, and it is not known yet why
        self._lighthouse: LighthouseServer | None = None
        self._task: TrainerTask | None = None
        self._num_tasks = 0
        self._last_report = _NO_REPORT
        self._ended: EndCommand | None = None
        self._stop_reason = ""
        self._unhandled: deque[Received | Lost] = deque()
        self._living: set[int] = set()
        self._received_at: dict[int, float] = {}  # when each worker said something last
        # By rank; replaced as a whole, because other threads may read it.
        self.pids: dict[int, int] = {}
        self._rank_by_worker: dict[int, int] = {}
        self._handlers: dict[type[Any], Callable[[int, Any, float], RetryOrders]] = {
            Progress: self._handle_progress,
            Started: self._handle_started,
            StoreOpened: self._handle_store_opened,
            Joined: self._handle_joined,
            Reported: self._handle_reported,
            CheckpointWritten: self._handle_checkpoint,
            StateOffered: self._handle_offer,
            Finished: self._handle_finished,
            Failed: self._handle_failed,
        }
        self._executors: dict[type[Any], Callable[[Any], RetryOrders | None]] = {
            LookForResources: self._look_for_resources,
            RequestWorkers: self._request_workers,
            FindCheckpoint: self._find_checkpoint,
            RejectState: self._reject_state,
            StartWorker: self._start_worker,
            LetJoin: self._join_worker,
            SendCommand: self._send_command,
            LetAbandon: lambda o: self._backend.send(o.worker, Abandon(reason=o.reason)),
            LetEnd: lambda o: self._backend.send(o.worker, End()),
            KillWorker: lambda o: self._backend.kill(o.worker),
            DropHandle: lambda o: self._backend.drop_state(o.handle),
            ReportBroken: self._report_broken,
            ReportFormed: self._report_formed,
            ReportNoResources: self._report_no_resources,
            ReportLeftAlone: self._report_left_alone,
            ReportPlaceFilled: self._report_place_filled,
            ReportSpareLost: self._report_spare_lost,
            EndCommand: self._end_command,
        }

    # -- what the trainer wants ------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """The number of workers that are ready."""
        return self._machine.num_ready()

    @property
    def num_spares(self) -> int:
        """The number of workers that stand by."""
        return self._machine.num_spares()

    @property
    def num_retries(self) -> int:
        """The number of retries that were spent in this task, and count."""
        return self._machine.retries.num

    @property
    def held(self) -> KnownState:
        """The last state that the trainer knows of."""
        return self._machine.held

    def run_task(self, task: TrainerTask, budget: RetryBudget) -> None:
        """Run ``task`` on the workers, whatever happens to them.

        Raises:
            TrainingFailed: no retry is left.
            Exception: that of the user's program, if that was the last incident.
        """
        self._task, self._ended, self._last_report = task, None, _NO_REPORT
        self._num_tasks += 1
        try:
            self._receive_events(0.0)  # what has happened meanwhile
            now = time.monotonic()
            leader_only, trains = task.leader_only, task.trains
            self._execute(
                self._machine.begin_command(budget, now, leader_only=leader_only, trains=trains)
            )
            while self._ended is None:
                if self._stop_reason:
                    self._interrupt(self._stop_reason)
                else:
                    self._run_once()
        except BaseException as error:
            if self._ended is None:
                self._end_after(error)
            raise
        finally:
            self._task = None
        if self._ended.reason:
            self._raise_failure(self._ended)

    def stop(self, reason: str) -> None:
        """End the task that is under way, within a second or a few; any thread may call it."""
        self._stop_reason = reason

    def hold_state(self, position: Position, handle: StateHandle) -> None:
        """Continue from this state if all workers are lost."""
        held = known_state(StateSource.HELD, position, handle=handle)
        self._execute(self._machine.hold_state(held, time.monotonic()))

    def begin_with(
        self, state: KnownState, position: Position, *, is_continued: bool = False
    ) -> None:
        """Begin with ``state``; workers that run are ended.

        ``is_continued``: this continues the run whose checkpoints are in the store.
        """
        self._is_continued = is_continued
        self._execute(self._machine.replace_state(state, time.monotonic()))
        self.position = position
        self._await_ends(_END_S)
        self._find_foreign_checkpoints()

    def use_store(self, store: CheckpointStore) -> None:
        """Write checkpoints to ``store`` from now on."""
        if store is not self.store:
            self.store = store
            self._find_foreign_checkpoints()
            if self._foreign:
                log.warning(
                    "%s has checkpoints of another run, which are deleted as this one writes its"
                    " own (resume='auto' continues from them)",
                    store.directory,
                )

    def _find_foreign_checkpoints(self) -> None:
        """Find the checkpoints in the store that do not belong to this run."""
        if self.store is not None:
            listed = {each.path for each in self.store.checkpoints()}
            own = listed if self._is_continued else {self._machine.held.checkpoint}
            self._foreign = listed - own

    def dismiss(self) -> None:
        """End all workers in good order."""
        self._execute(self._machine.dismiss(time.monotonic()))
        self._await_ends(_END_S)

    def close(self) -> None:
        """Free the resources of the driver, but not the backend."""
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
            self._lighthouse = None

    # -- inputs ----------------------------------------------------------------------------------

    def _run_once(self) -> None:
        deadline = self._machine.next_deadline()
        left_s = _WAIT_S if deadline is None else deadline - time.monotonic()
        self._receive_events(min(max(0.0, left_s), _WAIT_S))
        self._execute(self._machine.tick(time.monotonic()))

    def _receive_events(self, timeout_s: float) -> None:
        self._unhandled.extend(self._backend.wait(timeout_s))
        while self._unhandled:
            event = self._unhandled.popleft()
            if isinstance(event, Lost):
                self._received_at.pop(event.worker, None)
                self._living.discard(event.worker)
                self._forget_pid(event.worker)
                self._execute(self._machine.lost(event.worker, event.reason, time.monotonic()))
            else:
                self._received_at[event.worker] = time.monotonic()
                self._execute(self._handle(event))

    def _handle(self, event: Received) -> RetryOrders:
        handle = self._handlers[type(event.answer)]
        return handle(event.worker, event.answer, time.monotonic())

    def _handle_progress(self, worker: int, answer: Progress, now: float) -> RetryOrders:
        self._record_position(worker, answer.position, now)
        return self._machine.progressed(worker, answer.position.step, now)

    def _handle_started(self, worker: int, answer: Started, now: float) -> RetryOrders:
        ranks = self._machine.ranks()
        if worker in ranks:
            self.pids = {**self.pids, ranks[worker]: answer.pid}
            self._rank_by_worker[worker] = ranks[worker]
        return self._machine.started(worker, now)

    def _forget_pid(self, worker: int) -> None:
        rank = self._rank_by_worker.pop(worker, None)
        self.pids = {each: pid for each, pid in self.pids.items() if each != rank}

    def _handle_store_opened(self, worker: int, answer: StoreOpened, now: float) -> RetryOrders:
        return self._machine.store_opened(worker, answer.world, answer.address, now)

    def _handle_joined(self, worker: int, answer: Joined, now: float) -> RetryOrders:
        if self._machine.phase is RunPhase.FORMING:  # later ones heal from the others
            self.position = answer.position
        return self._machine.joined(worker, answer.world, answer.position.step, now)

    def _handle_reported(self, worker: int, answer: Reported, now: float) -> RetryOrders:
        self._record_position(worker, answer.position, now)
        if answer.state is not None:
            self.hold_state(answer.state.position, answer.state)
        if self._is_news(worker, answer.position):
            self._observer.reported(answer.position, answer.metrics)
        return self._machine.reported(worker, answer.position.step, now)

    def _handle_checkpoint(self, _: int, answer: CheckpointWritten, now: float) -> RetryOrders:
        self.history.checkpointed(now, answer.position)
        return ()

    def _handle_offer(self, worker: int, answer: StateOffered, now: float) -> RetryOrders:
        position = answer.state.position
        if _key(position) > _key(self.position):
            self.position = position
        state = known_state(StateSource.PEER, position, handle=answer.state)
        return self._machine.offered(worker, state, now)

    def _handle_failed(self, worker: int, answer: Failed, now: float) -> RetryOrders:
        return self._machine.failed(worker, _program_error(answer), now)

    def _handle_finished(self, worker: int, answer: Finished, now: float) -> RetryOrders:
        if answer.command != self._num_tasks or self._task is None:
            return ()
        self._task.finished(worker, answer.result)
        self._record_position(worker, answer.position, now)
        return self._machine.finished(worker, answer.position.step, now)

    def _record_position(self, worker: int, position: Position, now: float) -> None:
        if worker not in self._machine.ranks():
            return
        if _key(position) > _key(self.position):
            self.position = position
            self.history.stepped(now, position, self._machine.num_ready())
            self._observer.moved(position, self._machine.num_ready())

    def _is_news(self, worker: int, position: Position) -> bool:
        """Whether this is the leader's report, and a lost leader has not sent it before."""
        if not self._is_leader(worker):
            return False
        sender, last = self._last_report
        if worker != sender and _key(position) <= last:
            return False
        self._last_report = worker, _key(position)
        return True

    def _is_leader(self, worker: int) -> bool:
        ranks = self._machine.ranks()
        return worker in ranks and ranks[worker] == min(ranks.values())

    # -- orders ----------------------------------------------------------------------------------

    def _execute(self, given: RetryOrders) -> None:
        left = list(given)
        try:
            while left:
                left += self._executors[type(left[0])](left[0]) or ()
                del left[0]
        except BaseException:  # the machine would wait for workers that nobody starts
            unstarted = [each.worker for each in left if isinstance(each, StartWorker)]
            self._unhandled += [
                Lost(worker=each, reason="it was not started") for each in unstarted
            ]
            raise

    def _look_for_resources(self, _: LookForResources) -> RetryOrders:
        num = self._backend.num_startable(self._parts.resources)
        jitter = random.SystemRandom().random()
        return self._machine.resources_found(num, time.monotonic(), jitter)

    def _request_workers(self, order: RequestWorkers) -> None:
        self._backend.request(order.num, self._parts.resources)

    def _find_checkpoint(self, _: FindCheckpoint) -> RetryOrders:
        found = None
        try:
            found = self._newest_checkpoint()
        except CheckpointError as error:
            log.warning("%s", error)
        state = None
        if found is not None:
            state = known_state(StateSource.CHECKPOINT, found.position, checkpoint=found.path)
        return self._machine.checkpoint_found(state, time.monotonic())

    def _newest_checkpoint(self) -> Checkpoint | None:
        return None if self.store is None else self.store.newest_good(self._foreign)

    def _reject_state(self, order: RejectState) -> None:
        state = order.state
        if state.checkpoint and self.store is not None:
            self.store.reject(state.checkpoint, order.reason)
        else:
            log.warning("%s cannot be used: %s", state.source.value, order.reason)
        self._observer.warned(f"{state.source.value} cannot be used: {order.reason}")

    def _start_worker(self, order: StartWorker) -> None:
        self._living.add(order.worker)
        self._backend.start(order.worker, self._parts.job, self._parts.resources)

    def _join_worker(self, order: LetJoin) -> None:
        address = order.address
        if self._parts.rules.keeps_others:
            if self._lighthouse is None:
                rules = self._parts.rules
                self._lighthouse = LighthouseServer(
                    self._parts.lighthouse_bind, min_replicas=rules.min_workers
                )
            address = self._lighthouse.address()
        begin = order.begin
        handle = None if begin is None else begin.handle
        assert handle is None or isinstance(handle, StateHandle)
        self._backend.send(
            order.worker,
            JoinWorld(
                world=order.world,
                rank=order.rank,
                world_size=order.world_size,
                address=address,
                state=handle,
                checkpoint="" if begin is None else begin.checkpoint,
                is_spare=order.is_spare,
            ),
        )

    def _send_command(self, order: SendCommand) -> RetryOrders | None:
        assert self._task is not None
        message = self._task.message(self._num_tasks, order.worker, self.position)
        if message is None:
            step = self.position.step
            return self._machine.finished(order.worker, step, time.monotonic())
        self._backend.send(order.worker, message)
        return None

    def _report_broken(self, order: ReportBroken) -> None:
        now, rung = time.monotonic(), _RUNGS[order.remedy]
        if order.remedy is Remedy.GROW:
            self.history.grows(now, order.reason)
        elif order.rank is None or order.cause.weight <= IncidentCause.PROGRAM.weight:
            self.history.failed(now, order.reason, rung)
        else:
            self.history.lost(now, order.rank, order.reason, rung)
        if order.explains:
            self.history.explain(order.reason)
        what = {
            Remedy.GROW: "all workers are started anew, with more of them",
            Remedy.RESTART: "all workers are ended",
            Remedy.REPLACE: "it is replaced",
        }[order.remedy]
        sentence = f"{order.reason}: {what}"
        if order.cause is IncidentCause.COLLECTIVE:  # the worker that caused it is noticed soon
            self._unexplained = self._unexplained or sentence
            return
        if order.explains:
            self._unexplained = ""
        self._log(sentence)

    def _log_unexplained(self) -> None:
        """Log that a collective failed: no worker was lost that would explain it."""
        if self._unexplained:
            self._log(self._unexplained)
            self._unexplained = ""

    def _log(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self._observer.warned(sentence)

    def _report_formed(self, order: ReportFormed) -> None:
        now, state = time.monotonic(), order.state
        self._log_unexplained()
        if self._task is not None:
            self._task.restarted()
        if order.step < self._last_report[1][0]:  # what was reported is done again
            self._last_report = _NO_REPORT
        source = "checkpoint" if state.checkpoint else _SOURCES[state.source]
        self.history.resumed(now, self.position, order.num_workers, source, order.why_not_peer)
        wanted = self._parts.rules.num_workers
        if order.num_workers < wanted:
            self._log(f"there are resources for {order.num_workers} of {wanted} workers")
        if not order.is_first:
            lost = self.history.incidents[-1].lost_steps
            begun = (
                f"{order.num_workers} workers go on from {state.source.value}, step {order.step}"
            )
            why = (
                f"; no worker's state was taken: {order.why_not_peer}" if order.why_not_peer else ""
            )
            self._log(f"{begun}; {lost} steps are done again{why}")
        self._observer.moved(self.position, order.num_workers)

    def _report_no_resources(self, order: ReportNoResources) -> None:
        self.history.waits(time.monotonic())
        self._log_unexplained()
        self._log(
            f"there are resources for {order.num} workers, {order.needed} are needed: "
            f"looking again in {order.pause_s:.1f} s"
        )

    def _report_place_filled(self, order: ReportPlaceFilled) -> None:
        before = self._rank_by_worker.get(order.worker)
        if before in self.pids:
            pid = self.pids[before]
            self._forget_pid(order.worker)
            self.pids = {**self.pids, order.rank: pid}
            self._rank_by_worker[order.worker] = order.rank
        self._log(f"a spare has taken the place of worker {order.rank}")

    def _report_spare_lost(self, order: ReportSpareLost) -> None:
        log.warning("%s: it stood by, and is replaced", order.reason)

    def _report_left_alone(self, order: ReportLeftAlone) -> None:
        self._living.discard(order.worker)
        log.error("worker %d was killed, but its end was not seen: it is left alone", order.rank)

    def _end_command(self, order: EndCommand) -> None:
        self._log_unexplained()
        self._ended = order

    # -- ends ------------------------------------------------------------------------------------

    def _end_after(self, error: BaseException) -> None:
        """End the command because of ``error``, which the caller raises whatever fails here."""
        try:
            self._interrupt(f"{type(error).__name__} in the trainer")
        except Exception:
            log.exception("the workers were not ended in good order")

    def _interrupt(self, reason: str) -> None:
        """End the command, for instance because of Ctrl-C."""
        deadline = time.monotonic() + _INTERRUPT_S
        try:
            self._execute(self._machine.interrupt(reason, time.monotonic()))
            while self._ended is None and time.monotonic() < deadline:
                self._run_once()
        finally:
            self._kill_living()
            self._execute(self._machine.interrupt(reason, time.monotonic(), waits=False))

    def _await_ends(self, timeout_s: float) -> None:
        """Wait until no worker runs; kill those that take too long, or send nothing any more."""
        silence_s = self._parts.rules.heartbeat_timeout_s
        began_at = time.monotonic()
        deadline = began_at + timeout_s
        while self._living and time.monotonic() < deadline:
            self._receive_events(min(_WAIT_S, max(0.0, deadline - time.monotonic())))
            silent_before = time.monotonic() - silence_s
            for worker in self._living:
                if max(began_at, self._received_at.get(worker, 0.0)) < silent_before:
                    self._backend.kill(worker)
        self._kill_living()

    def _kill_living(self) -> None:
        """End all workers at once; one that cannot be ended does not keep the others."""
        for worker in self._living:
            try:
                self._backend.kill(worker)
            except Exception:
                log.exception("worker %d was not ended", worker)

    def _raise_failure(self, ended: EndCommand) -> None:
        failed = None if ended.error is None else ended.error.payload
        if isinstance(failed, Failed):
            cause = WorkerFailed(
                kind=failed.kind,
                step=failed.position.step,
                is_repeated=ended.is_repeated,
                traceback=failed.traceback,
                is_final=ended.is_repeated or failed.is_final,
            )
            error = _unpickled(failed)
            if error is None:
                raise cause
            raise error from cause
        raise TrainingFailed(
            reason=ended.reason,
            num_retries=self._machine.retries.num,
            is_final=ended.is_final,
        )


def _program_error(failed: Failed) -> ProgramError:
    return ProgramError(
        kind=failed.kind,
        message=failed.message,
        step=failed.position.step,
        is_peers=failed.is_peers,
        place=failed.place,
        is_final=failed.is_final,
        refuses_state=failed.refuses_state,
        payload=failed,
    )


def _unpickled(failed: Failed) -> Exception | None:
    """The exception of the user's program, if this process can unpickle it."""
    if not failed.pickled:
        return None
    try:
        error = pickle.loads(failed.pickled)  # noqa: S301 - of our own worker
    except Exception:  # noqa: BLE001 - whatever its class does
        return None
    return error if isinstance(error, Exception) else None


def known_state(source: StateSource, position: Position, **what: Any) -> KnownState:
    """A state to begin with: see `KnownState`."""
    step, epoch, num_samples = _key(position)
    return KnownState(source=source, step=step, epoch=epoch, num_samples=num_samples, **what)


def _key(position: Position) -> tuple[int, int, int]:
    return position.step, position.epoch, position.num_samples
