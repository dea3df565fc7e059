"""Keeps track of what the weights hold: a healed state, an update that was applied or lost.

Between a vote and the end of its update only the training thread may touch the weights. Everybody
else reads them through the gate of `StateRegistry`.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch

from torchft_svc.client.checkpointing.encoding.device_copies import pinned
from torchft_svc.client.process.background import BackgroundThread
from torchft_svc.client.step.round import Dependencies, RoundRules, RoundRunner
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.client.step.state import MANAGER_KEY
from torchft_svc.client.step.sums import StepSums
from torchft_svc.client.step.updates import LostUpdate, UpdateWatch
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.copies import HeldCopy
from torchft_svc.core.quorum.worker.step import StepState
from torchft_svc.errors import CheckpointError, ConfigError, RequestRefused, TornState

log = logging.getLogger(__name__)

_OTHER_PARAMETERS = (
    "the healed state freezes other parameters (requires_grad) than this step did: the next one "
    "heals again; if that does not end, give the manager use_async_quorum=False"
)


class Weights:
    """The weights of this worker; for the training thread, except where it says otherwise.

    ``version``: see `Manager.weights_version`. ``loads``: a healed state is being loaded.
    """

    def __init__(
        self,
        deps: Dependencies,
        rules: RoundRules,
        worker: SharedRound,
        runner: RoundRunner,
        sums: StepSums,
        thread: BackgroundThread,
    ) -> None:
        self._deps = deps
        self._registry = deps.registry
        self._rules = rules
        self._worker = worker
        self._runner = runner
        self._sums = sums
        self._background = thread
        self.version = 0
        self.loads = False
        self._thread_of_step: int | None = None
        self._ends_update = False  # whether the caller reports the outcome of an update
        self._updates = UpdateWatch(self._is_trained, sums.average_of)

    @property
    def _state(self) -> StepState:
        return self._worker.round.step.state

    def begin_step(self) -> None:
        """Record which thread trains, and let others read the state again."""
        self._thread_of_step = threading.get_ident()
        self._registry.gate.open()

    @property
    def is_thread_of_step(self) -> bool:
        """Whether the present thread has begun the step."""
        return self._thread_of_step == threading.get_ident()

    # -- a healed state --------------------------------------------------------------------------

    def protect(self) -> None:
        """Protect the state from readers before the update; if that fails, there is no update."""
        state = self._state
        if state.error is not None:
            return
        try:
            self._registry.gate.shut(self._rules.timeouts.collective_s)
            self._deps.transport.disallow_checkpoint()
        except Exception as error:
            log.exception("the state that is being served cannot be kept")
            self._runner.latch_error(error, state.epoch)

    def apply_heal(self) -> None:
        """Load a fetched state, if there is one, and then take over its step."""
        runner = self._runner
        if runner.quorum is None or runner.state is None:
            return
        state = runner.state
        try:
            self.loads = True
            self._registry.gate.shut(self._rules.timeouts.collective_s)
            self._registry.check(state, runner.quorum.recover_src_manager_address)
            self._deps.transport.retract_checkpoint()
            self.version += 1
            with pinned(state):
                trains_others = self._registry.load(state)
            with self._worker.changing() as round_:
                counters = state[MANAGER_KEY]
                round_.step.apply_heal(counters["batches_committed"], counters.get("quorum_id", 0))
            log.info("healed to step %d from %s", self._state.step, runner.healed_from)
            if trains_others and not self._worker.round.heals_first:
                runner.latch_error(RequestRefused(_OTHER_PARAMETERS), self._state.epoch)
        except ConfigError as error:  # it would be so again with the next heal
            self._fail_heal(TornState("the group healed from", str(error)))
            runner.latch_error(error, self._state.epoch)
            raise
        except Exception as error:
            log.exception("the healed state cannot be loaded")
            self._fail_heal(error)
            runner.latch_error(error, self._state.epoch)
        except BaseException as error:
            self._fail_heal(TornState("the group healed from", f"interrupted by {error!r}"))
            raise
        finally:
            self.loads = False
            runner.state = None

    def load_copy(self, state: Any, copy: HeldCopy) -> None:
        """Load the checked ``state`` of a copy, and begin from its step; between two steps.

        If that is interrupted, the next step loads a copy again, heals, or is discarded.

        Raises:
            TorchFTError: a load function of the program has failed.
        """
        counters = state[MANAGER_KEY]
        try:
            self.loads = True
            self.version += 1
            with pinned(state):
                self._registry.load(state)
            with self._worker.changing() as round_:
                round_.step.begin_from_copy(
                    counters["step"], counters["batches_committed"], counters["quorum_id"]
                )
            log.warning("no group with a state lives: beginning from a copy of step %d", copy.step)
        except BaseException as error:
            may_be_torn = isinstance(error, TornState) or not isinstance(error, CheckpointError)
            if may_be_torn and self._state.step != copy.step:  # at that step all of it is loaded
                with self._worker.changing() as round_:
                    round_.step.spoil_by_copy(error)
            raise
        finally:
            self.loads = False

    def _fail_heal(self, error: Exception) -> None:
        with self._worker.changing() as round_:
            if self._state.pending_heal is not None:
                round_.step.fail_heal(error)

    # -- an update -------------------------------------------------------------------------------

    def begin_vote(self, *, ends_update: bool) -> None:
        """Record whether the caller of the vote reports the outcome of the update.

        It does with `end_update` or `lose_update`. Otherwise the steps of the optimizers show it,
        or a call of `lose_update`.
        """
        self._ends_update = ends_update

    def begin_update(self) -> None:
        """Watch the steps of the optimizers, unless the caller reports the outcome."""
        if not self._ends_update:
            self._updates.open_window()

    def end_update(self) -> None:
        """Record that the present update, if any, was applied, and let others read the weights.

        The steps of the optimizers may show that it was not.
        """
        if self._state.phase is Phase.APPLYING:
            loss = self._updates.end_window(self.version)
            if loss is not None:
                self._lose_unnoticed(loss)
                return
            self._worker.time_use.end_update(time.monotonic())
        with self._worker.changing() as round_:
            if self._state.phase is Phase.APPLYING:
                round_.step.end_update()
        self._registry.gate.open()

    def lose_update(self, spoiled_by: str = "", *, why: str = "interrupted") -> None:
        """Record that the present update, if any, was not applied; see `StepMachine`."""
        self._updates.close_window()
        with self._worker.changing() as round_:
            step, phase = self._state.step, self._state.phase
            if phase is Phase.APPLYING:
                round_.step.lose_update(spoiled_by)
            else:
                round_.step.interrupt()
        if phase is Phase.APPLYING:
            log.warning("the update to step %d was not applied: %s", step, spoiled_by or why)
        self._registry.gate.open()

    def end_last_update(self) -> None:
        """End the update of the last step, or its vote, which may have been interrupted."""
        phase = self._state.phase
        if phase is Phase.APPLYING and not self._ends_update:
            self.end_update()
        elif phase in (Phase.APPLYING, Phase.VOTING):
            self.lose_update("it was interrupted")

    def report_spoiled(self, error: BaseException) -> None:
        """See `Manager.report_spoiled_update`."""
        self._updates.close_window()
        with self._worker.changing() as round_:
            step = self._state.step
            round_.step.lose_update(repr(error))
        log.warning("the update to step %d was not applied: %r was reported", step, error)

    def find_lost_update(self) -> None:
        """Record the present update as lost if an exception that was caught has ended it."""
        if self._state.phase is Phase.APPLYING:
            loss = self._updates.find_failure()
            if loss is not None:
                self._lose_unnoticed(loss)

    def last_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that the program has stepped in its last update (empty: not known)."""
        return self._updates.last_optimizers()

    def _lose_unnoticed(self, loss: LostUpdate) -> None:
        """Record an update as lost although the program continues as if it were applied."""
        self.lose_update(loss.reason if loss.is_spoiled else "", why=loss.reason)

    def _is_trained(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` updates what is averaged across groups, or what groups heal by."""
        updated = [each for group in optimizer.param_groups for each in group["params"]]
        known = {*map(id, self._sums.parameters()), *map(id, self._registry.updated_parameters())}
        if any(id(each) in known for each in updated):
            return True
        return self._registry.holds_any(updated)

    # -- readers ---------------------------------------------------------------------------------

    def prepare_to_read(self) -> None:
        """End a present update: the program reads its state, see `Manager.consistent_state`.

        A program that reads its state on the training thread has ended the update.

        Raises:
            RequestRefused: a call of this thread, further up, is changing the state.
        """
        if not self.is_thread_of_step or self._registry.gate.is_reading():
            return
        applies = self._state.phase is Phase.APPLYING
        if self.loads or (applies and (self._ends_update or self._updates.is_under_way())):
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
        if not self._background.is_current:
            with self._worker.changing() as round_:
                round_.step.check_whole()

    def check_not_reading(self) -> None:
        """Raise `RequestRefused` if this thread reads the state, which a step may change."""
        if self._registry.gate.is_reading():
            raise RequestRefused(
                "this thread reads the state, which a step may change: leave the block of "
                "consistent_state() first"
            )

    def allow_read(self) -> None:
        """See `Manager.allow_state_dict_read`; ends the update unless the vote's caller does."""
        if self._ends_update:
            self._registry.gate.open()
        else:
            self.end_update()
