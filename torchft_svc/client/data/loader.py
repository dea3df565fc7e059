"""Reads a data set with indices so that each sample of an epoch is in one committed step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from torchft_svc.client.data.loop import DataLoop, check_microbatches
from torchft_svc.client.data.order import Order
from torchft_svc.client.data.plan import (
    EpochPosition,
    Last,
    Piece,
    StepRules,
    Turn,
    WorkerShare,
    shard_of,
)
from torchft_svc.client.data.position import DataDescription, JobPosition
from torchft_svc.client.data.reading import PieceReader
from torchft_svc.client.data.sampler import DrawnSampler, ElasticSampler, sampler_of
from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

_TWICE = (
    "another ElasticDataLoader reads by it: two loaders have two positions, so make a sampler for "
    "each"
)
_NO_BATCHES = (
    "its samples would not be collated: leave batch_size out, and let the data set return one "
    "sample for an index; data that come in batches are read by ElasticStream"
)
_OWN_BATCHES = (
    "which samples make a batch follows from global_batch_size and the number of groups, so it "
    "would not be used: give the DataLoader a sampler for the order instead"
)


class ElasticDataLoader(DataLoop):
    """Yields the batches of a job's steps, each sample of an epoch in exactly one committed step.

    A step uses the next ``global_batch_size`` samples of the epoch's order, divided among the
    groups that contribute to it. Those of a discarded step come again in the next one. A group that
    joins goes on where the job is. Gradients are weighted by the numbers of samples, so they are
    the mean over the samples of the step, whatever number of groups there is::

        loader = ElasticDataLoader(manager, DataLoader(dataset, sampler=ElasticSampler(dataset)),
                                   global_batch_size=128)
        for epoch in loader.epochs(10):
            for batch in loader:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()

    With a ``microbatch_size`` a step may have several batches in a group: multiply the mean loss of
    each by ``loader.weight``, make its pass inside of `accumulate`, and vote where
    ``loader.ends_step`` is true.

    Reading a batch begins the step, unless `zero_grad` has done so, and waits for its quorum.

    Args:
        manager: of this worker.
        loader: of a data set with a length. Its sampler gives the order; its batch size does not
            count, all else does: worker processes, ``collate_fn``, ``pin_memory``.
        global_batch_size: samples of a step, however many groups there are.
        microbatch_size: samples that a group reads at once (None: its share of the step).
        last: what becomes of the samples at the end of an epoch that are no whole step: a
            ``"short"`` step (default), one that ``"pad"`` fills up with samples of the beginning,
            or none (``"drop"``, also if the loader has ``drop_last``).
        in_group: whether the workers of a group ``"shard"`` its samples among them (FSDP, data
            parallelism), or all read the ``"same"`` (tensor parallelism).
        seed: of the order, if the loader's sampler is not an `ElasticSampler`; and of samples.
        seed_samples: give each sample random numbers of its own (Python's, numpy's and torch's), so
            augmentations do not depend on who reads it, or when. It costs about 20 us a sample. Use
            worker processes: in this process, other threads may draw from the same generators.
        recover_within_step: if a group is lost in a step, the others read its microbatches as
            further batches of the step, and commit it, instead of discarding it. For groups of one
            worker, with a ``microbatch_size``.
        ordered_sums: add up the gradients of a step's microbatches in their order, so the same
            samples lead to the same bits, whichever groups read them. Each microbatch's gradients
            are sent and kept apart, so it costs as many times more. For groups of one worker.
        name: of the position in the state that heals, if the manager has several loaders.

    Raises:
        ConfigError: a value, or a relation between two, is not possible; the message says why.
    """

    def __init__(
        self,
        manager: Manager,
        loader: DataLoader[Any],
        *,
        global_batch_size: int,
        microbatch_size: int | None = None,
        last: Last | None = None,
        in_group: Literal["shard", "same"] = "shard",
        seed: int = 0,
        seed_samples: bool = False,
        recover_within_step: bool = False,
        ordered_sums: bool = False,
        name: str = "data",
    ) -> None:
        _check_loader(loader)
        sampler = sampler_of(loader, seed)
        if sampler.reader is not None:
            raise ConfigError("sampler", type(sampler).__name__, _TWICE)
        rules = StepRules(
            num_samples=sampler.size,
            global_batch_size=global_batch_size,
            microbatch_size=microbatch_size,
            last=last or ("drop" if _drops_last(loader) else "short"),
            **shard_of(manager.place_in_group(), in_group),
        )
        check_microbatches(rules, recovers=recover_within_step, is_ordered=ordered_sums)
        self._rules = rules
        self._sampler = sampler
        source = self._map = _MapSource(rules, sampler, loader, seed if seed_samples else None)
        description = DataDescription(
            data=sampler.describe(),
            rules=rules.describe(recovers=recover_within_step, is_ordered=ordered_sums),
        )
        position = JobPosition(description, rules.following, manager.committed_step)
        super().__init__(
            manager, name, source, position, recovers=recover_within_step, is_ordered=ordered_sums
        )
        sampler.reader = self

    def __len__(self) -> int:
        """The number of steps of an epoch."""
        rules = self._rules
        whole, rest = divmod(rules.num_samples, rules.global_batch_size)
        return whole + (rest > 0 and rules.last != "drop")

    @property
    def dataset(self) -> Dataset[Any]:
        """The data set that is read."""
        return self._map.reader.dataset

    @property
    def num_dropped(self) -> int:
        """How many batches were read ahead in vain, because the quorum or a step was lost."""
        return self._map.reader.num_dropped

    def share_of(self, position: EpochPosition, turn: Turn) -> WorkerShare:
        """What this worker reads in the step at ``position``, as one group of several."""
        return self._rules.share(position, turn)

    def indices_of(self, piece: Piece) -> list[int]:
        """The indices in the data set of the samples of ``piece``."""
        return self._map.order_of(piece.epoch).indices(piece.begin, piece.end)


class _MapSource:
    """Reads a data set with indices; see `DataSource`."""

    def __init__(
        self,
        rules: StepRules,
        sampler: ElasticSampler | DrawnSampler,
        loader: DataLoader[Any],
        seed: int | None,
    ) -> None:
        self._rules = rules
        # Of the epoch that is read, and of the one that is read ahead.
        self._orders: Callable[[int], Order] = functools.lru_cache(maxsize=2)(sampler.order)
        self.reader = PieceReader(loader, self.order_of, seed)

    def order_of(self, epoch: int) -> Order:
        """The order of the samples of an epoch."""
        return self._orders(epoch)

    def settle_position(self, position: EpochPosition) -> EpochPosition:
        return self._rules.normalized(position)

    def following(self, position: EpochPosition) -> EpochPosition:
        return self._rules.following(position)

    def rules_at(self, position: EpochPosition) -> StepRules:
        return self._rules

    def read(self, number: int, position: EpochPosition, turn: Turn, share: WorkerShare) -> Any:
        def ahead() -> Iterator[Piece]:
            """The pieces that follow if the step is committed, and the turn stays."""
            rest = islice(share.pieces, number + 1, None)
            return chain(rest, self._rules.pieces_from(self._rules.following(position), turn))

        return self.reader.read(share.pieces[number], ahead)

    def close(self) -> None:
        self.reader.close()


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        reason = (
            "a torch DataLoader is needed: DataLoader(dataset, sampler=ElasticSampler(dataset))"
        )
        raise ConfigError("loader", type(loader).__name__, reason)
    if isinstance(loader.dataset, IterableDataset):
        reason = "its data set has no indices: use ElasticStream"
        raise ConfigError("loader", type(loader.dataset).__name__, reason)
    if loader.batch_sampler is None:
        raise ConfigError("loader", "batch_size=None", _NO_BATCHES)
    if type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError("batch_sampler", type(loader.batch_sampler).__name__, _OWN_BATCHES)


def _drops_last(loader: DataLoader[Any]) -> bool:
    """Whether ``loader`` leaves out a last batch that is not whole."""
    assert isinstance(loader.batch_sampler, BatchSampler)
    return loader.batch_sampler.drop_last
