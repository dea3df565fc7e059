"""Carries out what a worker's round orders, on the background thread.

Ask for the quorum, meet its members, offer state to those behind, fetch it if behind: what is done
when, and what an error becomes, decides `torchft_svc/core/round.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.config import GroupPlace, Timeouts, WorldSizeMode
from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.step.heal import fetch_state
from torchft_svc.client.step.shared_round import Orders, SharedRound
from torchft_svc.client.step.state import EarlyTensors, StateRegistry, readable_size
from torchft_svc.coordination import ManagerClient, QuorumResult
from torchft_svc.core.names import stable_name
from torchft_svc.core.round import (
    AskManager,
    BeginTraining,
    EnterQuorum,
    ExpectNoState,
    FetchState,
    LeaveMembers,
    MeetMembers,
    OfferState,
    RefuseState,
    Warn,
    WorkerRules,
)
from torchft_svc.core.step import Phase
from torchft_svc.errors import GroupLeft, TorchFTError, UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What a round talks to."""

    client: ManagerClient
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

    def for_worker(self, patience_s: float) -> WorkerRules:
        """What of it the core decides by; ``patience_s``: with a manager that is started anew."""
        has_spares = self.mode is WorldSizeMode.FIXED_WITH_SPARES
        return WorkerRules(
            group_rank=self.place.group_rank,
            group_world_size=self.place.group_world_size,
            use_async_quorum=self.use_async_quorum,
            init_sync=self.init_sync,
            num_wanted=self.min_replica_size if has_spares else None,
            patience_s=patience_s,
        )

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


@dataclass(frozen=True, slots=True)
class _Rest:
    """To whom the rest of the state is sent; all of it if nothing was sent ``early``."""

    receivers: list[int]
    extras: list[int]
    early: EarlyTensors | None


class RoundRunner:
    """Carries one round out: its orders, and what comes of them.

    ``ready`` is set when the members are known and met, or when there is an error; ``state`` is
    what was fetched, until it is taken.
    """

    def __init__(self, deps: Dependencies, rules: RoundRules, worker: SharedRound) -> None:
        self._deps = deps
        self._rules = rules
        self._worker = worker
        self.ready = threading.Event()
        self.quorum: QuorumResult | None = None
        self.state: dict[str, Any] | None = None
        self.healed_from = ""  # for people: from whom, how much, how long
        self._rest: _Rest | None = None  # what is owed to those that heal, when the step ends

    def withdraw(self, error: Exception) -> None:
        """It will not be run, because of ``error``: nobody was asked."""
        with self._worker.changing() as round_:
            round_.withdraw(error)
        self.ready.set()

    def run(self, allow_heal: bool) -> None:
        """Carry the round out; raises nothing."""
        try:
            if self._worker.last_quorum is None:
                if allow_heal:
                    self._expect_state()
                self._deps.pg.prepare()
            with self._worker.changing() as round_:
                orders = round_.ask(time.monotonic())
            self._carry_out(orders)
        except Exception as error:
            if not isinstance(error, TorchFTError):
                log.exception("a round failed")
            with self._worker.changing() as round_:
                orders = round_.failed(error)
            self._log_failure(error)
            self._carry_out(orders)
        finally:
            self.ready.set()

    def _carry_out(self, orders: Orders) -> None:
        """Only the last one of ``orders`` leads to others."""
        waiting = deque(orders)
        while waiting:
            order = waiting.popleft()
            waiting.extend(_ACTIONS[type(order)](self, order))

    def _log_failure(self, error: Exception) -> None:
        if not isinstance(error, GroupLeft):
            log.debug("step %d cannot be committed", self._worker.state.step, exc_info=error)

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

    # -- orders ----------------------------------------------------------------------------------

    def _ask(self, order: AskManager) -> Orders:
        time.sleep(order.pause_s)
        address = self._deps.transport.metadata()
        is_broken = self._deps.pg.errored() is not None
        with self._worker.changing() as round_:
            question = round_.question(address, are_connections_broken=is_broken)
        timeout = timedelta(seconds=max(0.001, order.deadline - time.monotonic()))
        try:
            quorum = self.quorum = self._deps.client.ask(question, timeout)
        except TorchFTError as error:
            is_over = self._deps.client.is_over(error)
            with self._worker.changing() as round_:
                now = time.monotonic()
                orders = round_.unanswered(error, now, is_manager_over=is_over)
            self._log_failure(error)
            return orders
        with self._worker.changing() as round_:
            return round_.answered(quorum)

    def _enter(self, order: EnterQuorum) -> Orders:
        assert self.quorum is not None
        # The manager takes a worker that has its quorum for one that trains. It still waits for
        # others; who waits for a store that does not answer has not hung itself.
        self._worker.on_phase(Phase.QUORUM, self._worker.state.step)
        with self._worker.changing() as round_:
            change = round_.peers.change()
            orders = round_.entered()
        # What all workers of a group would say is said by the first one.
        level = logging.INFO if change and self._rules.place.leads else logging.DEBUG
        change = change or "the same groups connect again"
        quorum_id, step = self.quorum.quorum_id, self.quorum.max_step
        log.log(level, "quorum %d from step %d: %s", quorum_id, step, change)
        return orders

    def _meet(self, order: MeetMembers) -> Orders:
        problem = self._configure() if order.anew else self._deps.pg.errored()
        with self._worker.changing() as round_:
            return round_.met(problem)

    def _configure(self) -> Exception | None:
        """Build the process group anew; why it cannot be used, if so."""
        quorum, place = self.quorum, self._rules.place
        assert quorum is not None
        try:
            self._deps.pg.configure(
                f"{quorum.store_address}/{quorum.store_prefix}",
                quorum.replica_ids[quorum.replica_rank] if quorum.replica_ids else "",
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

    def _leave(self, order: LeaveMembers) -> Orders:
        self._deps.leave_members(order.reason)
        return ()

    def _expect_nothing(self, order: ExpectNoState) -> Orders:
        self._deps.transport.expect_checkpoint(None)
        return ()

    def _begin_training(self, order: BeginTraining) -> Orders:
        self.ready.set()
        return ()

    def _warn(self, order: Warn) -> Orders:
        log.warning(order.what)
        return ()

    def _offer(self, order: OfferState) -> Orders:
        """Serve this group's state; a receiver's trouble is none of this group's step.

        It is kept for those that come late for as long as anything in a step may take.
        """
        assert self.quorum is not None
        transport, registry = self._deps.transport, self._deps.registry
        receivers = list(order.receivers)
        extras = list(order.extras) if transport.can_stripe else []
        if not receivers and not extras:
            return ()
        timeout_s = self._rules.timeouts.quorum_s
        try:
            for name in [_name_of(self.quorum, rank) for rank in receivers]:
                log.info("%s heals to step %d from this group", name, self.quorum.max_step)
            if order.at_once:  # they begin the step with it, as this group does just now
                mine = registry.collect_copied(self._counters(), timeout_s)
            elif transport.can_defer:
                early = registry.collect_early(timeout_s)
                self._rest = _Rest(receivers, extras, early)
                mine = early.state
            else:
                self._rest = _Rest(receivers, extras, None)
                return ()
            self._send(receivers, extras, mine)
        except Exception as error:
            log.exception("the state of step %d cannot be offered", self.quorum.max_step)
            self._refuse(receivers, error)
        return ()

    def _refuse_state(self, order: RefuseState) -> Orders:
        step = self._worker.state.step
        log.warning("the state of step %d cannot be offered: %s", step, order.reason)
        self._refuse(list(order.receivers), order.reason)
        return ()

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
        return self._worker.state.counters()

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

    def _fetch(self, order: FetchState) -> Orders:
        quorum = self.quorum
        assert quorum is not None
        source = _source_of(quorum)
        log.info("healing to step %d from %s", quorum.max_step, source)
        began_at = time.monotonic()
        state = fetch_state(
            self._deps.transport,
            quorum,
            self._rules.place.group_rank,
            self._rules.timeouts.collective_s,
            self._deps.client.security,
            lambda: self._worker.check_losses(quorum),
            lambda: self._worker.check_source(quorum),
        )
        took_s = time.monotonic() - began_at
        self.state = state
        self.healed_from = f"{source}: {readable_size(state)} in {took_s:.2f} s"
        with self._worker.changing() as round_:
            round_.fetched()
        return ()


_ACTIONS: dict[type, Callable[[RoundRunner, Any], Orders]] = {
    AskManager: RoundRunner._ask,
    EnterQuorum: RoundRunner._enter,
    MeetMembers: RoundRunner._meet,
    LeaveMembers: RoundRunner._leave,
    ExpectNoState: RoundRunner._expect_nothing,
    BeginTraining: RoundRunner._begin_training,
    OfferState: RoundRunner._offer,
    RefuseState: RoundRunner._refuse_state,
    FetchState: RoundRunner._fetch,
    Warn: RoundRunner._warn,
}


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
