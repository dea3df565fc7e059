"""Runs a worker's rounds on the background thread, and asks for decisions.

A round requests the quorum, connects its members, offers the state to groups that are behind, and
fetches it if this group is behind. `torchft_svc/core/quorum/worker/round.py` decides what follows
when, and what an error leads to.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.process.background import BackgroundThread, Task
from torchft_svc.client.process.device_streams import TrainingStreams
from torchft_svc.client.process.profiling import profiled
from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.reduce.collectives import describe_encoding
from torchft_svc.client.step.catch_up import LiveState, fetch_preview
from torchft_svc.client.step.event_streams import EventStreams
from torchft_svc.client.step.follow import following
from torchft_svc.client.step.heal import fetch_state
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.client.step.state import EarlyTensors, StateRegistry, size_of
from torchft_svc.coordination import QuorumResult
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.types import WorkerRequest
from torchft_svc.core.quorum.worker.round import (
    AskDecision,
    AskManager,
    Decide,
    EnterQuorum,
    FetchPreview,
    FetchState,
    LoseDecision,
    MeetMembers,
    OfferState,
    Prepare,
    Ready,
    RefuseState,
    SlowAction,
    VoteOutput,
    WorkerRules,
)
from torchft_svc.core.quorum.worker.state_check import CheckRules
from torchft_svc.core.quorum.worker.time_use import RoundWork
from torchft_svc.errors import (
    CommitFailed,
    ConfigError,
    GroupLeft,
    RequestRefused,
    TorchFTError,
    Unreachable,
    UsageError,
)
from torchft_svc.host.progress_file import ProgressFile
from torchft_svc.host.quantities import show_bytes
from torchft_svc.settings import (
    DEFAULT_SPARE_REFRESH_S,
    GroupPlace,
    Timeouts,
    WorldSizeMode,
)

if TYPE_CHECKING:
    from torchft_svc.coordination import ManagerClient

log = logging.getLogger(__name__)

# Interval at which a wait cleans up abandoned process groups.
_POLL_S = 0.05
# A drained group's workers get the order by their stream; at most so long after the refusal.
_DRAIN_NEWS_S = 1.0


class RoundTracer(ABC):
    """Receives what the rounds of a worker do, on its background thread."""

    @abstractmethod
    def change_work(self, work: RoundWork | None) -> None:
        """Record what the round does from now on."""

    @abstractmethod
    def end_round(self, quorum: QuorumResult | None, healed_bytes: int) -> None:
        """Record that the round is over, and the bytes of the last heal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The parts that a round uses."""

    client: ManagerClient
    pg: ProcessGroup
    transport: CheckpointTransport[Any]
    registry: StateRegistry
    watchdog: Watchdog
    progress: ProgressFile
    streams: EventStreams
    tracer: RoundTracer | None = None

    def leave_members(self, reason: Exception) -> None:
        """Leave the members of the process group at once."""
        with self.watchdog.watching("a process group to be left"):
            self.pg.save_record(str(reason))
            self.pg.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """The settings of a manager that all of its rounds share."""

    place: GroupPlace
    timeouts: Timeouts
    mode: WorldSizeMode
    min_replica_size: int
    use_async_quorum: bool
    init_sync: bool
    checks_collectives: bool = False
    is_steady: bool = True
    checks: CheckRules = field(default_factory=CheckRules)
    catches_up: bool = False
    copy_every: int = 0
    is_spare: bool = False
    spare_refresh_s: float = DEFAULT_SPARE_REFRESH_S

    def for_worker(self, patience_s: float, pg: ProcessGroup) -> WorkerRules:
        """The part for the core; ``patience_s``: how long to wait for a restarted manager."""
        has_spares = self.mode is WorldSizeMode.FIXED_WITH_SPARES
        return WorkerRules(
            group_rank=self.place.group_rank,
            group_world_size=self.place.group_world_size,
            use_async_quorum=self.use_async_quorum,
            init_sync=self.init_sync,
            num_wanted=self.min_replica_size if has_spares else None,
            patience_s=patience_s,
            is_steady=self.is_steady and pg.needs_all_members,
            checks=self.checks,
            catches_up=self.catches_up,
            is_spare=self.is_spare,
        )

    def check_summing_again(self) -> None:
        """Raise `ConfigError` if a step is never summed in another quorum (rule E9)."""
        for name, value, needed in (
            ("world_size", self.place.group_world_size, 1),
            ("use_async_quorum", self.use_async_quorum, True),
            ("steady_steps", self.is_steady, True),
        ):
            if value != needed:
                reason = f"recover_within_step needs {needed}: otherwise steps are discarded"
                raise ConfigError(name, value, reason)

    def common(self, pg: ProcessGroup) -> str:
        """The settings that must be equal in all groups: they decide which groups contribute, which
        steps count, and what travels in a sum."""
        named = {
            "world_size_mode": self.mode.name,
            "min_replica_size": self.min_replica_size,
            "use_async_quorum": self.use_async_quorum,
            "init_sync": self.init_sync,
            **self.checks.described(),
            **({"checks_collectives": True} if self.checks_collectives else {}),
            **({} if pg.sums_exactly else {"sums_exactly": False}),
        }
        settings = [f"{name}={value}" for name, value in named.items()]
        return ", ".join([*settings, describe_encoding()])


@dataclass(frozen=True, slots=True)
class _Rest:
    """The receivers of the rest of the state; of the whole state if nothing was sent ``early``."""

    receivers: list[int]
    extras: list[int]
    early: EarlyTensors | None


class RoundRunner:
    """Runs rounds, one after the other, and reports their outcomes to the machine.

    `begin_round` and the waits belong to the training thread. ``state`` is the fetched state until
    it is loaded.
    """

    def __init__(
        self, deps: Dependencies, rules: RoundRules, worker: SharedRound, thread: BackgroundThread
    ) -> None:
        self._deps = deps
        self._rules = rules
        self._worker = worker
        self._thread = thread
        self._task: Task | None = None  # a round on the background thread
        # Clear until the members are connected, or there is an error.
        self._is_ready = threading.Event()
        self._is_ready.set()
        self.state: dict[str, Any] | None = None
        self.healed_from = ""  # for the log: source, size and time
        self.healed_bytes = 0  # of the last heal
        self._streams = TrainingStreams()  # at the beginning of the round
        self._rest: _Rest | None = None  # what groups that heal get when the step ends
        if rules.catches_up:
            is_whole, timeout_s = not rules.use_async_quorum, rules.timeouts.collective_s
            live = LiveState(deps.registry, worker, timeout_s, is_whole=is_whole)
            deps.transport.show_preview(live)

    @property
    def quorum(self) -> QuorumResult | None:
        """The quorum of the present round."""
        return self._worker.round.quorum

    # -- for the training thread -----------------------------------------------------------------

    def begin_round(self, ready: Ready) -> None:
        """Run the round that begins with ``ready`` on the background thread."""
        self._is_ready.clear()
        self._worker.time_use.begin_round()
        self._streams.record()
        self.state = None
        task = self._task = Task(partial(self._run, ready))
        self._thread.submit(task)
        if task.done and task.error is not None:
            raise task.error

    @property
    def is_ready(self) -> bool:
        """Whether the members are known, if a step is under way."""
        return self._is_ready.is_set()

    @property
    def is_over(self) -> bool:
        """Whether no round is running."""
        return self._task is None

    @property
    def was_interrupted(self) -> bool:
        """Whether the last round has not ended well, or was not waited for."""
        return self._task is not None and not (self._task.done and self._task.error is None)

    def wait_until_ready(self) -> None:
        """Wait until the members are known, if a step is under way; raises nothing.

        It needs no deadline: all waits of the background thread have one.
        """
        if self._is_ready.is_set():  # called often, and mostly this is so
            return
        with self._standing_still():
            while not self._is_ready.wait(_POLL_S):
                self._deps.pg.tidy()
                if self._task is None or self._task.done:
                    return  # the manager was shut down meanwhile

    def wait_until_over(self) -> None:
        """Wait until the round is over; raises the error of the thread."""
        task = self._task
        if task is None:
            return
        if not task.done:
            with self._standing_still():
                while not task.done and not task.wait(_POLL_S):
                    self._deps.pg.tidy()
        if task.error is not None:
            raise task.error
        self._task = None

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Count the time of the block as time in which the program stands still."""
        since = time.monotonic()
        try:
            yield
        finally:
            self._worker.time_use.stood_still(since, time.monotonic())

    def _begin_work(self, work: RoundWork | None) -> None:
        """Record what the background thread does from now on."""
        self._worker.time_use.change_work(work, time.monotonic())
        if self._deps.tracer is not None:
            self._deps.tracer.change_work(work)

    def cancel_round(self, error: Exception) -> None:
        """Cancel a round that has not begun; a running one continues, and so does its step."""
        task = self._task
        if task is None or task.abandon(error) or task.error is not None:
            self._task = None
            with self._worker.changing() as round_:
                round_.cancel_round(error)
            self._is_ready.set()

    def latch_error(self, error: Exception, epoch: int) -> None:
        """Latch an error of the step with this ``epoch``; for any thread.

        Errors of earlier steps are ignored.
        """
        with self._worker.changing() as round_:
            is_first = self._worker.state.error is None
            ready = round_.record_error(error, epoch)
            state = self._worker.state
        if is_first and state.error is error:  # the warning comes at the end of the step
            log.debug("step %d cannot be committed", state.step, exc_info=error)
            self._deps.streams.log_error(self._last_quorum, error)
        if ready.leave is not None:
            self._deps.leave_members(ready.leave)

    def fail_step(self, error: Exception) -> None:
        """Latch ``error``, and leave: the others wait for sums that this worker will not launch.

        This also holds for a group that heals, or a spare: it sums zeros.
        """
        self.latch_error(error, self._worker.state.epoch)
        if self._deps.pg.errored() is None:
            self._deps.leave_members(error)

    # -- on the background thread ----------------------------------------------------------------

    def _run(self, ready: Ready) -> None:
        """Run the round that begins with ``ready``; raises nothing."""
        try:
            self._execute(ready)
        except Exception as error:
            if not isinstance(error, TorchFTError):
                log.exception("a round failed")
            with self._worker.changing() as round_:
                ready = round_.record_failure(error)
            self._log_failure(error)
            self._execute(ready)
        finally:
            self._begin_work(None)
            quorum = self.quorum  # the training thread may begin another step from here on
            self._is_ready.set()
            if self._deps.tracer is not None:
                self._deps.tracer.end_round(quorum, self.healed_bytes)

    def _execute(self, ready: Ready) -> None:
        """Do what each input of the machine leads to, until nothing follows."""
        while True:
            if ready.expects_no_state:
                self._deps.transport.expect_checkpoint(None)
            for warning in ready.warnings:
                log.warning("%s", warning)
            if ready.leave is not None:
                self._deps.leave_members(ready.leave)
            if ready.begins_training:
                self._is_ready.set()
            if ready.offer is not None:
                self._offer(ready.offer)
            if ready.refusal is not None:
                self._refuse_state(ready.refusal)
            if ready.then is None:
                return
            ready = self._await(ready.then)

    def _await(self, action: SlowAction) -> Ready:
        """Run ``action``, and give its outcome to the machine; returns what follows."""
        match action:
            case Prepare(expects_state):
                return self._prepare(expects_state)
            case FetchPreview():
                return self._fetch_preview()
            case AskManager(pause_s, deadline):
                return self._ask(pause_s, deadline)
            case EnterQuorum():
                return self._enter()
            case MeetMembers(anew):
                return self._meet(anew)
            case FetchState():
                return self._fetch()

    @property
    def _last_quorum(self) -> QuorumResult | None:
        """The quorum of this round, or that of the step before while there is none yet."""
        return self.quorum or self._worker.round.peers.quorum

    def _log_failure(self, error: Exception) -> None:
        self._deps.streams.log_error(self._last_quorum, error)
        if not isinstance(error, GroupLeft):
            log.debug("step %d cannot be committed", self._worker.state.step, exc_info=error)

    def _prepare(self, expects_state: bool) -> Ready:
        if expects_state:
            self._expect_state()
        self._deps.pg.prepare()
        with self._worker.changing() as round_:
            return round_.prepared(time.monotonic())

    def _expect_state(self) -> None:
        """Prepare the transport for a heal, by the state that this worker has."""
        try:
            state = self._deps.registry.collect({}, self._rules.timeouts.quorum_s)
            self._deps.transport.check_state(state)
            self._deps.transport.expect_checkpoint(state)
        except UsageError:
            raise  # this state could not be sent to other groups: better an error now than then
        except Exception:
            log.exception("healing cannot be prepared; it may take longer")

    def _fetch_preview(self) -> Ready:
        """Fetch what others show of their states; without it, the heal fetches all."""
        try:
            self._receive_preview(self._check_wanted)
        except TorchFTError as error:
            log.info("the state is not fetched in advance: %s", error)
        except Exception:
            log.exception("the state cannot be fetched in advance; the others may wait for longer")
        with self._worker.changing() as round_:
            return round_.preview_fetched(time.monotonic())

    def _receive_preview(self, check: Callable[[], None]) -> bool:
        """See `fetch_preview`."""
        deps, group_rank = self._deps, self._rules.place.group_rank
        timeout_s = self._rules.timeouts.collective_s
        return fetch_preview(deps.transport, deps.client, group_rank, timeout_s, check)

    def _stand_by(self, question: WorkerRequest, timeout: timedelta) -> QuorumResult:
        """Ask for the first quorum of a prepared spare, and follow the job's state meanwhile."""
        if self._rules.place.leads:
            log.info("standing by until a place in the job is free")
        if not self._worker.round.follows:
            return self._deps.client.ask(question, timeout)
        interrupt, refresh_s = self._deps.transport.interrupt_receive, self._rules.spare_refresh_s
        with following(self._receive_preview, interrupt, refresh_s):
            return self._deps.client.ask(question, timeout)

    def _check_wanted(self) -> None:
        """Raise `RequestRefused` if this group is to end instead."""
        if self._worker.round.drain_reason is not None:
            raise RequestRefused("the group is being drained")

    def _ask(self, pause_s: float, deadline: float) -> Ready:
        self._begin_work(RoundWork.WAITING)
        time.sleep(pause_s)
        address = self._deps.transport.metadata()
        is_broken = self._deps.pg.errored() is not None
        with self._worker.changing() as round_:
            question = round_.question(address, are_connections_broken=is_broken)
        timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            ask = self._stand_by if self._worker.round.stands_by else self._deps.client.ask
            quorum = ask(question, timeout)
        except TorchFTError as error:
            over = self._deps.client.why_over(error)
            error = over or error
            if isinstance(error, GroupLeft):
                # The order to drain, which says how long the group may live, comes by the stream.
                self._worker.wait_until_drained(_DRAIN_NEWS_S)
            with self._worker.changing() as round_:
                now = time.monotonic()
                ready = round_.question_failed(error, now, is_manager_over=over is not None)
            self._log_failure(error)
            return ready
        with self._worker.changing() as round_:
            return round_.quorum_received(quorum)

    def _enter(self) -> Ready:
        assert self.quorum is not None
        # The manager considers a worker that has its quorum as training. This one still waits for
        # other groups: a store that does not answer is no hang of this worker.
        self._worker.report_phase(Phase.QUORUM)
        with self._worker.changing() as round_:
            change = round_.peers.describe_change()
            ready = round_.quorum_entered()
        # All workers of a group would log the same: only the first one does.
        level = logging.INFO if change and self._rules.place.leads else logging.DEBUG
        change = change or "the same groups connect again"
        quorum_id, step = self.quorum.quorum_id, self.quorum.max_step
        self._deps.streams.log_quorum(self.quorum)
        log.log(level, "quorum %d from step %d: %s", quorum_id, step, change)
        return ready

    def _meet(self, anew: bool) -> Ready:
        self._begin_work(RoundWork.RECONFIGURING if anew else None)
        problem = self._configure() if anew else self._deps.pg.errored()
        self._begin_work(None)
        with self._worker.changing() as round_:
            return round_.members_met(problem)

    @profiled("torchft::reconfigure")
    def _configure(self) -> Exception | None:
        """Connect the members; returns the error if that fails."""
        quorum, place = self.quorum, self._rules.place
        assert quorum is not None
        try:
            self._deps.pg.configure(
                f"{quorum.store_address}/{quorum.store_prefix}",
                quorum.replica_ids[quorum.replica_rank],
                quorum.replica_rank,
                quorum.replica_world_size,
                quorum_id=quorum.quorum_id,
                group_rank=place.group_rank,
                group_world_size=place.group_world_size,
            )
        except (TorchFTError, RuntimeError) as error:
            log.debug("quorum %d cannot be met", quorum.quorum_id, exc_info=error)
            return error
        return None

    def _offer(self, offer: OfferState) -> None:
        """Serve this group's state; a failure of a receiver does not affect this group's step.

        The state is kept for late receivers as long as a quorum may take.
        """
        assert self.quorum is not None
        transport, registry = self._deps.transport, self._deps.registry
        receivers = list(offer.receivers)
        extras = list(offer.extras) if transport.can_stripe else []
        if not receivers and not extras:
            return
        timeout_s = self._rules.timeouts.quorum_s
        self._streams.wait()  # the last update may still be queued
        try:
            for name in [_name_of(self.quorum, rank) for rank in receivers]:
                log.info("%s heals to step %d from this group", name, self.quorum.max_step)
            if offer.at_once:  # the receivers begin the step with it, as this group does now
                mine = registry.collect_copied(self._worker.state.counters(), timeout_s)
            elif transport.can_defer:
                early = registry.collect_early(timeout_s)
                self._rest = _Rest(receivers, extras, early)
                mine = early.state
            else:
                self._rest = _Rest(receivers, extras, None)
                return
            self._send(receivers, extras, mine)
        except Exception as error:
            log.exception("the state of step %d cannot be offered", self.quorum.max_step)
            self._refuse(receivers, error)

    def _refuse_state(self, refusal: RefuseState) -> None:
        step = self._worker.state.step
        log.warning("the state of step %d cannot be offered: %s", step, refusal.reason)
        self._refuse(list(refusal.receivers), refusal.reason)

    def _send(self, receivers: list[int], extras: list[int], state: Any) -> None:
        assert self.quorum is not None
        transport, step = self._deps.transport, self.quorum.max_step
        timeout = timedelta(seconds=self._rules.timeouts.quorum_s)
        if extras:
            transport.send_striped(receivers, extras, step, state, timeout)
        else:
            transport.send_checkpoint(receivers, step, state, timeout)

    def _refuse(self, receivers: list[int], error: Exception) -> None:
        assert self.quorum is not None
        self._rest = None
        self._deps.transport.refuse_checkpoint(receivers, self.quorum.max_step, repr(error))

    def offer_rest(self) -> None:
        """Send the state that the forward and the backward pass may have changed, after both.

        A group that heals replaces its own state with it, after its own passes.
        """
        rest, self._rest = self._rest, None
        if rest is None or self.quorum is None:
            return
        transport, registry = self._deps.transport, self._deps.registry
        timeout_s = self._rules.timeouts.quorum_s
        try:
            if rest.early is None:
                state = registry.collect(self._worker.state.counters(), timeout_s)
                self._send(rest.receivers, rest.extras, state)
                transport.disallow_checkpoint()
            else:
                state = registry.collect_rest(rest.early, self._worker.state.counters(), timeout_s)
                timeout = timedelta(seconds=timeout_s)
                transport.send_deferred(
                    rest.receivers, rest.extras, self.quorum.max_step, state, timeout
                )
        except Exception as error:
            log.exception("the rest of step %d cannot be offered", self.quorum.max_step)
            self._refuse(rest.receivers, error)

    def withhold_rest(self) -> None:
        """Refuse the rest of the state: the step whose end the receivers wait for was given up."""
        rest, self._rest = self._rest, None
        if rest is not None and self.quorum is not None:
            step = self.quorum.max_step
            try:
                self._deps.transport.refuse_checkpoint(rest.receivers, step, "it was given up")
            except Exception:
                log.exception("it cannot be reported that step %d was given up", step)

    @profiled("torchft::heal")
    def _fetch(self) -> Ready:
        quorum = self.quorum
        assert quorum is not None
        source = _source_of(quorum)
        log.info("healing to step %d from %s", quorum.max_step, source)
        self._begin_work(RoundWork.HEALING)
        began_at = time.monotonic()
        self._streams.wait()  # a state that is received in place replaces what is queued
        state = fetch_state(
            self._deps.transport,
            quorum,
            self._rules.place.group_rank,
            self._rules.timeouts.collective_s,
            self._deps.client.security,
            lambda: self._worker.check_losses(quorum),
            lambda: self._worker.check_source(quorum),
            lambda: self._worker.check_own(quorum),
            self._worker.report_progress,
        )
        took_s = time.monotonic() - began_at
        self.state = state
        self.healed_bytes = size_of(state)
        self._worker.num_heals += 1
        self._worker.healed_bytes += self.healed_bytes
        self.healed_from = f"{source}: {show_bytes(self.healed_bytes)} in {took_s:.2f} s"
        with self._worker.changing() as round_:
            return round_.state_fetched()


def ask_decision(client: ManagerClient, worker: SharedRound, ask: AskDecision) -> Decide:
    """The group's decision on the step, as the manager sends it.

    Raises:
        PeerError: a decision was made, or may have been made, and did not arrive here.
    """
    output: VoteOutput = ask
    while isinstance(output, AskDecision):
        time.sleep(output.pause_s)
        with worker.changing() as round_:
            ballot = round_.ballot()
        timeout = timedelta(seconds=max(0.001, output.deadline - time.monotonic()))
        try:
            committed, fate = client.vote(ballot, timeout)
        except TorchFTError as error:
            over = client.why_over(error)
            with worker.changing() as round_:
                now = time.monotonic()
                output = round_.vote_failed(over or error, now, is_manager_over=over is not None)
        else:
            with worker.changing() as round_:
                output = round_.vote_decided(committed, fate)
    if isinstance(output, LoseDecision):
        raise output.error
    if output.error is not None:
        _log_no_answer(worker.state.step, output.error)
    return output


def _log_no_answer(step: int, error: TorchFTError) -> None:
    if isinstance(error, CommitFailed):
        log.warning("step %d: %s", step, error)
    elif not isinstance(error, Unreachable):
        # Without a quorum there is no vote.
        level = logging.DEBUG if isinstance(error, RequestRefused) else logging.WARNING
        log.log(level, "step %d: the vote against it could not be sent: %s", step, error)


def _source_of(quorum: QuorumResult) -> str:
    """The source of a heal, for the log."""
    rank = quorum.recover_src_replica_rank
    assert rank is not None
    name, num_extras = _name_of(quorum, rank), len(quorum.recover_extra_src_manager_addresses)
    extras = f" and {num_extras} more" if num_extras else ""
    return name + extras


def _name_of(quorum: QuorumResult, replica_rank: int) -> str:
    """The name of a group, for the log."""
    return f"group {stable_name(quorum.replica_ids[replica_rank])}"
