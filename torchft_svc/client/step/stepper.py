"""A worker's steps: starts rounds, watches their collectives, and ends each with a decision."""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from torchft_svc.client.process.background import BackgroundThread
from torchft_svc.client.process_groups.operations import CompletedWork
from torchft_svc.client.reduce.bucket_hook import BucketHook
from torchft_svc.client.reduce.collectives import NO_GRAPH, Collectives, check_arguments, uncompiled
from torchft_svc.client.reduce.operations import Kind, LaunchOrder, Mismatch
from torchft_svc.client.reduce.reduction import Launching, Reducing, Reduction
from torchft_svc.client.step.comparison import Finding, StateComparison
from torchft_svc.client.step.round import Dependencies, RoundRules, RoundRunner, ask_decision
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.client.step.state import MANAGER_KEY
from torchft_svc.client.step.updates import LostUpdate, UpdateWatch
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.layout import describe_layout
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.types import DifferenceReport
from torchft_svc.core.quorum.worker.clearing import ClearingPattern
from torchft_svc.core.quorum.worker.round import UNDER_WAY, Decide, Ready, RoundRequest
from torchft_svc.core.quorum.worker.step import Participation, StepState
from torchft_svc.errors import (
    ConfigError,
    OperationsDiffer,
    QuorumFailed,
    RequestRefused,
    StateDiverged,
    TornState,
)
from torchft_svc.rpc.descriptors import limit_error, shortage

log = logging.getLogger(__name__)

# The beginning of gloo's messages: the source file that raised.
_GLOO = re.compile(r"\[[^\]]*gloo[^\]]*\]")
_BETWEEN_STEPS = (Phase.IDLE, Phase.APPLYING)
# Between two steps a group may wait for one that waits for it in the next quorum. That wait must
# end long before the lighthouse continues without the group.
_BETWEEN_STEPS_S = 5.0
# The news that a group has left are on their way for some milliseconds.
_NEWS = timedelta(seconds=0.2)
_NOTHING_REDUCED = (
    "no gradient was averaged across groups in this step: each group has to call backward() once "
    "outside of no_sync() before step(), also where it has nothing to learn from (a loss of zero)"
)
_OTHER_PARAMETERS = (
    "the healed state freezes other parameters (requires_grad) than this step did: the next one "
    "heals again; if that does not end, give the manager use_async_quorum=False"
)
_NEW_PARAMETER = (
    "the module has got this parameter, or has begun to train it, after it was wrapped, so nothing "
    "averages its gradient: wrap the module again, in the same step on all groups, and give the "
    "optimizer the new parameters"
)
_UNSUMMED = (
    "nothing averages the gradients of %d parameters (the first one's shape is %s) that an "
    "optimizer updates: they will differ between groups. Wrap the module that they belong to, such "
    "as a loss with weights, together with the rest, or call Manager.allreduce for them"
)


class Stepper:
    """Implements the steps of `Manager`; for the training thread.

    Only `latch_error` may be called on any thread.
    """

    def __init__(
        self,
        deps: Dependencies,
        rules: RoundRules,
        worker: SharedRound,
        thread: BackgroundThread,
    ) -> None:
        self._deps = deps
        self._rules = rules
        self._common = rules.common(deps.pg)
        self._worker = worker
        worker.on_phase = deps.client.tell_phase
        self._thread = thread
        self._order = LaunchOrder(lambda: self.state.settled, lambda: self.state.num_commits)
        timeout_s = rules.timeouts.collective_s
        wish = self._wants_question
        self._collectives = self._make_collectives(timeout_s, self._latch_sum_error, wish=wish)
        # For reductions between two steps, whose errors fail no step.
        limit_s = min(timeout_s, _BETWEEN_STEPS_S)
        self._reports = self._make_collectives(
            limit_s, self._latch_report_error, between_steps=True
        )
        self.bucket_hook = BucketHook(self._allreduce_bucket)
        self._turn: weakref.ref[Launching] | None = None
        self._reducers: list[weakref.ref[Reducing]] = []
        self._layout: tuple[list[str], str] | None = None  # of these parts, see `layout`
        self.weights_version = 0  # see `Manager.weights_version`
        deps.registry.watch(
            lambda: [each for reducer in self.reducers() for each in reducer.parameters],
            lambda: [name for reducer in self.reducers() for name in reducer.replaced()],
        )
        self._thread_of_step: int | None = None
        self._has_warned = False  # about gradients that are not summed
        self._updated: list[int] = []  # what the optimizers update: the parameters' identities,
        self._apart: list[torch.Tensor] = []  # and those of them that no reducer sums
        self._loads = False  # a healed state is being loaded
        self._runner = RoundRunner(deps, rules, worker, thread)
        self._ends_update = False  # whether the caller reports the outcome of an update
        self._clearing = ClearingPattern()
        self._sums_begun = False  # whether no exception has ended `start` before
        self._updates = UpdateWatch(self._updates_state, self._averaged_gradient)
        self._sum_error: Exception | None = None  # of a sum, or of the way to the members
        self._has_shown_members = False  # in this step, to the program
        self._allows_heal = True  # this step
        self._comparison = StateComparison(self.reducers, self._compared_optimizers)

    def _make_collectives(
        self,
        timeout_s: float,
        latch: Callable[[Exception, int], None],
        *,
        between_steps: bool = False,
        wish: Callable[[], bool] | None = None,
    ) -> Collectives:
        return Collectives(
            self._deps.pg,
            timeout_s,
            latch,
            self._report_wait,
            self._deps.watchdog,
            order=self._order,
            checks_all=self._rules.checks_collectives,
            between_steps=between_steps,
            wish=wish,
            on_mismatch=self._note_mismatch,
        )

    def _note_mismatch(self, found: Mismatch) -> None:
        """Log that this group and another one were at different operations of an earlier step."""
        quorum = self._worker.round.quorum
        names = [] if quorum is None else quorum.replica_ids
        other = stable_name(names[found.member]) if found.member < len(names) else "another group"
        reason = (
            f"in step {found.step} the groups were at different operations. Here: {found.mine}. "
            f"In group {other}: {found.theirs}"
        )
        log.warning("%s. Call them in the same order and with the same sizes everywhere", reason)
        if found.is_misfit:
            with self._worker.changing() as round_:
                round_.step.record_misfit(reason)

    @property
    def state(self) -> StepState:
        """A frozen view of the step."""
        return self._worker.round.step.state

    # -- the parts of a step ---------------------------------------------------------------------

    def start(self, request: RoundRequest) -> None:
        """See `Manager.start_quorum`."""
        self._check_not_reading()
        self._sums_begun = False
        self._end_last_step()
        for reducer in self.reducers():
            reducer.begin_step()
        self._clearing.begin_step()
        self._allows_heal = request.allow_heal
        runner = self._runner
        runner.withhold_rest()
        is_first = self.state.epoch == 0
        if is_first and self._worker.round.will_wait_for_heal(request.allow_heal):
            # Whether it heals depends on the other groups; the program must not depend on that.
            self.weights_version += 1
        broken = self._deps.pg.errored()
        try:
            self._thread_of_step = threading.get_ident()
            self._has_shown_members = False
            with self._worker.changing() as round_:
                waits = round_.waits_for_quorum
                ready = round_.begin_step(request, time.monotonic(), broken)
            self._begin_sums()
            self._reports.begin(self.state.epoch)
            self._deps.registry.gate.open()
            if self._worker.round.keeps_quorum:
                self._leave_members(ready)
                return
            runner.begin_round(ready, allow_heal=request.allow_heal)
        except BaseException as error:
            runner.cancel_round(QuorumFailed(f"the step was not begun ({error!r})"))
            raise
        if waits:
            self.wait_for_quorum()
            if self._heals_first():
                runner.wait_until_over()
                try:
                    self._apply_heal()
                finally:
                    self._deps.registry.gate.open()

    def _begin_sums(self) -> None:
        self._sum_error = None
        self._order.begin(lambda: self._worker.round.has_connected, self.state.step)
        self._collectives.begin(self.state.epoch)
        self._sums_begun = True

    def sum_again(self, num_launched: int) -> bool:
        """See `Manager._sum_again`; ``num_launched``: the sums that the caller has launched."""
        if num_launched != self._collectives.num_launched or not self._may_sum_again():
            return False
        log.info("step %d is summed in another quorum: %s", self.state.step, self._why_again())
        self._collectives.give_up()
        if self._deps.pg.errored() is None:
            self._deps.leave_members(QuorumFailed("another quorum follows"))
        runner = self._runner
        try:
            with self._worker.changing() as round_:
                ready = round_.sum_again(time.monotonic())
            self._begin_sums()
            runner.begin_round(ready, allow_heal=self._allows_heal)
        except BaseException as error:
            runner.cancel_round(QuorumFailed(f"the sums were not begun again ({error!r})"))
            raise
        self.wait_until_ready()
        return True

    def _may_sum_again(self) -> bool:
        """Whether a member has left the term, which is the only error of this step; and the program
        has seen nothing of the members that will be different."""
        error, round_ = self.state.error, self._worker.round
        is_of_sums = error is self._sum_error and not isinstance(error, OperationsDiffer)
        if not (round_.awaits_losses and is_of_sums) or self._has_shown_members:
            return False
        if len(self.reducers()) > 1 or not self._runner.is_over:
            return False
        if not round_.may_sum_again():  # its end may have come faster than the news of it
            self._deps.client.listen(_NEWS)
        with self._worker.changing() as round_:
            return round_.may_sum_again()

    def _why_again(self) -> str:
        return self._worker.who_is_lost() or str(self.state.error)

    def show_participation(self) -> Participation:
        """Who contributes in this step; for the program, whose step may depend on it then."""
        self.wait_until_ready()
        self._has_shown_members = True
        return self.state.participation

    def _heals_first(self) -> bool:
        return self._worker.round.heals_first

    def _end_last_step(self) -> None:
        """Wait for the round of the last step, and clean up after an interrupt of this wait."""
        if self._runner.was_interrupted:
            self._runner.cancel_round(QuorumFailed("another step was begun"))
        # Before the end of its round: a heal may wait for groups that wait for sums of this worker,
        # or for the end of its connections.
        self.wait_until_ready()
        was_given_up = self._give_up()
        for reducer in self.reducers():  # an unfinished pass ends with its step
            reducer.settle()
        self._collectives.give_up()
        self._runner.wait_until_over()
        self._reports.finish()
        if self.state.phase is Phase.APPLYING and not self._ends_update:
            self.end_update()
        elif self.state.phase in (Phase.APPLYING, Phase.VOTING):
            self.lose_update("it was interrupted")
        if was_given_up:
            _require_files()

    def _give_up(self) -> bool:
        """End a step without a vote, such as one whose backward pass has raised; returns whether
        there was one."""
        state = self.state
        if state.phase in _BETWEEN_STEPS:
            return False
        with self._worker.changing() as round_:
            ready = round_.abandon_step()
        if ready.leave is None:
            return False
        self._log_discarded(state, "the program began another one")
        if self._deps.pg.errored() is None:
            self._leave_members(ready)
        return True

    def _leave_members(self, ready: Ready) -> None:
        if ready.leave is not None:
            self._deps.leave_members(ready.leave)

    def wait_for_quorum(self) -> None:
        """See `Manager.wait_quorum`."""
        if self._is_between_steps():
            return
        self._check_under_way()
        self.wait_until_ready()
        self._worker.round.check_left()
        if self._worker.round.error is not None:
            raise self._worker.round.error

    def wait_until_ready(self) -> None:
        """Wait until the members are known, if a step is under way; raises nothing.

        It needs no deadline: all waits of the background thread have one.
        """
        self._runner.wait_until_ready()

    def allreduce(
        self,
        tensor: torch.Tensor,
        quantized: bool,
        op: ReduceOp.RedOpType,
        kind: Kind = Kind.AVERAGE,
    ) -> dist.Work:
        """See `Manager.allreduce`."""
        check_arguments(tensor, quantized, op)
        if self._is_between_steps():
            return self._report(tensor, op)
        if not self._can_reduce():
            return CompletedWork(tensor)
        return self._collectives.allreduce(tensor, op, self.state.participation, kind)

    def _allreduce_bucket(self, bucket: torch.Tensor, kind: Kind) -> dist.Work:
        """See `Manager.allreduce_grad`; ``kind``: which pass of torch's wrapper it belongs to."""
        check_arguments(bucket, False, ReduceOp.AVG)
        if not self._can_reduce():
            return CompletedWork(bucket)
        return self._collectives.allreduce(bucket, ReduceOp.AVG, self.state.participation, kind)

    def _is_between_steps(self) -> bool:
        state = self.state
        return state.epoch > 0 and state.phase in _BETWEEN_STEPS

    def _report(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> dist.Work:
        """Reduce among the members of the last quorum, if they are still connected."""
        participation = self.state.participation
        if self._deps.pg.errored() is not None or not participation.num_participants:
            return CompletedWork(tensor)
        return self._reports.allreduce(tensor, op, participation)

    def _latch_report_error(self, error: Exception, epoch: int) -> None:
        """No step is discarded, but the members reconnect, because not all took part."""
        with self._worker.changing() as round_:
            if not round_.step.latch(error, epoch):
                return
        log.warning("a reduction between two steps failed, its tensor stays as it was: %s", error)
        self._deps.leave_members(error)

    def scale(self) -> float | None:
        """See `Manager.reduction_scale`."""
        if not self._can_reduce():
            return None
        participation = self.state.participation
        if participation.participating_rank is None:
            return 0.0
        return 1.0 / participation.num_participants

    def launch_sum(
        self, tensor: torch.Tensor, carrier: torch.Tensor | None = None
    ) -> Reduction | None:
        """See `Manager.launch_sum`; ``carrier``: see `Collectives.launch`."""
        return self._collectives.launch(tensor, carrier=carrier)

    def sums_alone(self) -> bool:
        """See `Manager._sums_alone`."""
        return self._deps.pg.size() == 1

    def _wants_question(self) -> bool:
        return self._worker.round.wants_question

    def take_turn(self, reducer: Launching, *, is_last: bool) -> bool:
        """Whether ``reducer`` may launch the sums of its pass now, or has to wait for another one.

        The sums of two wrappers must not interleave, and their passes must begin in the same order
        in all groups. ``is_last``: the pass has ended; the previous wrapper's pass has ended, too,
        or encloses this one.
        """
        reducers = self.reducers()
        holder = None if self._turn is None else self._turn()
        if len(reducers) < 2:
            return True
        if holder is not None and holder is not reducer and holder.is_launching():
            if not is_last:
                return False
            holder.launch_rest(reducer.graph)
        self._turn = weakref.ref(reducer)
        if self._can_reduce():
            wrapper = next(i for i, each in enumerate(reducers) if each is reducer)
            self._collectives.agree(reducer.first, wrapper)
        return True

    def add_reducer(self, reducer: Reducing) -> None:
        """See `Manager.register_reducer`."""
        self._reducers = [weakref.ref(each) for each in (*self.reducers(), reducer)]
        self._updated = []  # it may sum what was apart

    def remove_reducer(self, reducer: Reducing) -> None:
        """Call ``reducer`` no more; idempotent."""
        self._reducers = [weakref.ref(each) for each in self.reducers() if each is not reducer]

    def reducers(self) -> list[Reducing]:
        """The registered reducers that are alive, in the order of registration."""
        return [reducer for ref in self._reducers if (reducer := ref()) is not None]

    def layout(self) -> str:
        """What must be equal in all groups: the known layouts, and the common settings."""
        reducers = self.reducers()
        parts = [reducer.layout for reducer in reducers if reducer.layout]
        if self._layout is None or self._layout[0] != parts:
            names = [name for reducer in reducers for name in reducer.names]
            self._layout = parts, describe_layout(parts, self._common, names)
        return self._layout[1]

    def shown_step(self) -> int:
        """See `Manager.current_step`: during a heal, on the training thread, the step of the healed
        state once gradients are summed.

        It does not wait for the state: the others send that when their step ends, and may wait for
        a sum of this worker until then.
        """
        state = self.state
        if (
            state.pending_heal is not None
            and not self._loads  # the program's load function may ask for the step
            and self._collectives.launched
            and self._thread_of_step == threading.get_ident()
            and not _is_in_pass()
        ):
            return state.pending_heal.step
        return state.step

    def is_fresh(self) -> bool:
        """See `Manager.has_fresh_step`."""
        return self._has_begun() and not self._collectives.launched

    def _has_begun(self) -> bool:
        begun = self.state.phase not in (*_BETWEEN_STEPS, Phase.VOTING)
        round_ = self._worker.round
        was_refused = round_.error is not None and round_.waits_for_quorum  # `start` has raised it
        return begun and not was_refused

    def continues_step(self, site: Hashable) -> bool:
        """See `Manager._continues_step`."""
        sums = self._collectives
        if (
            not self._has_begun()
            or not self._sums_begun
            or (sums.unfinished() is not None and not _is_in_pass())
        ):
            return False
        num_launched = max(1, sums.num_launched) if sums.launched else 0
        has_failed = self.state.error is not None
        return self._clearing.continues_step(site, num_launched, has_failed=has_failed)

    def decide(self, timeout_s: float, *, ends_update: bool = False) -> bool:
        """See `Manager.should_commit`.

        ``ends_update``: the caller reports the outcome of the update with `end_update` or
        `lose_update`. Otherwise the steps of the optimizers show it, or a call of `lose_update`.
        """
        self._check_not_reading()
        self._ends_update = ends_update
        try:
            committed = self._decide(timeout_s)
            self._clearing.record_vote()
            if committed and not ends_update:
                self._updates.open()
            return committed
        except BaseException as error:
            self._interrupt(error)
            raise

    def end_update(self) -> None:
        """Record that the present update, if any, was applied, unless the steps of the optimizers
        show otherwise; from now on the weights may be read again."""
        if self.state.phase is Phase.APPLYING:
            loss = self._updates.end(self.weights_version)
            if loss is not None:
                self._lose_unnoticed(loss)
                return
        with self._worker.changing() as round_:
            if self.state.phase is Phase.APPLYING:
                round_.step.end_update()
        self._deps.registry.gate.open()

    def prepare_to_read(self) -> None:
        """The program is about to read its state, see `Manager.consistent_state`.

        On the training thread it is not changing the state then, so a present update is over.

        Raises:
            RequestRefused: it is changing it, further up in the calls of this thread.
        """
        is_other = threading.get_ident() != self._thread_of_step
        if is_other or self._deps.registry.gate.is_reading():
            return
        applies = self.state.phase is Phase.APPLYING
        if self._loads or (applies and (self._ends_update or self._updates.is_under_way())):
            raise RequestRefused(
                "this thread is changing the state: read it after the update, not in the block of "
                "commit(), in a hook of the optimizer or in a load function"
            )
        if applies:
            self.end_update()

    def check_whole(self) -> None:
        """Check that the program may save the weights; no check on the background thread (H11).

        There the manager reads the state to heal it, or to offer it after this check. A refusal
        would end each heal of spoiled weights, which nothing else can mend.

        Raises:
            RequestRefused: the weights are not those of a step.
        """
        if not self._thread.is_current:
            with self._worker.changing() as round_:
                round_.step.check_whole()

    def _check_not_reading(self) -> None:
        if self._deps.registry.gate.is_reading():
            raise RequestRefused(
                "this thread reads the state, which a step may change: leave the block of "
                "consistent_state() first"
            )

    def allow_read(self) -> None:
        """See `Manager.allow_state_dict_read`; ends the update unless `decide`'s caller does."""
        if self._ends_update:
            self._deps.registry.gate.open()
        else:
            self.end_update()

    def find_lost_update(self) -> None:
        """Record the present update as lost if an exception that was caught has ended it."""
        if self.state.phase is Phase.APPLYING:
            loss = self._updates.find_failure()
            if loss is not None:
                self._lose_unnoticed(loss)

    def _lose_unnoticed(self, loss: LostUpdate) -> None:
        """Record an update as lost although the program goes on as if it were applied."""
        self.lose_update(loss.reason if loss.is_spoiled else "", why=loss.reason)

    def report_spoiled(self, error: BaseException) -> None:
        """See `Manager.report_spoiled_update`."""
        self._updates.close()
        with self._worker.changing() as round_:
            step = self.state.step
            round_.step.lose_update(repr(error))
        log.warning("the update to step %d was not applied: %r was reported", step, error)

    def lose_update(self, spoiled_by: str = "", *, why: str = "interrupted") -> None:
        """The present update, if any, has not been applied; see `StepMachine`."""
        self._updates.close()
        with self._worker.changing() as round_:
            step, phase = self.state.step, self.state.phase
            if phase is Phase.APPLYING:
                round_.step.lose_update(spoiled_by)
            else:
                round_.step.interrupt()
        if phase is Phase.APPLYING:
            log.warning("the update to step %d was not applied: %s", step, spoiled_by or why)
        self._deps.registry.gate.open()

    def _updates_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` updates what is averaged across groups, or what groups heal by."""
        updated = [each for group in optimizer.param_groups for each in group["params"]]
        summed = {id(each) for reducer in self.reducers() for each in reducer.parameters}
        known = summed.union(map(id, self._deps.registry.updated_parameters()))
        if any(id(each) in known for each in updated):
            return True
        return self._deps.registry.holds_any(updated)

    def _averaged_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient of ``parameter`` that was averaged in this step, if it is still there."""
        owners = [
            reducer
            for reducer in self.reducers()
            if any(each is parameter for each in reducer.parameters)
        ]
        if owners and not any(reducer.has_averaged for reducer in owners):
            return None  # what is there is of an earlier step, or of this group alone
        if parameter.grad is not None:
            return parameter.grad
        averages = (reducer.average_of(parameter) for reducer in owners)
        return next((each for each in averages if each is not None), None)

    def _interrupt(self, error: BaseException) -> None:
        """An exception has ended the vote: its decision is lost, and no update is applied."""
        with self._worker.changing() as round_:
            if self.state.phase in UNDER_WAY:
                round_.step.latch(QuorumFailed(f"the vote was interrupted ({error!r})"))
            round_.step.interrupt()
        self._deps.registry.gate.open()

    def _decide(self, timeout_s: float) -> bool:
        self._check_under_way()
        # First what other groups wait for: a healing group may get its state when they end their
        # step.
        self.wait_until_ready()
        self._worker.round.check_left()
        self._settle()
        self._collectives.launch_end()
        finding = self._compare_states()
        if self.state.error is not None and self._deps.pg.errored() is not None:
            self._collectives.give_up()  # as in `_end_last_step`
        self._runner.wait_until_over()
        self._worker.round.check_left()
        self._collectives.finish()
        wishes = self._collectives.wishes()
        self._runner.offer_rest()
        swallowed = self._deps.pg.failure()  # an error that the group did not raise
        if swallowed is not None and self.state.error is None:
            self._fail(swallowed)
        self._apply_heal()
        self._protect_state()
        if self._worker.round.needs_news(time.monotonic()):
            self._deps.client.listen()
        with self._worker.changing() as round_:
            if wishes is not None:
                round_.record_wishes(*wishes)
            output = round_.begin_vote(time.monotonic(), timeout_s)
            if isinstance(output, Decide) and output.committed:  # a lone worker waits for nobody
                round_.apply_decision(output)
                return True
            vote = round_.ballot().should_commit
        state = self.state
        decided = output
        if not isinstance(decided, Decide):
            decided = ask_decision(self._deps.client, self._worker, decided)
        if not decided.committed:
            self._log_discarded(state, self._why_not(vote))
        self._end_vote(decided, finding)
        if decided.committed:
            return True
        self._deps.registry.gate.open()
        if finding is not None and self._rules.checks.on_difference == "stop":
            raise _diverged(finding)
        _require_files(state.error)
        with self._worker.changing() as round_:
            round_.check_next()
        return False

    def _compare_states(self) -> Finding | None:
        """Compare this group's state with the others' if this step does that (rule C1); returns the
        difference that was found."""
        round_, state = self._worker.round, self.state
        if not round_.compares_states or not self._can_compare() or not self._can_reduce():
            return None
        quorum, step = round_.quorum, round_.common_step
        assert quorum is not None
        is_whole = state.error is None and not state.unhealed and not state.spoiled
        result = self._comparison.compare(
            self._collectives, quorum, step, round_.checks.since, is_compared=is_whole
        )
        finding = None if result is None else result.finding
        if finding is not None:
            self._handle_difference(finding)
        elif result is not None and result.is_compared and round_.checks.is_settled(step):
            with self._worker.changing() as round_:
                round_.step.confirm_state()
        return finding

    def _can_compare(self) -> bool:
        """Whether models are wrapped, and the process group sums exactly; equal in all groups."""
        is_exact = self._deps.pg.sums_exactly
        return is_exact and self._collectives.has_device and bool(self.reducers())

    def _compared_optimizers(self) -> list[torch.optim.Optimizer]:
        """The registered optimizers, or those that the program has stepped in its last update."""
        return self._deps.registry.optimizers or self._updates.last_optimizers()

    def _handle_difference(self, finding: Finding) -> None:
        """Report a difference, and discard the step unless it is only to be logged.

        The members are not left: they find the same, maybe a moment later.
        """
        report = DifferenceReport(finding.quorum_id, finding.step, finding.sentence)
        self._deps.client.report_difference(report)
        if self._rules.checks.on_difference == "warn":
            if finding.is_news:
                log.warning("%s", finding.sentence)
            return
        with self._worker.changing() as round_:
            round_.step.latch(_diverged(finding))

    def _end_vote(self, decided: Decide, finding: Finding | None) -> None:
        """Record the decision, and this group's state as lost if a check has found it to differ."""
        heals = self._rules.checks.on_difference == "heal"
        with self._worker.changing() as round_:
            try:
                round_.apply_decision(decided)
            finally:
                if finding is not None and finding.is_ours and heals and not decided.committed:
                    round_.step.lose_state(finding.sentence)

    def latch_error(self, error: Exception, epoch: int) -> None:
        """Latch an error of the step with this ``epoch``; errors of earlier steps are ignored."""
        with self._worker.changing() as round_:
            is_first = self.state.error is None
            ready = round_.record_error(error, epoch)
            state = self.state
        if is_first and state.error is error:  # the warning comes at the end of the step
            log.debug("step %d cannot be committed", state.step, exc_info=error)
        self._leave_members(ready)

    def _latch_sum_error(self, error: Exception, epoch: int) -> None:
        """As `latch_error`, for errors of the sums: not of the program."""
        if epoch == self.state.epoch and self._sum_error is None:
            self._sum_error = error
        self.latch_error(error, epoch)

    def _why_not(self, vote: bool) -> str:
        """Why a step without an error is not committed."""
        if vote:
            return "another worker of this group cannot commit it"
        num = self.state.participation.num_participants
        return f"{num} of at least {self._rules.min_replica_size} groups contribute to it"

    def _log_discarded(self, state: StepState, otherwise: str) -> None:
        """Log which group was lost, if any, rather than gloo's message about it."""
        error = state.error.reason if isinstance(state.error, QuorumFailed) else state.error
        reason = self._worker.who_is_lost() or str(error or "") or otherwise
        if _GLOO.match(reason):
            reason = "the connection to another group has ended"
        log.warning("step %d is discarded: %s", state.step, reason)

    def _report_wait(self, waits: bool) -> None:
        """Tell the manager that this worker waits for other groups, and has not hung itself."""
        self._worker.report_phase(Phase.QUORUM if waits else self.state.phase)

    # -- inside ----------------------------------------------------------------------------------

    def _check_under_way(self) -> None:
        if self.state.phase in _BETWEEN_STEPS:
            raise RequestRefused(
                "there is no step under way: begin it with zero_grad or start_quorum"
            )

    def _settle(self) -> None:
        """Latch an error if no gradients, or not all, were averaged."""
        sums = self._collectives
        reducers = self.reducers()
        problems = [reducer.settle() for reducer in reducers]
        for error in filter(None, [*problems, sums.unfinished()]):
            self._fail(error)
        self._check_new_parameters(reducers)
        if reducers and not sums.launched and self.state.error is None:
            self._fail(RequestRefused(_NOTHING_REDUCED))
        if not self._collectives.has_averages:
            self._warn_of_unsummed(reducers)

    def _check_new_parameters(self, reducers: list[Reducing]) -> None:
        """Raise `ConfigError` if a wrapped module trains a parameter that nothing sums."""
        found = [each for reducer in reducers for each in reducer.unsummed()]
        if not found:
            return
        summed = {id(each) for reducer in reducers for each in reducer.parameters}
        names = [name for name, parameter in found if id(parameter) not in summed]
        if not names:  # the module was wrapped again, and the wrapper before still lives
            return
        error = ConfigError(names[0], f"one of {len(names)} new parameters", _NEW_PARAMETER)
        if not self._collectives.has_averages:
            self._fail(error)
            raise error
        if not self._has_warned:  # the program may average it by hand
            self._has_warned = True
            log.warning("%s", error)

    def _warn_of_unsummed(self, reducers: list[Reducing]) -> None:
        """Warn, once, about gradients that are not averaged, so that groups would differ."""
        if self._has_warned or not reducers or not all(each.parameters for each in reducers):
            return  # it is not known what is summed
        updated = self._deps.registry.updated_parameters()
        present = list(map(id, updated))
        if present != self._updated or self._worker.round.has_connected:
            summed = {id(each) for reducer in reducers for each in reducer.parameters}
            self._updated = present
            self._apart = [each for each in updated if id(each) not in summed]
        apart = [each for each in self._apart if each.grad is not None]
        if apart:
            self._has_warned = True
            log.warning(_UNSUMMED, len(apart), str(tuple(apart[0].shape)))

    def _fail(self, error: Exception) -> None:
        """Latch ``error``, and leave: the others wait for sums that this worker will not launch.

        This also holds for a group that heals, or a spare: it sums zeros.
        """
        self.latch_error(error, self.state.epoch)
        if self._deps.pg.errored() is None:
            self._deps.leave_members(error)

    def _can_reduce(self) -> bool:
        """See `Round.may_reduce`; broken connections are an error of the step."""
        self._check_under_way()
        self.wait_until_ready()
        may_reduce = self._worker.round.may_reduce
        broken = self._deps.pg.errored() if may_reduce else None
        if broken is not None and self.state.error is None:
            self._latch_sum_error(broken, self.state.epoch)
        return may_reduce and broken is None

    def _protect_state(self) -> None:
        """Protect the state from readers before the update; if that fails, there is no update."""
        state = self.state
        if state.error is not None:
            return
        try:
            self._deps.registry.gate.shut(self._rules.timeouts.collective_s)
            self._deps.transport.disallow_checkpoint()
        except Exception as error:
            log.exception("the state that is being served cannot be kept")
            self.latch_error(error, state.epoch)

    def _apply_heal(self) -> None:
        """Load a fetched state, and then take over its step."""
        runner = self._runner
        if runner.quorum is None or runner.state is None:
            return
        state = runner.state
        try:
            self._loads = True
            self._deps.registry.gate.shut(self._rules.timeouts.collective_s)
            self._deps.registry.check(state, runner.quorum.recover_src_manager_address)
            self._deps.transport.retract_checkpoint()
            self.weights_version += 1
            trains_others = self._deps.registry.load(state)
            with self._worker.changing() as round_:
                counters = state[MANAGER_KEY]
                round_.step.apply_heal(counters["batches_committed"], counters.get("quorum_id", 0))
            log.info("healed to step %d from %s", self.state.step, runner.healed_from)
            if trains_others and not self._heals_first():
                self.latch_error(RequestRefused(_OTHER_PARAMETERS), self.state.epoch)
        except ConfigError as error:  # it would be so again with the next heal
            self._fail_heal(TornState("the group healed from", str(error)))
            self.latch_error(error, self.state.epoch)
            raise
        except Exception as error:
            log.exception("the healed state cannot be loaded")
            self._fail_heal(error)
            self.latch_error(error, self.state.epoch)
        except BaseException as error:
            self._fail_heal(TornState("the group healed from", f"interrupted by {error!r}"))
            raise
        finally:
            self._loads = False
            runner.state = None

    def _fail_heal(self, error: Exception) -> None:
        with self._worker.changing() as round_:
            if self.state.pending_heal is not None:
                round_.step.fail_heal(error)


def _is_in_pass() -> bool:
    """Whether this call is made inside of a backward pass."""
    return torch._C._current_graph_task_id() != NO_GRAPH


class Update:
    """The block that applies the update of a step, if the step is committed.

    Entering it votes; the value is True for a commit. A block that an exception ends has not
    applied the update: its step does not count here. ``begun`` is False as long as the block has
    certainly changed nothing; otherwise the weights count as spoiled.
    """

    def __init__(self, stepper: Stepper, timeout_s: float) -> None:
        self._stepper = stepper
        self._timeout_s = timeout_s
        self.begun = True

    @uncompiled
    def __enter__(self) -> bool:
        return self._stepper.decide(self._timeout_s, ends_update=True)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.end(error)

    @uncompiled
    def end(self, error: BaseException | None) -> None:
        """The block has ended, by ``error`` or successfully; idempotent."""
        if error is None:
            self._stepper.end_update()
        else:
            self._stepper.lose_update(repr(error) if self.begun else "")


def _require_files(error: Exception | None = None) -> None:
    """Check, after a step was discarded by ``error``, that this process can open a file.

    Raises:
        ConfigError: it cannot, or could not then; so no further step could be committed either.
    """
    if short := shortage(error):
        raise limit_error(short)


def _diverged(finding: Finding) -> StateDiverged:
    return StateDiverged(finding.sentence, finding.step, finding.groups, finding.last_equal)
