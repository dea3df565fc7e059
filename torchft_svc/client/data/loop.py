"""The loop over a job's batches: which step a read belongs to, and where an epoch ends (D2, D7)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torchft_svc.client.data.plan import EpochPosition, Turn, WorkerShare
from torchft_svc.client.data.position import JobPosition
from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

_NO_PART = (
    "this step has no sample of the loader that was read first for this group, so what another one "
    "reads cannot be weighted: read this one first, or use last='drop' in both"
)


class DataSource(Protocol):
    """The data of a loop."""

    def settle_position(self, position: EpochPosition) -> EpochPosition:
        """``position``, or the beginning of the next epoch if this one has no further step."""

    def following(self, position: EpochPosition) -> EpochPosition:
        """The position after the step that begins at ``position``; for any thread."""

    def share(self, position: EpochPosition, turn: Turn) -> WorkerShare:
        """What this worker reads in the step at ``position``."""

    def read(self, number: int, position: EpochPosition, turn: Turn, share: WorkerShare) -> Any:
        """The batch of piece ``number`` of ``share``."""

    def close(self) -> None:
        """End what reads ahead."""


@dataclass(slots=True)
class _ReadStep:
    """A step for which the program reads; ``num_read`` of the share's pieces."""

    number: int
    position: EpochPosition
    turn: Turn
    share: WorkerShare
    scale: float  # of the weights, for the second of several loaders
    num_read: int = 0

    @property
    def is_read(self) -> bool:
        return self.num_read == len(self.share.pieces)


class DataLoop:
    """Yields this worker's batches of one committed step after the other.

    ``ends_step``: the last batch is the last one of its step for this worker. ``weight``: the
    factor for its mean loss; 1 unless a step has several batches here, or the workers of the group
    or several loaders have unequal numbers of samples.
    """

    def __init__(
        self, manager: Manager, name: str, source: DataSource, position: JobPosition
    ) -> None:
        self._manager, self._name = manager, name
        self._source, self._position = source, position
        self._step: _ReadStep | None = None
        self._turn: Turn | None = None  # the last one in which this group contributed
        self._is_exhausted = False
        self.ends_step = False
        self.weight = 1.0
        manager.register_data(name, position)

    # -- the loop --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self, self.epoch, self._position.num_moves)

    def epochs(self, num: int) -> Iterator[int]:
        """The epochs from the job's present one on, before ``num``.

        A group that joins begins with the epoch in which the others are. An epoch whose loop was
        left early is over; leave it after the same step on all groups.
        """
        while (epoch := self.epoch) < num:
            self._is_exhausted = False
            yield epoch
            if not self._is_exhausted:
                self.end_epoch()

    def end_epoch(self) -> None:
        """Skip the rest of the present epoch; call it after the same step on all groups."""
        self._settle_position()
        self._position.move_to(EpochPosition(self.epoch + 1, 0))
        self._step = None

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Return a block for the pass of one microbatch: only the last one of a step is summed over
        the groups. ``models``: all whose gradients it computes."""
        with contextlib.ExitStack() as stack:
            if not self.ends_step:
                for model in models:
                    stack.enter_context(model.no_sync())
            yield

    # -- where it is -----------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._settle_position().epoch

    @property
    def position(self) -> EpochPosition:
        """The first sample that no committed step has used."""
        return self._settle_position()

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint; save it together with `Manager.state_dict`."""
        return self._position.save()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of a checkpoint; call it before a step begins.

        Raises:
            ConfigError: it is the position of another data set.
        """
        self._position.load(state_dict)
        self._step = None

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        self._source.close()

    def _settle_position(self) -> EpochPosition:
        position = self._position.now()
        settled = self._source.settle_position(position)
        if settled != position:
            self._position.move_to(settled)
        return settled

    # -- reading ---------------------------------------------------------------------------------

    def read(self, of: _Pass) -> Any:
        """The next batch of a pass; raises `StopIteration` where the epoch ends."""
        step = self._step
        if step is None or step.is_read:
            self._check_epoch(of)
        entered = self._manager.enter_step(step.number if step and step.is_read else 0)
        if step is None or step.number != entered.number:
            self._check_epoch(of)
            turn = self._turn_of(entered.participating_rank, entered.num_participants)
            step = self._begin_step(entered.number, turn)
            if entered.participating_rank is not None:
                self._weigh(step)
        batch = self._source.read(step.num_read, step.position, step.turn, step.share)
        self._step = step
        self.weight = step.share.weights[step.num_read] * step.scale
        step.num_read += 1
        self.ends_step = step.is_read
        self._position.use_step()
        self._position.num_unread = len(step.share.pieces) - step.num_read
        return batch

    def _check_epoch(self, of: _Pass) -> None:
        """Raise `StopIteration` if another epoch has begun.

        A group that has healed goes on in the epoch of the others, without an end of its own.
        """
        at = self._settle_position()
        if of.num_moves != self._position.num_moves:
            of.num_moves, of.epoch = self._position.num_moves, self._position.moved_to
        if at.epoch != of.epoch:
            self._is_exhausted = True
            raise StopIteration

    def _turn_of(self, rank: int | None, num: int) -> Turn:
        """The turn, or of a group that does not contribute one with as many samples."""
        if rank is not None:
            self._turn = Turn(rank, num)
            return self._turn
        return self._turn or Turn(0, max(1, num))

    def _begin_step(self, number: int, turn: Turn) -> _ReadStep:
        position = self._settle_position()
        return _ReadStep(number, position, turn, self._source.share(position, turn), 1.0)

    def _weigh(self, step: _ReadStep) -> None:
        part = self._manager.set_part(self._name, step.share.part)
        if part == 0.0 and step.share.part:
            raise ConfigError("name", self._name, _NO_PART)
        step.scale = step.share.part / part if part else 1.0


class _Pass:
    """The iterator of one epoch; ``epoch`` changes if the group heals."""

    def __init__(self, loop: DataLoop, epoch: int, num_moves: int) -> None:
        self._loop, self.epoch, self.num_moves = loop, epoch, num_moves

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        return self._loop.read(self)
