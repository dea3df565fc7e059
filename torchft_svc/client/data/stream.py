"""Reads a stream so that each of its items is in exactly one committed step (rule D10)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch.utils.data import DataLoader, RandomSampler, default_collate

from torchft_svc.client.data.loop import DataLoop, check_microbatches
from torchft_svc.client.data.plan import EpochPosition, StepRules, Turn, WorkerShare, shard_of
from torchft_svc.client.data.position import DataDescription, JobPosition
from torchft_svc.client.data.sampler import given_sampler, reads_part
from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

_NEVER_ENDS = 2**62
_BATCHES = (
    "its items are batches, of which a step would use global_batch_size: give it batch_size=None, "
    "or ElasticStream microbatch_size=1 and collate_fn=lambda items: items[0], to count batches"
)
_OTHER_ITEMS = (
    "it yields other items in each group: read data with indices by ElasticDataLoader, which "
    "divides them among the groups"
)
_ONCE = (
    "it can be gone through only once: give an object whose iter() begins anew, such as a data "
    "set, a DataLoader or a StatefulDataLoader"
)


class ElasticStream(DataLoop):
    """Yields the batches of a job's steps from data without indices.

    Each group goes through the whole stream, in the same order, and uses its part of the items of
    each step; so every group has the cost of reading all of them. The place in the stream heals
    with the weights: by the stream's own ``state_dict`` and ``load_state_dict``, if it has both
    (torchdata's ``StatefulDataLoader``, data sets of your own); otherwise the items before it are
    read and dropped. The loop is that of an `ElasticDataLoader`.

    Args:
        manager: of this worker.
        stream: an iterable that yields the same items in all groups, each time that it is begun. If
            it has ``set_epoch``, that is called before.
        global_batch_size: items of a step, however many groups there are.
        microbatch_size: items that a group reads at once (None: its share of the step).
        collate_fn: makes a batch of a list of items (default: torch's). For a stream of batches use
            ``microbatch_size=1`` and ``collate_fn=lambda items: items[0]``, and do not change the
            batches in place: a discarded step gets them again.
        drop_last: leave out what is no whole step at the end of the stream.
        in_group, recover_within_step, ordered_sums, name: as in `ElasticDataLoader`.
        description: what must be equal in all groups, in your words.

    Raises:
        ConfigError: a value, or a relation between two, is not possible; the message says why.
    """

    def __init__(
        self,
        manager: Manager,
        stream: Iterable[Any],
        *,
        global_batch_size: int,
        microbatch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        drop_last: bool = False,
        in_group: Literal["shard", "same"] = "shard",
        recover_within_step: bool = False,
        ordered_sums: bool = False,
        name: str = "data",
        description: str = "",
    ) -> None:
        _check_stream(stream)
        if isinstance(stream, DataLoader):
            _check_loader(stream, collates=collate_fn is default_collate)
        rules = StepRules(
            num_samples=_NEVER_ENDS,
            global_batch_size=global_batch_size,
            microbatch_size=microbatch_size,
            last="drop" if drop_last else "short",
            **shard_of(manager.place_in_group(), in_group),
        )
        check_microbatches(rules, recovers=recover_within_step, is_ordered=ordered_sums)
        source = _StreamSource(rules, stream, collate_fn)
        more = f" ({description})" if description else ""
        described = DataDescription(
            data=f"a stream of {type(stream).__name__}{more}",
            rules=rules.describe(recovers=recover_within_step, is_ordered=ordered_sums),
        )
        position = JobPosition(described, source.following, manager.committed_step, source)
        super().__init__(
            manager, name, source, position, recovers=recover_within_step, is_ordered=ordered_sums
        )


def _check_stream(stream: Any) -> None:
    if isinstance(stream, Iterator) or not isinstance(stream, Iterable):
        reason = _ONCE if isinstance(stream, Iterator) else "an iterable is needed"
        raise ConfigError("stream", type(stream).__name__, reason)


def _check_loader(loader: DataLoader[Any], *, collates: bool) -> None:
    """Raise `ConfigError` if a group would read other items than the others, or batches of them."""
    if collates and loader.batch_sampler is not None:
        raise ConfigError("stream", f"a DataLoader with batch_size={loader.batch_size}", _BATCHES)
    sampler = given_sampler(loader)
    is_random = isinstance(sampler, RandomSampler) and not hasattr(loader, "state_dict")
    if is_random or reads_part(sampler):
        raise ConfigError("stream", f"a DataLoader with {type(sampler).__name__}", _OTHER_ITEMS)


class _Anchor(NamedTuple):
    """The stream's own state (None: it has none) before item ``first`` of epoch ``epoch``."""

    epoch: int
    first: int
    state: Any


class _StreamSource:
    """Reads a stream one step after the other; see `DataSource` and `Companion`."""

    def __init__(
        self, rules: StepRules, stream: Iterable[Any], collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self._rules, self._stream, self._collate = rules, stream, collate_fn
        self._has_state = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
        self._items: Iterator[Any] = iter(())
        # The items of the step at `_at` are read; those after them come next.
        self._at: EpochPosition | None = None
        self._step_items: list[Any] = []
        self._anchor = _Anchor(0, 0, None)  # one value, because a background thread reads it
        self._is_moved = False  # the anchor is where the stream has to go
        self._begin_state: Any = None  # the stream's own, at the beginning of an epoch

    # -- for `JobPosition` -----------------------------------------------------------------------

    def save_place(self) -> dict[str, Any]:
        """What leads to the present step's items in the stream; for any thread."""
        return self._anchor._asdict()

    def move_place(self, state: dict[str, Any]) -> None:
        """Go on from the place that another group, or a checkpoint, has saved."""
        self._anchor = _Anchor(**state)
        self._is_moved, self._at = True, None

    # -- for `DataLoop` --------------------------------------------------------------------------

    def following(self, position: EpochPosition) -> EpochPosition:
        return EpochPosition(position.epoch, position.first + self._rules.global_batch_size)

    def settle_position(self, position: EpochPosition) -> EpochPosition:
        if self._has_step(position):
            return position
        begin = EpochPosition(position.epoch + 1, 0)
        if not self._has_step(begin):
            reason = (
                "it yields no step: it is empty, or has fewer items than a step, with drop_last"
            )
            raise ConfigError("stream", type(self._stream).__name__, reason)
        return begin

    def rules_at(self, position: EpochPosition) -> StepRules:
        end = position.first + len(self._step_items)
        return replace(self._rules, num_samples=end, last="short")

    def read(self, number: int, position: EpochPosition, turn: Turn, share: WorkerShare) -> Any:
        piece = share.pieces[number]
        items = self._step_items[piece.begin - position.first : piece.end - position.first]
        return self._collate(items)

    def close(self) -> None:
        self._items, self._at, self._step_items = iter(()), None, []
        self._is_moved = True

    # -- the stream ------------------------------------------------------------------------------

    def _has_step(self, position: EpochPosition) -> bool:
        """Whether a step begins there; its items are read then."""
        if position != self._at:
            self._go_to(position)
            self._anchor = _Anchor(position.epoch, position.first, self._own_state())
            if position.first == 0:
                self._begin_state = self._anchor.state
            self._step_items = list(islice(self._items, self._rules.global_batch_size))
            self._at = position
        needed = self._rules.global_batch_size if self._rules.last == "drop" else 1
        return len(self._step_items) >= needed

    def _go_to(self, position: EpochPosition) -> None:
        """Make the item ``position.first`` the next one; a stream may end before it."""
        at = self._at
        if at is not None and not self._is_moved:
            reached = EpochPosition(at.epoch, at.first + len(self._step_items))
            if reached.epoch == position.epoch and reached.first <= position.first:
                self._drop(position.first - reached.first)
                return
        anchor, self._is_moved = self._anchor, False
        begin = 0
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(position.epoch)
        is_near = anchor.epoch == position.epoch and anchor.first <= position.first
        if self._has_state and anchor.state is not None and is_near:
            self._stream.load_state_dict(copy.deepcopy(anchor.state))  # type: ignore[attr-defined]
            begin = anchor.first
        elif self._begin_state is not None:  # an epoch may have been left early
            self._stream.load_state_dict(copy.deepcopy(self._begin_state))  # type: ignore[attr-defined]
        self._items = iter(self._stream)
        self._drop(position.first - begin)

    def _drop(self, num: int) -> None:
        for _ in islice(self._items, num):
            pass

    def _own_state(self) -> Any:
        if not self._has_state:
            return None
        return copy.deepcopy(self._stream.state_dict())  # type: ignore[attr-defined]
