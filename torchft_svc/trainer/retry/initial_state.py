"""Decides which state the workers of a trainer begin with, and what follows if it cannot be loaded.

The newest state comes first. One that no worker can load is rejected for good, so each refusal
leaves one state less to try. What the user gave, and a checkpoint, is never replaced by nothing: if
no other state is left, the refusal ends the command.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from torchft_svc.trainer.retry.budget import ProgramError


class StateSource(Enum):
    """The origins of the state of a new world."""

    START = "the start"
    HELD = "the state that the trainer holds"
    CHECKPOINT = "a checkpoint"
    PEER = "the state of a worker that lived"
    GIVEN = "the state that was loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownState:
    """A state to begin with: ``handle`` is the shell's, ``checkpoint`` a path, or neither.

    Args:
        epoch, num_samples: how far it is at this step: a pass ends without another step.
    """

    source: StateSource
    step: int = 0
    epoch: int = 0
    num_samples: int = 0
    handle: object = None
    checkpoint: str = ""

    @property
    def place(self) -> tuple[int, int, int]:
        """The position of the state; a later one is larger."""
        return self.step, self.epoch, self.num_samples


@dataclass(frozen=True, slots=True)
class FindCheckpoint:
    """Call `RetryMachine.checkpoint_found` with the newest good checkpoint of this run."""


@dataclass(frozen=True, slots=True)
class RejectState:
    """Exclude ``state``, with which no worker can begin, from the checkpoints for good."""

    state: KnownState
    reason: str


@dataclass(frozen=True, slots=True)
class DropHandle:
    """Free the state of ``handle``."""

    handle: object


StateOrder = FindCheckpoint | RejectState | DropHandle


class InitialState:
    """The state that a run continues from, and the one that its present world began with."""

    def __init__(self) -> None:
        self.held = KnownState(source=StateSource.START)
        self.of_world = self.held
        self.is_settled = False  # no checkpoint is better: a worker offered it, or the user gave it
        self._refusal: ProgramError | None = None

    @property
    def refusal(self) -> ProgramError | None:
        """The error of a state that cannot be loaded, while another one is looked for."""
        return self._refusal

    def hold_state(self, state: KnownState) -> list[StateOrder]:
        """Continue from ``state``, whatever was known before."""
        old, self.held = self.held, state
        is_dropped = old.handle is not None and old.handle is not state.handle
        return [DropHandle(old.handle)] if is_dropped else []

    def hold_newer(self, state: KnownState) -> list[StateOrder]:
        """Continue from ``state``, unless there is a newer one."""
        return self.hold_state(state) if state.place >= self.held.place else _drop_state(state)

    def hold_reported(self, state: KnownState) -> list[StateOrder]:
        """Continue from ``state``, reported while workers end, unless an offer is as good."""
        if not self.is_settled:
            return self.hold_newer(state)
        if state.place <= self.held.place:
            return _drop_state(state)
        return self.hold_state(replace(state, source=self.held.source))

    def hold_offered(self, state: KnownState) -> list[StateOrder]:
        """Continue from the ``state`` of a worker, or from a later one at the same step."""
        self.is_settled = True
        return self.hold_newer(state)

    def settle_on(self, state: KnownState) -> list[StateOrder]:
        """Continue from ``state``, whatever checkpoints there are."""
        self.is_settled = True
        return self.hold_state(state)

    def begin_world(self) -> list[StateOrder]:
        """Choose the best state for the next workers."""
        self.of_world = self.held
        return [] if self.is_settled else [FindCheckpoint()]

    def checkpoint_found(self, checkpoint: KnownState | None) -> list[StateOrder]:
        """Use ``checkpoint``, the newest good one of this run, if it is newer."""
        orders: list[StateOrder] = []
        if checkpoint is not None and checkpoint.place > self.held.place:
            orders = self.hold_state(checkpoint)
        if self.held.source is StateSource.PEER:  # of an earlier world
            self.held = replace(self.held, source=StateSource.HELD)
        self.of_world = self.held
        return orders

    def refuses(self, error: ProgramError, best_step: int) -> bool:
        """Whether ``error`` means that nobody can begin with the state of this world.

        After the first step somebody could.
        """
        began = self.of_world
        is_ours = self.held is began and began.source is not StateSource.START
        return error.refuses_state and is_ours and best_step <= began.step

    def refuse(self, error: ProgramError) -> list[StateOrder]:
        """Reject the state of this world, and look for another one; `fall_back` follows."""
        self._refusal = error
        return [RejectState(self.of_world, error.message), FindCheckpoint()]

    def fall_back(self, checkpoint: KnownState | None) -> list[StateOrder] | None:
        """Continue from ``checkpoint``, whatever its step; None: no state is left."""
        self._refusal = None
        rejected = self.of_world
        if checkpoint is None:
            if rejected.checkpoint or rejected.source is StateSource.GIVEN:
                return None
            checkpoint = KnownState(source=StateSource.START)
        return self.settle_on(checkpoint)


def _drop_state(state: KnownState) -> list[StateOrder]:
    return [] if state.handle is None else [DropHandle(state.handle)]
