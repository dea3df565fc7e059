"""The loop over a job's batches: which step a read belongs to, and where an epoch ends (D2, D7)."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from torchft_svc.client.data.ordered import OrderedPass, OrderedSums
from torchft_svc.client.data.plan import EpochPosition, Held, StepRules, Turn, WorkerShare
from torchft_svc.client.data.position import JobPosition
from torchft_svc.errors import ConfigError, QuorumFailed, RequestRefused

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager
    from torchft_svc.client.step.data_positions import EnteredStep

log = logging.getLogger(__name__)

_NO_PART = (
    "this step has no sample of the loader that was read first for this group, so what another one "
    "reads cannot be weighted: read this one first, or use last='drop' in both"
)

_NO_MICROBATCHES = (
    "set it, and vote where loader.ends_step is true: what a lost group had to read comes as "
    "further batches of the step"
)
_NOTHING_ORDERED = "set it: what ordered_sums adds up in a fixed order are the microbatches"
_NOT_ORDERED = (
    "it is for groups of one worker, without recover_within_step: a step in which a group is lost "
    "is discarded, and its samples come again"
)
_WEIGHT_NOT_USED = (
    "the loss of a batch of loader %r was not multiplied by loader.weight, which is %.4g: if its "
    "gradients are used, they do not count by its number of samples. A validation loop reads a "
    "DataLoader of its own"
)
_NOT_WRAPPED = (
    "it is no wrapped model, so nothing holds its sums back: give DistributedDataParallel(manager, "
    "model), or the model that fully_shard has sharded"
)
_NO_BATCH = "no batch was read: accumulate() is for the pass of the loader's last batch"
_INTERRUPTED = "a pass was interrupted (%r)"
_NOT_DIVIDED = "the samples of this step could not be divided anew among the groups that are left"


class DataSource(Protocol):
    """The data of a loop."""

    def settle_position(self, position: EpochPosition) -> EpochPosition:
        """``position``, or the beginning of the next epoch if this one has no further step."""

    def following(self, position: EpochPosition) -> EpochPosition:
        """The position after the step that begins at ``position``; for any thread."""

    def rules_at(self, position: EpochPosition) -> StepRules:
        """The rules by which the step at ``position`` is divided."""

    def read(self, number: int, position: EpochPosition, turn: Turn, share: WorkerShare) -> Any:
        """The batch of piece ``number`` of ``share``."""

    def close(self) -> None:
        """End what reads ahead."""


@dataclass(slots=True)
class _ReadStep:
    """A step for which the program reads; ``num_read`` of the share's pieces.

    ``counts``: this group contributes, so what it reads counts.
    """

    number: int
    position: EpochPosition
    turn: Turn
    share: WorkerShare
    counts: bool
    scale: float = 1.0  # of the weights, for the second of several loaders
    num_read: int = 0
    sums: OrderedSums | None = None  # of its passes, with `ordered_sums`

    @property
    def is_read(self) -> bool:
        return self.num_read == len(self.share.pieces)

    @property
    def held(self) -> Held:
        """What this group holds of the step's samples, if all of its share is read."""
        pieces = self.share.pieces
        return Held(pieces[0].begin, pieces[-1].end) if self.counts and self.share.part else Held()


class DataLoop:
    """Yields this worker's batches of one committed step after the other.

    ``ends_step``: the last batch is the last one of its step for this worker.
    """

    def __init__(
        self,
        manager: Manager,
        name: str,
        source: DataSource,
        position: JobPosition,
        *,
        recovers: bool = False,
        is_ordered: bool = False,
    ) -> None:
        self._manager, self._name = manager, name
        self._source, self._position = source, position
        self._step: _ReadStep | None = None
        self._turn: Turn | None = None  # the last one in which this group contributed
        self._is_exhausted = False
        self.ends_step = False
        self._weight, self._has_shown_weight, self._has_warned = 1.0, True, False
        self._recovers, self._is_ordered = recovers, is_ordered
        manager.register_data(name, position, _TakeOver(self) if recovers else None)

    # -- the loop --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self, self.epoch, self._position.num_moves)

    def epochs(self, num: int) -> Iterator[int]:
        """The epochs from the job's present one up to ``num``, which is not included.

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
        the groups. ``models``: all whose gradients it computes.

        An exception in the block is an error of the step, which can only be discarded. So the
        gradients of ``models`` are cleared, and the same samples come again.
        """
        ordered = self._begin_ordered_pass(models) if self._is_ordered else None
        try:
            with contextlib.ExitStack() as stack:
                if self._is_ordered or not self.ends_step:
                    for model in models:
                        stack.enter_context(_not_summed(model))
                yield
        except BaseException as error:
            self._give_up_pass(models, error)
            raise
        if ordered is not None:
            self._end_ordered_pass(ordered)

    @property
    def weight(self) -> float:
        """The factor for the mean loss of the last batch.

        1 unless a step has several batches here, or the workers of the group or several loaders
        have unequal numbers of samples.
        """
        self._has_shown_weight = True
        return self._weight

    def _check_weight(self) -> None:
        """Warn, once, if the program has not asked for the weight of a batch that has one."""
        if not (self._has_shown_weight or self._has_warned or self._weight in (0.0, 1.0)):
            self._has_warned = True
            log.warning(_WEIGHT_NOT_USED, self._name, self._weight)

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
        """End the worker processes; may be called twice. Reading begins them again."""
        self._source.close()
        self._position.kept = lambda: None

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
            step = self._begin_step(entered)
        batch = self._source.read(step.num_read, step.position, step.turn, step.share)
        self._step = step
        self._check_weight()
        self._weight, self._has_shown_weight = self._weight_of(step), False
        step.num_read += 1
        self.ends_step = step.is_read
        self._position.use_step()
        of.record_batch(batch)
        self._position.num_unread = len(step.share.pieces) - step.num_read
        if self._is_ordered:  # until `accumulate` sums, after the last pass
            self._position.num_unsummed = 1
        return batch

    def _weight_of(self, step: _ReadStep) -> float:
        """The factor for the mean loss of the next piece."""
        if not (self._is_ordered and step.share.part):
            return step.share.weights[step.num_read] * step.scale
        rules = self._source.rules_at(step.position)
        return rules.row_of(step.position, step.share.pieces[step.num_read])[2]

    def _begin_ordered_pass(self, models: tuple[Any, ...]) -> OrderedPass:
        """Begin to keep the gradients of the last microbatch apart."""
        step = self._step
        if step is None:
            raise RequestRefused(_NO_BATCH)
        number = step.num_read - 1
        rules = self._source.rules_at(step.position)
        row, num_rows, _ = rules.row_of(step.position, step.share.pieces[number])
        if step.sums is None:
            step.sums = OrderedSums(self._manager, num_rows)
        return step.sums.begin_pass(models, number, row if step.share.part else None)

    def _end_ordered_pass(self, ordered: OrderedPass) -> None:
        """Keep its gradients; after the step's last one sum all."""
        ordered.end()
        step = self._step
        assert step is not None
        assert step.sums is not None
        if step.is_read:
            step.sums.sum_up(ordered)
            self._position.num_unsummed = step.sums.num_open

    def _give_up_pass(self, models: tuple[Any, ...], error: BaseException) -> None:
        """Discard the step, because an exception has ended a pass, and clear its gradients.

        Those of the passes before it would be added to the same samples' ones when they come again.
        """
        cause = error if isinstance(error, Exception) else RequestRefused(_INTERRUPTED % error)
        self._manager.report_error(cause)
        for model in models:
            for parameter in model.parameters():
                parameter.grad = None

    def _check_epoch(self, of: _Pass) -> None:
        """Raise `StopIteration` if another epoch has begun.

        A group that has healed goes on in the epoch of the others, without an end of its own.
        """
        at = self._settle_position()
        if of.num_moves != self._position.num_moves:
            of.num_moves, of.epoch = self._position.num_moves, self._position.moved_to
        if at.epoch != of.epoch:
            self._is_exhausted = True
            self._position.kept = of.first
            raise StopIteration

    def _turn_of(self, rank: int | None, num: int) -> Turn:
        """The turn, or of a group that does not contribute one with as many samples."""
        if rank is not None:
            self._turn = Turn(rank, num)
            return self._turn
        return self._turn or Turn(0, max(1, num))

    def _begin_step(self, entered: EnteredStep) -> _ReadStep:
        position = self._settle_position()
        turn = self._turn_of(entered.participating_rank, entered.num_participants)
        share = self._source.rules_at(position).share(position, turn)
        counts = entered.participating_rank is not None
        step = _ReadStep(entered.number, position, turn, share, counts)
        rows = self._manager.exchange_shares(Held()) if self._recovers else None
        if rows is not None and counts:
            self._divide(step, rows)
        if counts:
            self._weigh(step)
        return step

    # -- a step whose group was lost (rule D11) --------------------------------------------------

    def _may_divide(self) -> bool:
        """See `Divisible.may_divide`."""
        step = self._step
        return step is not None and step.is_read and step.counts

    def _divide_anew(self, entered: EnteredStep) -> bool:
        """See `Divisible.divide_anew`."""
        step = self._step
        assert step is not None
        rows = self._manager.exchange_shares(step.held)
        step.number = entered.number
        if rows is None:
            self._manager.report_error(QuorumFailed(_NOT_DIVIDED))
            return False
        if entered.participating_rank is None:  # it heals, because another group has committed
            step.counts = False
            return False
        step.turn = self._turn_of(entered.participating_rank, entered.num_participants)
        self._divide(step, rows)
        if not step.share.part:
            step.num_read = len(step.share.pieces)  # its pass was made
        self._weigh(step)
        self.ends_step = step.is_read
        self._position.num_unread = len(step.share.pieces) - step.num_read
        return not step.is_read

    def _divide(self, step: _ReadStep, rows: list[list[int]]) -> None:
        """Divide the step by what the groups hold of it, if one of them holds anything."""
        held = [Held(*row) for row in rows]
        if not any(each.end > each.begin for each in held):
            return
        rules = self._source.rules_at(step.position)
        found = rules.share_after_loss(step.position, held, step.turn.rank)
        if found is None:
            self._manager.report_error(QuorumFailed(_NOT_DIVIDED))
        else:
            step.share, step.num_read = found

    def _weigh(self, step: _ReadStep) -> None:
        part = self._manager.set_part(self._name, step.share.part)
        if part == 0.0 and step.share.part and not self._is_ordered:
            raise ConfigError("name", self._name, _NO_PART)
        step.scale = step.share.part / part if part else 1.0


class _TakeOver:
    """The way of a manager to its loader; see `Divisible`."""

    def __init__(self, loop: DataLoop) -> None:
        self._loop = loop

    def may_divide(self) -> bool:
        return self._loop._may_divide()

    def divide_anew(self, entered: EnteredStep) -> bool:
        return self._loop._divide_anew(entered)


def check_microbatches(rules: StepRules, *, recovers: bool, is_ordered: bool) -> None:
    """Raise `ConfigError` if a step is to be divided anew, or summed in order, and cannot be."""
    if recovers and rules.microbatch_size is None:
        raise ConfigError("microbatch_size", None, _NO_MICROBATCHES)
    if is_ordered and rules.microbatch_size is None:
        raise ConfigError("microbatch_size", None, _NOTHING_ORDERED)
    if is_ordered and (recovers or rules.num_shards > 1):
        raise ConfigError("ordered_sums", True, _NOT_ORDERED)


def _not_summed(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a block whose passes only accumulate the gradients of a wrapped model."""
    if hasattr(model, "no_sync"):
        block: contextlib.AbstractContextManager[Any] = model.no_sync()
        return block
    if not hasattr(model, "set_requires_gradient_sync"):
        raise ConfigError("models", type(model).__name__, _NOT_WRAPPED)
    model.set_requires_gradient_sync(False)  # FSDP2
    block = contextlib.ExitStack()
    block.callback(model.set_requires_gradient_sync, True)
    return block


class _Pass:
    """The iterator of one epoch; ``epoch`` changes if the group heals.

    ``first``: returns a tensor of the first batch, if that is not the last one, too, and the
    program has kept it.
    """

    def __init__(self, loop: DataLoop, epoch: int, num_moves: int) -> None:
        self._loop, self.epoch, self.num_moves = loop, epoch, num_moves
        self._num_read = 0
        self._first: Callable[[], object] = lambda: None
        self.first: Callable[[], object] = self._first

    def record_batch(self, batch: Any) -> None:
        """Remember the first batch, without keeping it alive."""
        self._num_read += 1
        if self._num_read == 1:
            tensors = (each for each in tree_leaves(batch) if isinstance(each, torch.Tensor))
            self._first = next(map(weakref.ref, tensors), self._first)
        elif self._num_read == 2:
            self.first = self._first

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        return self._loop.read(self)
