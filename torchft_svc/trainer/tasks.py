"""The tasks of a trainer's workers: to train, to validate, to offer their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchft_svc.trainer.messages import (
    Command,
    GiveState,
    Position,
    StateHandle,
    Train,
    Validate,
)


@dataclass(kw_only=True)
class TrainTask:
    """Train to the end of the pass, or ``num_steps`` steps; all workers stop at the same place."""

    num_steps: int | None
    checkpoint_dir: str
    info: Mapping[str, Any]
    first: Position  # where the run was before; a restart may begin earlier
    leader_only: bool = False
    trains: bool = True
    results: dict[int, Any] = field(default_factory=dict)

    def message(self, number: int, worker: int, position: Position) -> Command:
        steps = self.num_steps
        return Train(
            command=number,
            until_epoch=self.first.epoch + 1,
            until_step=None if steps is None else self.first.step + steps,
            checkpoint_dir=self.checkpoint_dir,
            info=self.info,
        )

    def finished(self, worker: int, result: Any) -> None:
        self.results[worker] = result

    def restarted(self) -> None:
        self.results.clear()


@dataclass(kw_only=True)
class ValidateTask:
    """Each worker goes through another part of the data; ``results`` are those of the parts.

    If some are left when the task is done, because their workers were lost, it is done again.
    """

    num_steps: int | None
    num_parts: int
    info: Mapping[str, Any]
    leader_only: bool = False
    trains: bool = False
    results: dict[int, Any] = field(default_factory=dict)
    _parts: dict[int, int] = field(default_factory=dict)  # by worker

    def message(self, number: int, worker: int, position: Position) -> Command | None:
        taken = {*self.results, *self._parts.values()}
        left = [part for part in range(self.num_parts) if part not in taken]
        if not left:
            return None
        self._parts[worker] = left[0]
        return Validate(
            command=number,
            num_steps=self.num_steps,
            part=left[0],
            num_parts=self.num_parts,
            info=self.info,
        )

    def finished(self, worker: int, result: Any) -> None:
        self.results[self._parts[worker]] = result

    def restarted(self) -> None:
        self.results.clear()
        self._parts.clear()

    def is_done(self) -> bool:
        """Whether no part is left; if one is, it may be given to another worker now."""
        self._parts.clear()
        return len(self.results) == self.num_parts


@dataclass(kw_only=True)
class GiveStateTask:
    """Ask one worker for its state; it continues with it."""

    leader_only: bool = True
    trains: bool = False
    handle: StateHandle | None = None

    def message(self, number: int, worker: int, position: Position) -> Command:
        return GiveState(command=number)

    def finished(self, worker: int, result: Any) -> None:
        self.handle = result

    def restarted(self) -> None:
        self.handle = None
