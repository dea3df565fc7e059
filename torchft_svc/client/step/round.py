"""One round: ask for the quorum, meet its members, offer state to those behind, fetch if behind.

Runs on the background thread; whatever happens becomes an input of the step machine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.config import GroupPlace, Timeouts, WorldSizeMode
from torchft_svc.client.process.draining import Draining
from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.step.heal import fetch_state
from torchft_svc.client.step.membership import QuorumMembership
from torchft_svc.client.step.state import EarlyTensors, StateRegistry, readable_size
from torchft_svc.coordination import ManagerClient, QuorumResult
from torchft_svc.core.names import stable_name
from torchft_svc.core.step import Phase, Standing, StepMachine, StepState, participation
from torchft_svc.errors import (
    ConfigError,
    Drained,
    GroupLeft,
    PeerError,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unreachable,
    UsageError,
)

log = logging.getLogger(__name__)


class SharedStep:
    """The one door to a step machine that two threads use.

    ``on_phase`` hears of each new phase but the wait for a quorum, with its step; it must not wait.
    """

    def __init__(self, machine: StepMachine) -> None:
        self.on_phase: Callable[[Phase, int], None] = _nobody_listens
        self._machine = machine
        self._lock = threading.RLock()

    @property
    def state(self) -> StepState:
        """A frozen view; needs no lock."""
        return self._machine.state

    @contextmanager
    def changing(self) -> Iterator[StepMachine]:
        """The machine, for this thread alone."""
        with self._lock:
            before = self._machine.state.phase
            try:
                yield self._machine
            finally:
                after = self._machine.state
                # The manager knows best when a quorum is waited for.
                if after.phase is not before and after.phase is not Phase.QUORUM:
                    self.on_phase(after.phase, after.step)


def _nobody_listens(phase: Phase, step: int) -> None:
    """Before the manager can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What a round talks to."""

    client: ManagerClient
    draining: Draining
    pg: ProcessGroup
    transport: CheckpointTransport[Any]
    registry: StateRegistry
    watchdog: Watchdog

    def leave_members(self, reason: Exception) -> None:
        """Leave the process group's members at once."""
        with self.watchdog.watching("a process group to be left"):
            self.pg.save_record(str(reason))
            self.pg.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """What is the same for every round of a manager."""

    place: GroupPlace
    timeouts: Timeouts
    mode: WorldSizeMode
    min_replica_size: int
    use_async_quorum: bool
    init_sync: bool
    checks_collectives: bool = False

    def common(self) -> str:
        """The settings that decide who contributes, and which steps count, and so have to be the
        same in all groups."""
        named = {
            "world_size_mode": self.mode.name,
            "min_replica_size": self.min_replica_size,
            "use_async_quorum": self.use_async_quorum,
            "init_sync": self.init_sync,
            **({"checks_collectives": True} if self.checks_collectives else {}),
        }
        return ", ".join(f"{name}={value}" for name, value in named.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRequest:
    """What may differ between rounds."""

    allow_heal: bool
    shrink_only: bool
    timeout_s: float
    layout: str = ""  # what this worker sums, see `Reducing`; empty: not known
    waits_for_heal: bool = False  # whether a state that is healed is loaded before the step begins


@dataclass(frozen=True, slots=True)
class _Rest:
    """To whom the rest of the state is sent; all of it if nothing was sent ``early``."""

    receivers: list[int]
    extras: list[int]
    early: EarlyTensors | None


class Round:
    """``ready`` is set when the members are known and met, or when there is an error.

    ``error`` is set if there is no quorum; ``state`` is what was fetched, until it is taken.
    """

    def __init__(
        self,
        deps: Dependencies,
        rules: RoundRules,
        step: SharedStep,
        membership: QuorumMembership,
        request: RoundRequest,
    ) -> None:
        self._deps = deps
        self._rules = rules
        self._step = step
        self._membership = membership
        self._request = request
        self.ready = threading.Event()
        self.error: Exception | None = None
        self.quorum: QuorumResult | None = None
        self.state: dict[str, Any] | None = None
        self.has_connected = False  # whether the members of this quorum were met in it
        self.healed_from = ""  # for people: from whom, how much, how long
        self._rest: _Rest | None = None  # what is owed to those that heal, when the step ends
        self._leaves_for: str | None = None  # why this worker has to end, if it has said so

    @property
    def heals_first(self) -> bool:
        """Whether the groups behind are healed before the step, and contribute in it.

        At step 0 there is no other way to begin with equal weights.
        """
        if not self._request.allow_heal:
            return False
        fresh = self.quorum is not None and self.quorum.max_step == 0 and self._rules.init_sync
        return fresh or not self._rules.use_async_quorum

    def check_left(self) -> None:
        """Raise `Drained` if the group has to end, and need not wait for anybody.

        That was the answer; or this worker said that it has to end, and its manager is frozen or
        gone, or a fellow is. Whoever had not said so asks again: a fellow may wait for it.
        """
        if isinstance(self.error, GroupLeft):
            raise Drained(str(self.error))
        if self._leaves_for and isinstance(self.error, PeerError):
            raise Drained(f"{self._leaves_for}; it could not leave: {self.error}")

    def check_refused(self) -> None:
        """Raise what only somebody who changes the program or its settings can mend."""
        if isinstance(self.error, ConfigError | RequestRefused):
            raise self.error

    def withdraw(self, error: Exception) -> None:
        """It will not be run, because of ``error``: nobody was asked."""
        self.error = error
        with self._step.changing() as machine:
            if machine.state.phase is Phase.QUORUM:
                machine.fail_quorum(error)
        self.ready.set()

    def run(self) -> None:
        """Carry the round out; raises nothing."""
        try:
            self._run()
        except Exception as error:
            if not isinstance(error, TorchFTError):
                log.exception("a round failed")
            self._fail(error)
        finally:
            self.ready.set()

    def _run(self) -> None:
        if self._membership.quorum is None:
            if self._request.allow_heal:
                self._expect_state()
            self._deps.pg.prepare()
        quorum = self.quorum = self._ask()
        problem = self._meet(quorum) or self._began_too_early(quorum)
        heals = quorum.heal and self._request.allow_heal
        step = self._step.state.step
        if quorum.heal and step > quorum.max_step:
            log.warning(
                "step %d of this group is not believed: the job is at step %d, and trains on from "
                "there; this group heals from it, and its own state is given up",
                step,
                quorum.max_step,
            )
        if not heals:
            self._deps.transport.expect_checkpoint(None)
        with self._step.changing() as machine:
            heal_to = quorum.max_step if quorum.heal else None
            machine.form(self._participation(quorum), heal_to, may_heal=self._request.allow_heal)
            if problem is not None:
                machine.latch(problem)
            broken = machine.state.error
            contributes = machine.state.participation.participating_rank is not None
        if broken is not None and not heals and quorum.heal:
            log.warning("step %d cannot be committed: %s", self._step.state.step, broken)
        # Whoever puts a heal off and contributes nothing does the others no harm.
        if broken is not None and (contributes or heals or not quorum.heal or problem is not None):
            self._deps.leave_members(broken)
        self.ready.set()
        if self._request.allow_heal:
            self._offer(quorum)
        if heals:
            self._fetch(quorum)

    def _fail(self, error: Exception) -> None:
        with self._step.changing() as machine:
            if machine.state.phase is Phase.QUORUM:
                self.error = error
                machine.fail_quorum(error)
            elif machine.state.phase is Phase.HEALING:
                machine.fail_heal(error)
            else:
                machine.latch(error)
            contributes = machine.state.participation.participating_rank is not None
        if isinstance(error, GroupLeft):
            return
        log.debug("step %d cannot be committed", self._step.state.step, exc_info=error)
        missed = self.error is not None and self._membership.quorum is not None
        if contributes or missed:
            # Others count on this group's gradients, or may do so in the quorum that it has missed:
            # they must learn now that none will come.
            self._deps.leave_members(error)

    def _expect_state(self) -> None:
        """A worker that has just started is most likely behind: prepare while the quorum forms."""
        try:
            state = self._deps.registry.collect({}, self._rules.timeouts.quorum_s)
            self._deps.transport.check_state(state)
            self._deps.transport.expect_checkpoint(state)
        except UsageError:
            raise  # it will not heal others either: better told now than when it is needed
        except Exception:
            log.exception("healing cannot be prepared; it may take longer")

    def _ask(self) -> QuorumResult:
        """The quorum; a manager that is being started anew is asked again."""
        deadline = time.monotonic() + self._request.timeout_s
        patience = self._deps.client.patience(deadline)
        self._membership.ask()
        while True:
            try:
                quorum = self._ask_once(max(0.001, deadline - time.monotonic()))
                self._membership.answer(quorum)
                return quorum
            except Unreachable as error:
                if not patience.pause(error):
                    raise

    def _ask_once(self, timeout_s: float) -> QuorumResult:
        state = self._step.state
        self._leaves_for = self._deps.draining.reason
        # A group without its connections needs new ones, and only a new quorum id brings them.
        must_reconnect = self._membership.quorum is not None and self._deps.pg.errored() is not None
        return self._deps.client._quorum(
            group_rank=self._rules.place.group_rank,
            step=state.step,
            checkpoint_metadata=self._deps.transport.metadata(),
            shrink_only=self._request.shrink_only,
            timeout=timedelta(seconds=timeout_s),
            commit_failures=max(state.failures, int(must_reconnect)),
            init_sync=self._rules.init_sync,
            draining=self._leaves_for is not None,
            unhealed=state.unhealed,
            question=state.epoch,
            layout=self._request.layout,
            step_quorum_id=state.quorum_id,
        )

    def _meet(self, quorum: QuorumResult) -> Exception | None:
        """Build the process group anew if the quorum has changed; why it cannot be used, if so."""
        if self._membership.fits(quorum):
            # Broken since this worker asked? The others keep their connections, and would not come
            # to meet it under this id. It says so when it asks again, which brings another one.
            return self._deps.pg.errored()
        # The manager takes a worker that has its quorum for one that trains. It still waits for
        # others; who waits for a store that does not answer has not hung itself.
        self._step.on_phase(Phase.QUORUM, self._step.state.step)
        self._log_members(quorum, self._membership.enter(quorum))
        self.has_connected = True
        try:
            self._membership.check_losses(quorum)
            self._deps.pg.configure(
                f"{quorum.store_address}/{quorum.store_prefix}",
                quorum.replica_ids[quorum.replica_rank] if quorum.replica_ids else "",
                quorum.replica_rank,
                quorum.replica_world_size,
                quorum_id=quorum.quorum_id,
                group_rank=self._rules.place.group_rank,
                group_world_size=self._rules.place.group_world_size,
            )
        except (TorchFTError, RuntimeError) as error:
            log.debug("quorum %d cannot be met", quorum.quorum_id, exc_info=error)
            return error
        return None

    def _began_too_early(self, quorum: QuorumResult) -> Exception | None:
        """Whether this worker may have begun its forward pass with weights that are not the job's,
        although the others count on its gradients.

        Its step is beyond 0, so it did not wait for a heal; but it is not believed.
        """
        if not quorum.heal or not self.heals_first or self._request.waits_for_heal:
            return None
        step = self._step.state.step
        return QuorumFailed(f"the step began with the weights of step {step}, the job is at step 0")

    def _log_members(self, quorum: QuorumResult, change: str) -> None:
        """What all workers of a group would say is said by the first one."""
        level = logging.INFO if change and self._rules.place.leads else logging.DEBUG
        log.log(
            level,
            "quorum %d from step %d: %s",
            quorum.quorum_id,
            quorum.max_step,
            change or "the same groups connect again",
        )

    def _participation(self, quorum: QuorumResult) -> Any:
        spares = self._rules.mode is WorldSizeMode.FIXED_WITH_SPARES
        return participation(
            Standing(
                replica_rank=quorum.replica_rank,
                replica_world_size=quorum.replica_world_size,
                max_rank=quorum.max_replica_rank,
                max_world_size=quorum.max_world_size,
            ),
            heals_first=self.heals_first,
            num_wanted=self._rules.min_replica_size if spares else None,
        )

    def _offer(self, quorum: QuorumResult) -> None:
        """Serve this group's state; a receiver's trouble is none of this group's step.

        It is kept for those that come late for as long as anything in a step may take.
        """
        transport, registry = self._deps.transport, self._deps.registry
        receivers = quorum.recover_dst_replica_ranks
        extras = quorum.recover_extra_dst_replica_ranks if transport.can_stripe else []
        if not receivers and not extras:
            return
        timeout_s = self._rules.timeouts.quorum_s
        try:
            with self._step.changing() as machine:
                machine.check_whole()
            for name in [_name_of(quorum, rank) for rank in receivers]:
                log.info("%s heals to step %d from this group", name, quorum.max_step)
            if self.heals_first:  # they begin the step with it, as this group does just now
                mine = registry.collect_copied(self._counters(), timeout_s)
            elif transport.can_defer:
                early = registry.collect_early(timeout_s)
                self._rest = _Rest(receivers, extras, early)
                mine = early.state
            else:
                self._rest = _Rest(receivers, extras, None)
                return
            self._send(receivers, extras, mine)
        except Exception as error:
            log.exception("the state of step %d cannot be offered", quorum.max_step)
            self._refuse(receivers, error)

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

    def _counters(self) -> dict[str, int]:
        return self._step.state.counters()

    def offer_rest(self) -> None:
        """The forward and the backward pass are over: send what they may have changed.

        Who heals meanwhile takes it in place of what its own passes have made of its old state.
        """
        rest, self._rest = self._rest, None
        if rest is None or self.quorum is None:
            return
        transport, registry = self._deps.transport, self._deps.registry
        timeout_s = self._rules.timeouts.quorum_s
        try:
            if rest.early is None:
                state = registry.collect(self._counters(), timeout_s)
                self._send(rest.receivers, rest.extras, state)
                transport.disallow_checkpoint()
            else:
                state = registry.collect_rest(rest.early, self._counters(), timeout_s)
                timeout = timedelta(seconds=timeout_s)
                transport.send_deferred(
                    rest.receivers, rest.extras, self.quorum.max_step, state, timeout
                )
        except Exception as error:
            log.exception("the rest of step %d cannot be offered", self.quorum.max_step)
            self._refuse(rest.receivers, error)

    def withhold_rest(self) -> None:
        """The step was given up: whoever waits for its end need not."""
        rest, self._rest = self._rest, None
        if rest is not None and self.quorum is not None:
            step = self.quorum.max_step
            try:
                self._deps.transport.refuse_checkpoint(rest.receivers, step, "it was given up")
            except Exception:
                log.exception("it cannot be reported that step %d was given up", step)

    def _fetch(self, quorum: QuorumResult) -> None:
        group_rank = self._rules.place.group_rank
        timeout_s = self._rules.timeouts.collective_s
        source = _source_of(quorum)
        log.info("healing to step %d from %s", quorum.max_step, source)
        began_at = time.monotonic()
        state = fetch_state(
            self._deps.transport,
            quorum,
            group_rank,
            timeout_s,
            self._deps.client.security,
            lambda: self._membership.check_losses(quorum),
            lambda: self._membership.check_source(quorum),
        )
        took_s = time.monotonic() - began_at
        self.state = state
        self.healed_from = f"{source}: {readable_size(state)} in {took_s:.2f} s"
        with self._step.changing() as machine:
            machine.receive_state()


def _source_of(quorum: QuorumResult) -> str:
    """For people, from whom a group heals."""
    rank = quorum.recover_src_replica_rank
    assert rank is not None
    name, num_extras = _name_of(quorum, rank), len(quorum.recover_extra_src_manager_addresses)
    extras = f" and {num_extras} more" if num_extras else ""
    return name + extras


def _name_of(quorum: QuorumResult, replica_rank: int) -> str:
    """An older manager does not tell the groups' names."""
    if replica_rank < len(quorum.replica_ids):
        return f"group {stable_name(quorum.replica_ids[replica_rank])}"
    return f"replica rank {replica_rank}"
