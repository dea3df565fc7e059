"""Decides which state the workers of a trainer begin with, and what follows if it cannot be loaded.

The newest state comes first. One that no worker can load is rejected for good, so each refusal
leaves one state less to try. What the user gave, and a checkpoint, is never replaced by nothing: if
no other state is left, the refusal ends the command.
"""

from __future__ import annotations

from dataclasses import replace

from torchft_svc.trainer.retry.orders import (
    DropHandle,
    FindCheckpoint,
    KnownState,
    ProgramError,
    RejectState,
    RetryOrder,
    StateSource,
)


class BeginState:
    """The state that a run goes on from, and the one that its present world began with."""

    def __init__(self) -> None:
        self.held = KnownState(source=StateSource.START)
        self.of_world = self.held
        self.is_settled = False  # no checkpoint is better: a worker offered it, or the user gave it
        self._refusal: ProgramError | None = None

    @property
    def refusal(self) -> ProgramError | None:
        """Why the state of this world cannot be loaded, while another one is looked for."""
        return self._refusal

    def hold(self, state: KnownState) -> list[RetryOrder]:
        """Go on from ``state``, whatever was known before."""
        old, self.held = self.held, state
        is_dropped = old.handle is not None and old.handle is not state.handle
        return [DropHandle(old.handle)] if is_dropped else []

    def hold_newer(self, state: KnownState) -> list[RetryOrder]:
        """The same, unless there is a newer one."""
        return self.hold(state) if state.place >= self.held.place else _drop(state)

    def reported(self, state: KnownState) -> list[RetryOrder]:
        """The same, while workers end; what one of them has offered is as good."""
        if not self.is_settled:
            return self.hold_newer(state)
        if state.place <= self.held.place:
            return _drop(state)
        return self.hold(replace(state, source=self.held.source))

    def offered(self, state: KnownState) -> list[RetryOrder]:
        """Go on from the ``state`` of a worker, or from one that is further at the same step."""
        self.is_settled = True
        return self.hold_newer(state)

    def settle(self, state: KnownState) -> list[RetryOrder]:
        """Go on from ``state``; checkpoints are not looked at."""
        self.is_settled = True
        return self.hold(state)

    def begin_world(self) -> list[RetryOrder]:
        """The next workers begin with the best that there is."""
        self.of_world = self.held
        return [] if self.is_settled else [FindCheckpoint()]

    def found(self, checkpoint: KnownState | None) -> list[RetryOrder]:
        """The newest good checkpoint of this run; None: there is none."""
        orders: list[RetryOrder] = []
        if checkpoint is not None and checkpoint.place > self.held.place:
            orders = self.hold(checkpoint)
        if self.held.source is StateSource.PEER:  # of an earlier world
            self.held = replace(self.held, source=StateSource.HELD)
        self.of_world = self.held
        return orders

    def refuses(self, error: ProgramError, best_step: int) -> bool:
        """Whether ``error`` says that nobody can begin with the state of this world.

        After the first step somebody could.
        """
        began = self.of_world
        is_ours = self.held is began and began.source is not StateSource.START
        return error.refuses_state and is_ours and best_step <= began.step

    def refuse(self, error: ProgramError) -> list[RetryOrder]:
        """Look for another state; `fall_back` follows."""
        self._refusal = error
        return [RejectState(self.of_world, error.message), FindCheckpoint()]

    def fall_back(self, checkpoint: KnownState | None) -> list[RetryOrder] | None:
        """Go on from ``checkpoint``, whatever its step; None: there is nothing to go on from."""
        self._refusal = None
        rejected = self.of_world
        if checkpoint is None:
            if rejected.checkpoint or rejected.source is StateSource.GIVEN:
                return None
            checkpoint = KnownState(source=StateSource.START)
        return self.settle(checkpoint)


def _drop(state: KnownState) -> list[RetryOrder]:
    return [] if state.handle is None else [DropHandle(state.handle)]
