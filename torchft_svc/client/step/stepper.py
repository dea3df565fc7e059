"""A worker's steps: begins rounds, waits for their sums, and ends each with a decision."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable
from datetime import timedelta

import torch
from torch.distributed import ReduceOp

from torchft_svc.client.process.background import BackgroundThread
from torchft_svc.client.process.profiling import profiled
from torchft_svc.client.reduce.collectives import NO_GRAPH, uncompiled
from torchft_svc.client.step.comparison import Finding, StateChecks
from torchft_svc.client.step.copies import CopyOffers, fetch_copy
from torchft_svc.client.step.data_positions import (
    ALONE,
    DataPositions,
    EnteredStep,
    needs_another_step,
)
from torchft_svc.client.step.round import Dependencies, RoundRules, RoundRunner, ask_decision
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.client.step.sums import BETWEEN_STEPS, StepSums, shown_reason
from torchft_svc.client.step.weights import Weights
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.copies import CHECK_S, whole_copy
from torchft_svc.core.quorum.tally import EventKind, GroupEvent
from torchft_svc.core.quorum.worker.clearing import ClearingPattern
from torchft_svc.core.quorum.worker.round import UNDER_WAY, Decide, RoundRequest
from torchft_svc.core.quorum.worker.step import StepState
from torchft_svc.errors import PeerError, QuorumFailed, RequestRefused
from torchft_svc.rpc.descriptors import limit_error, shortage

log = logging.getLogger(__name__)


class Stepper:
    """Begins and ends the steps of `Manager`; for the training thread.

    ``sums`` are those of the present step, ``weights`` what it heals and updates.
    """

    def __init__(
        self, deps: Dependencies, rules: RoundRules, worker: SharedRound, thread: BackgroundThread
    ) -> None:
        self._deps = deps
        self._rules = rules
        self._worker = worker
        worker.on_phase = deps.client.report_phase
        self._runner = RoundRunner(deps, rules, worker, thread)
        self.sums = StepSums(deps, rules, worker, self._runner)
        self.weights = Weights(deps, rules, worker, self._runner, self.sums, thread)
        self.copies = CopyOffers(deps, rules, worker, lambda: self.weights.version)
        self._checks = StateChecks(deps, rules.checks, worker, self.sums, self._optimizers)
        self._clearing = ClearingPattern()
        self.data = DataPositions(deps.registry)
        self.sums.check_data = lambda: self.data.why_not_summed(self.state.participation)
        self.sums.may_divide, self.sums.divide_anew = self._may_divide, self._divide_anew
        deps.registry.watch(
            self.sums.parameters,
            lambda: [name for reducer in self.sums.reducers() for name in reducer.replaced()],
        )

    @property
    def state(self) -> StepState:
        """A frozen view of the step."""
        return self._worker.round.step.state

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The registered optimizers, or those that the program has stepped in its last update."""
        return self._deps.registry.optimizers or self.weights.last_optimizers()

    # -- the beginning of a step -----------------------------------------------------------------

    def start(self, request: RoundRequest) -> None:
        """See `Manager.start_quorum`."""
        runner, weights, sums = self._runner, self.weights, self.sums
        weights.check_not_reading()
        sums.has_begun = False
        sums.count_waits()
        self._worker.time_use.begin_step(time.monotonic())
        self._end_last_step()
        self.data.begin_step(self.state.step)
        sums.clear_averages()
        self._clearing.begin_step()
        runner.withhold_rest()
        is_first = self.state.epoch == 0
        if is_first and self._worker.round.will_wait_for_heal(request.allow_heal):
            # Whether it heals depends on the other groups; the program must not depend on that.
            weights.version += 1
        looks_for_copy = self._rules.copy_every > 0 and request.allow_heal
        if looks_for_copy and self.state.may_begin_from_copy:
            self._begin_from_copy()
        broken = self._deps.pg.errored()
        try:
            with self._worker.changing() as round_:
                ready = round_.begin_step(request, time.monotonic(), broken)
                waits = round_.waits_for_quorum
            sums.begin_step()
            weights.begin_step()
            self.copies.begin_step()
            if not self._worker.round.keeps_quorum:
                runner.begin_round(ready)
            elif ready.leave is not None:
                self._deps.leave_members(ready.leave)
        except BaseException as error:
            runner.cancel_round(QuorumFailed(f"the step was not begun ({error!r})"))
            raise
        if waits and not self._worker.round.keeps_quorum:
            self.wait_for_quorum()
            if looks_for_copy:
                self._check_no_copy()
            if self._worker.round.heals_first:
                runner.wait_until_over()
                try:
                    weights.apply_heal()
                finally:
                    self._deps.registry.gate.open()

    def _begin_from_copy(self) -> None:
        """Load the newest copy of this worker's state, if no group with a state lives (rule B5)."""
        found = fetch_copy(self._deps, self._rules, self.state.step)
        if found is not None:
            self.weights.load_copy(found.state, found.copy)

    def _check_no_copy(self) -> None:
        """Discard the first step of a job that begins anew although a copy is held (rule B5).

        The groups with its state may have died after this one has looked for a copy.
        """
        quorum = self._worker.round.quorum
        if quorum is None or quorum.max_step > 0 or self.state.step > 0:
            return
        held = ""
        try:
            view = self._deps.client.members_and_copies(timedelta(seconds=CHECK_S))
            place = self._rules.place
            copy = whole_copy(view, place.group_rank, place.group_world_size, self.state.step)
            if copy is not None:
                held = f"a copy of step {copy.step} is held: the job begins there"
        except RequestRefused:
            pass  # from a lighthouse that knows no copies
        except PeerError as error:
            held = f"it is not known whether a copy of the state is held: {error}"
        if held:
            self._runner.fail_step(QuorumFailed(held))

    def _end_last_step(self) -> None:
        """Wait for the round of the last step, and clean up after an interrupt of this wait."""
        if self._runner.was_interrupted:
            self._runner.cancel_round(QuorumFailed("another step was begun"))
        # Before the end of its round: a heal may wait for groups that wait for sums of this worker,
        # or for the end of its connections.
        self._runner.wait_until_ready()
        was_given_up = self._give_up()
        self.sums.abandon_step()
        self._runner.wait_until_over()
        self.sums.finish_reports()
        self.weights.end_last_update()
        if was_given_up:
            _require_files()

    def _give_up(self) -> bool:
        """End a step without a vote, such as one whose backward pass has raised.

        Returns whether there was one.
        """
        state = self.state
        if state.phase in BETWEEN_STEPS:
            return False
        with self._worker.changing() as round_:
            ready = round_.abandon_step()
        if ready.leave is None:
            return False
        self._record_discard(state, "the program began another one", is_given_up=True)
        if self._deps.pg.errored() is None:
            self._deps.leave_members(ready.leave)
        return True

    def wait_for_quorum(self) -> None:
        """See `Manager.wait_quorum`."""
        if self.sums.is_between_steps():
            return
        self.sums.check_under_way()
        self._runner.wait_until_ready()
        self._worker.round.check_left()
        if self._worker.round.error is not None:
            raise self._worker.round.error

    def wait_for_export(self) -> None:
        """Wait until no function of the program is saving the state for others, in this step.

        A group that heals waits for its members only: the others may wait for its sums before they
        send it the rest of the state.
        """
        self._runner.wait_until_ready()
        if self.state.pending_heal is None:
            self._runner.wait_until_over()

    def shown_step(self) -> int:
        """See `Manager.current_step`: during a heal, the step of the healed state.

        On the training thread, once gradients are summed. It does not wait for the state: the
        others send that when their step ends, and may wait for a sum of this worker until then.
        """
        state = self.state
        if (
            state.pending_heal is not None
            and not self.weights.loads  # the program's load function may ask for the step
            and self.sums.collectives.launched
            and self.weights.is_thread_of_step
            and not _is_in_pass()
        ):
            return state.pending_heal.step
        return state.step

    def is_fresh(self) -> bool:
        """See `Manager.has_fresh_step`."""
        return self._has_begun() and not self.sums.collectives.launched

    def _has_begun(self) -> bool:
        begun = self.state.phase not in (*BETWEEN_STEPS, Phase.VOTING)
        round_ = self._worker.round
        was_refused = round_.error is not None and round_.waits_for_quorum  # `start` has raised it
        return begun and not was_refused

    def continues_step(self, site: Hashable) -> bool:
        """Whether ``zero_grad()``, called at ``site``, belongs to the step that is under way."""
        sums = self.sums.collectives
        if (
            not self._has_begun()
            or not self.sums.has_begun
            or (sums.unfinished() is not None and not _is_in_pass())
        ):
            return False
        num_launched = max(1, sums.num_launched) if sums.launched else 0
        has_failed = self.state.error is not None
        return self._clearing.continues_step(site, num_launched, has_failed=has_failed)

    def needs_another_step(self, read_in: int) -> bool:
        """See `data_positions.needs_another_step`."""
        sums, state = self.sums, self.state
        return needs_another_step(
            state,
            read_in,
            self._has_begun() and sums.has_begun,
            lambda: state.error is not None or sums.collectives.unfinished() is not None,
            self.data.why_read_again,
        )

    def enter_for_loader(self) -> EnteredStep:
        """The step that is under way, for a loader; waits until its members are known."""
        if self.data.divisible is not None:
            participation = self.sums.wait_for_members()
        elif self._guesses_alone():
            participation = ALONE
        else:
            participation = self.sums.show_participation()
        return EnteredStep(
            self.state.epoch, participation.participating_rank, participation.num_participants
        )

    def sum_kept(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Manager.sum_kept`."""
        with self.data.summing_kept():
            works = [self.sums.allreduce(each, False, ReduceOp.SUM) for each in tensors]
        for work in works:
            work.wait()

    def _may_divide(self) -> bool:
        """Whether no loader stands against summing this step again (rules E9, D11)."""
        return self.data.divisible is None or self.data.divisible.may_divide()

    def _divide_anew(self) -> bool:
        """See `Divisible.divide_anew`."""
        divisible = self.data.divisible
        return divisible is not None and divisible.divide_anew(self.enter_for_loader())

    def _guesses_alone(self) -> bool:
        """Whether a loader may read before the quorum is known, as this was the only group.

        Not in a group of several workers, which have to guess alike; nor if it is known that others
        come, or after a step that was discarded.
        """
        state, round_ = self.state, self._worker.round
        last = round_.peers.quorum
        if last is None or state.failures or not state.settled or round_.peers.num_waiting:
            return False
        is_alone = last.replica_world_size == 1 == self._rules.place.group_world_size
        if is_alone and not self._runner.is_ready and state.pending_heal is None:
            self.data.guess_alone()
            return True
        return False

    # -- the vote --------------------------------------------------------------------------------

    def decide(self, timeout_s: float, *, ends_update: bool = False) -> bool:
        """See `Manager.should_commit`.

        ``ends_update``: see `Weights.begin_vote`.
        """
        self.weights.check_not_reading()
        self.weights.begin_vote(ends_update=ends_update)
        try:
            committed = self._decide(timeout_s)
            step = self.state.step - committed
            self._deps.streams.log_commit(self._worker.round.quorum, step, committed=committed)
            self._clearing.record_vote()
            if committed:
                self._deps.progress.record_step(self.state.step)
                self.weights.begin_update()
            return committed
        except BaseException as error:
            self._interrupt(error)
            raise

    def _interrupt(self, error: BaseException) -> None:
        """Discard the step: an exception has ended the vote, and no update is applied."""
        with self._worker.changing() as round_:
            if self.state.phase in UNDER_WAY:
                round_.step.latch(QuorumFailed(f"the vote was interrupted ({error!r})"))
            round_.step.interrupt()
        self._deps.registry.gate.open()

    def _decide(self, timeout_s: float) -> bool:
        finding = self._end_sums()
        wishes = self.sums.collectives.wishes()
        self._runner.offer_rest()
        swallowed = self._deps.pg.failure()  # an error that the group did not raise
        if swallowed is not None and self.state.error is None:
            self._runner.fail_step(swallowed)
        self.weights.apply_heal()
        self.weights.protect()
        if self._worker.round.needs_news(time.monotonic()):
            self._deps.client.listen()
        with self._worker.changing() as round_:
            if wishes is not None:
                round_.record_wishes(*wishes)
            output = round_.begin_vote(time.monotonic(), timeout_s)
            if isinstance(output, Decide) and output.committed:  # a lone worker waits for nobody
                round_.apply_decision(output)
                self._record_commit()
                return True
            vote = round_.ballot().should_commit
        state = self.state
        if not isinstance(output, Decide):
            since = time.monotonic()
            output = ask_decision(self._deps.client, self._worker, output)
            self._worker.time_use.record_wait(time.monotonic() - since)  # for its own group
        if not output.committed:
            self._record_discard(state, self._why_not(vote))
        self._end_vote(output, finding)
        if output.committed:
            self._record_commit()
            return True
        self._deps.registry.gate.open()
        if finding is not None and self._rules.checks.on_difference == "stop":
            raise finding.as_error()
        _require_files(state.error)
        with self._worker.changing() as round_:
            round_.check_next()
        return False

    def _end_sums(self) -> Finding | None:
        """Wait for the sums and the round of this step; returns how the groups' states differ.

        First comes what other groups wait for: a healing group may get its state when they end
        their step.
        """
        sums, runner, round_ = self.sums, self._runner, self._worker.round
        sums.check_under_way()
        runner.wait_until_ready()
        round_.check_left()
        sums.settle_step()
        sums.collectives.launch_end()
        finding = self._checks.compare_states()
        if self.state.error is not None and self._deps.pg.errored() is not None:
            sums.collectives.give_up()  # as in `_end_last_step`
        runner.wait_until_over()
        round_.check_left()
        sums.collectives.finish()
        return finding

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
        """See `RoundRunner.latch_error`; for any thread."""
        self._runner.latch_error(error, epoch)

    def _why_not(self, vote: bool) -> str:
        """Why a step without an error is not committed."""
        if vote:
            return "another worker of this group cannot commit it"
        num = self.state.participation.num_participants
        return f"{num} of at least {self._rules.min_replica_size} groups contribute to it"

    def _record_commit(self) -> None:
        """Count the time of a committed step, and report the first one in another quorum."""
        quorum = self._worker.round.quorum
        quorum_id = 0 if quorum is None else quorum.quorum_id
        step = self.state.step
        self.sums.count_waits()
        recovery = self._worker.time_use.end_committed(time.monotonic(), quorum_id, step)
        if recovery is None or not self._rules.place.leads:
            return
        event = GroupEvent(
            kind=EventKind.RECOVERED,
            quorum_id=quorum_id,
            step=step,
            paused_s=recovery.paused_s,
            reconfigured_s=recovery.reconfigured_s,
            healed_s=recovery.healed_s,
            healed_bytes=None if recovery.healed_s is None else self._runner.healed_bytes,
        )
        self._deps.client.report_event(event)

    def _record_discard(
        self, state: StepState, otherwise: str, *, is_given_up: bool = False
    ) -> None:
        """Log and report which group was lost, if any, rather than gloo's message about it."""
        error = state.error.reason if isinstance(state.error, QuorumFailed) else state.error
        who_is_lost = self._worker.who_is_lost()
        reason = who_is_lost or str(error or "") or otherwise
        is_of_others = isinstance(state.error, QuorumFailed | PeerError) or bool(who_is_lost)
        if (shown := shown_reason(reason)) != reason:
            reason, is_of_others = shown, True
        log.warning("step %d is discarded: %s", state.step, reason)
        round_ = self._worker.round
        quorum = round_.quorum
        last = quorum or round_.peers.quorum
        event = GroupEvent(
            kind=EventKind.HEAL_FAILED if quorum and quorum.heal else EventKind.DISCARDED,
            quorum_id=0 if last is None else last.quorum_id,
            step=round_.common_step,
            cause=reason,
            is_own=not is_of_others and (state.error is not None or is_given_up),
            lost=self._worker.lost_members(),
            lasts_s=self._worker.time_use.end_discarded(time.monotonic()),
        )
        self._deps.client.report_event(event)


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
    @profiled("torchft::should_commit")
    def __enter__(self) -> bool:
        return self._stepper.decide(self._timeout_s, ends_update=True)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.end(error)

    @uncompiled
    def end(self, error: BaseException | None) -> None:
        """Report that the block has ended, by ``error`` or successfully; idempotent."""
        if error is None:
            self._stepper.weights.end_update()
        else:
            self._stepper.weights.lose_update(repr(error) if self.begun else "")


def _require_files(error: Exception | None = None) -> None:
    """Check, after a step was discarded by ``error``, that this process can open a file.

    Raises:
        ConfigError: it cannot, or could not then; so no further step could be committed either.
    """
    if short := shortage(error):
        out_of_files = limit_error(short)
        out_of_files.is_final = False  # they sufficed until now
        raise out_of_files
