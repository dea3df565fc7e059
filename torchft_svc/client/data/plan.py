"""Decides which samples a step uses, and which of them each worker reads (rules D2, D5, D6).

Pure arithmetic: a position and a turn lead to a share, on every machine to the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchft_svc.errors import ConfigError

Last = Literal["short", "pad", "drop"]
LAST: tuple[Last, ...] = ("short", "pad", "drop")


@dataclass(frozen=True, slots=True)
class Turn:
    """A worker's place in a step: its rank among ``size`` that contribute."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, order=True)
class EpochPosition:
    """The first sample that no committed step has used: number ``first`` of epoch ``epoch``."""

    epoch: int = 0
    first: int = 0

    def __str__(self) -> str:
        return f"sample {self.first} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Piece:
    """The samples ``begin`` to ``end`` of an epoch's order, which a worker reads as one batch."""

    epoch: int
    begin: int
    end: int


class Held(NamedTuple):
    """The samples of a step whose gradients a group has: ``begin`` to ``end`` of the epoch's order.

    Empty for a group that has read nothing of the step, and for one that does not contribute.
    """

    begin: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """What one worker reads in a step.

    ``part``: the group's part of the samples of the step. ``weights``: the factor of each piece's
    mean loss, so that the mean over the group's workers of their sums is the mean over the group's
    samples.
    """

    pieces: tuple[Piece, ...]
    weights: tuple[float, ...]
    part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """How the samples of an epoch are divided into steps, and those of a step among the workers.

    Args:
        num_samples: of an epoch.
        global_batch_size: samples of a step, whatever number of groups there is.
        microbatch_size: samples that a group reads at once (None: its whole share).
        last: what becomes of the samples at the end of an epoch that are no whole step: a
            ``"short"`` step, one that ``"pad"`` fills up from the beginning of the order, or none
            (``"drop"``).
        num_shards, shard: this worker among those that divide the pieces of their group.
    """

    num_samples: int
    global_batch_size: int
    microbatch_size: int | None = None
    last: Last = "short"
    num_shards: int = 1
    shard: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError("loader", f"{self.num_samples} samples", "an epoch needs one or more")
        for field in ("global_batch_size", "microbatch_size"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(field, value, "use 1 or more samples")
        if self.last not in LAST:
            raise ConfigError("last", self.last, f"use one of {', '.join(LAST)}")
        for field, divisor, name in (
            ("microbatch_size", self.num_shards, "the number of workers in the group"),
            ("global_batch_size", self.unit, self._unit_name),
        ):
            value = getattr(self, field)
            if value is not None and value % divisor:
                reason = f"it has to be a multiple of {name}, {divisor}"
                raise ConfigError(field, value, reason)
        if self.last == "drop" and self.num_samples < self.global_batch_size:
            reason = f"an epoch of {self.num_samples} samples has no whole step, with last='drop'"
            raise ConfigError("global_batch_size", self.global_batch_size, reason)

    @property
    def unit(self) -> int:
        """How many samples are not divided between two groups."""
        return self.microbatch_size or self.num_shards

    @property
    def _unit_name(self) -> str:
        return "microbatch_size" if self.microbatch_size else "the number of workers in the group"

    def end_of_step(self, position: EpochPosition) -> int:
        """The end of the step that begins at ``position``, in numbers of the epoch's samples."""
        end = position.first + self.global_batch_size
        return end if self.last == "pad" else min(end, self.num_samples)

    def row_of(self, position: EpochPosition, piece: Piece) -> tuple[int, int, float]:
        """The number of a microbatch in the step at ``position``, how many there are, and its part
        of the step's samples: the same, whichever group reads it."""
        size = self.end_of_step(position) - position.first
        number = (piece.begin - position.first) // self.unit
        return number, -(-size // self.unit), (piece.end - piece.begin) / size

    def following(self, position: EpochPosition) -> EpochPosition:
        """The position after the step that begins at ``position``."""
        return self.normalized(EpochPosition(position.epoch, self.end_of_step(position)))

    def normalized(self, position: EpochPosition) -> EpochPosition:
        """``position``, or the beginning of the next epoch if no step begins there."""
        needed = self.global_batch_size if self.last == "drop" else 1
        if position.first + needed > self.num_samples:
            return EpochPosition(position.epoch + 1, 0)
        return position

    def share(self, position: EpochPosition, turn: Turn) -> WorkerShare:
        """What this worker reads in the step at ``position``, in a group with ``turn``.

        Groups get microbatches (or samples) that follow one another, as evenly as possible. A group
        that gets none, in a step with less of them than groups, reads the first one with weight 0:
        it has to make a pass, too.
        """
        begin, end = position.first, self.end_of_step(position)
        num_units = -(-(end - begin) // self.unit)
        each, rest = divmod(num_units, turn.size)
        first = turn.rank * each + min(turn.rank, rest)
        num_mine = each + (turn.rank < rest)
        if not num_mine:
            return self._empty_share(position, end)
        begins = begin + first * self.unit
        ends = min(begins + num_mine * self.unit, end)
        size = self.microbatch_size or ends - begins
        cuts = [self._cut(at, min(at + size, ends)) for at in range(begins, ends, size)]
        return WorkerShare(
            tuple(Piece(position.epoch, *cut) for cut, _ in cuts),
            tuple(count * self.num_shards / (ends - begins) for _, count in cuts),
            (ends - begins) / (end - begin),
        )

    def share_after_loss(
        self, position: EpochPosition, held: Sequence[Held], rank: int
    ) -> tuple[WorkerShare, int] | None:
        """What the group ``rank`` reads in the step at ``position``, where groups are left that
        ``held`` samples of it when another one was lost; and how many of these pieces it has read.

        What nobody holds is divided so that the groups have numbers of microbatches as even as
        possible. For groups of one worker. None: what is held overlaps, or is no part of the step.
        """
        begin, end = position.first, self.end_of_step(position)
        starts = range(begin, end, self.unit)
        free = dict.fromkeys(starts)
        sizes = []
        for each in held:
            mine = range(each.begin, each.end, self.unit)
            is_cut = each.end != end and (each.end - begin) % self.unit
            if mine and (is_cut or any(start not in free for start in mine)):
                return None
            for start in mine:
                del free[start]
            sizes.append(len(mine))
        quotas = _quotas(sizes, len(free))
        first = sum(quotas[:rank])
        added = list(free)[first : first + quotas[rank]]
        own = [*range(held[rank].begin, held[rank].end, self.unit), *added]
        if not own:
            return self._empty_share(position, end), 0
        counts = [min(start + self.unit, end) - start for start in own]
        # The sum of the weights of those that it held stays 1, as in the passes that are over.
        base = sum(counts[: sizes[rank]] or counts)
        share = WorkerShare(
            tuple(
                Piece(position.epoch, start, start + count)
                for start, count in zip(own, counts, strict=True)
            ),
            tuple(count / base for count in counts),
            base / (end - begin),
        )
        return share, sizes[rank]

    def _empty_share(self, position: EpochPosition, end: int) -> WorkerShare:
        """The first piece with weight 0, for a group without a sample: it makes a pass, too."""
        cut, _ = self._cut(position.first, min(position.first + self.unit, end))
        return WorkerShare((Piece(position.epoch, *cut),), (0.0,), 0.0)

    def _cut(self, begin: int, end: int) -> tuple[tuple[int, int], int]:
        """This worker's part of a piece of its group, and how many samples of it count.

        One that gets none reads the first, which does not count.
        """
        each, rest = divmod(end - begin, self.num_shards)
        first = begin + self.shard * each + min(self.shard, rest)
        count = each + (self.shard < rest)
        return ((first, first + count), count) if count else ((begin, begin + 1), 0)

    def pieces_from(self, position: EpochPosition, turn: Turn) -> Iterator[Piece]:
        """The pieces of this worker from the step at ``position`` on, if its turn stays."""
        while True:
            yield from self.share(position, turn).pieces
            position = self.following(position)

    def describe(self, *, recovers: bool = False, is_ordered: bool = False) -> str:
        """What must be equal in all groups, in words.

        ``recovers``: a step is divided anew if a group is lost in it. ``is_ordered``: its
        microbatches are summed in their order.
        """
        micro = (
            "" if self.microbatch_size is None else f" in microbatches of {self.microbatch_size}"
        )
        shards = "" if self.num_shards == 1 else f" over {self.num_shards} workers"
        more = ", recovered within the step" if recovers else ""
        more += ", summed in order" if is_ordered else ""
        return f"{self.global_batch_size} in a step{micro}{shards}, last step {self.last}{more}"


def _quotas(sizes: Sequence[int], num: int) -> list[int]:
    """How many of ``num`` more each group gets, so that all are as even as possible.

    Those with less come first, and of equal ones the first.
    """
    quotas = [0] * len(sizes)
    for _ in range(num):
        totals = [size + more for size, more in zip(sizes, quotas, strict=True)]
        quotas[totals.index(min(totals))] += 1
    return quotas


def shard_of(place_in_group: tuple[int, int], in_group: str) -> dict[str, int]:
    """Which part of its group's samples a worker reads, for `StepRules`.

    ``place_in_group``: its group rank, and the number of workers; ``in_group``: whether these
    ``"shard"`` the samples among them, or all read the ``"same"``.
    """
    if in_group not in ("shard", "same"):
        raise ConfigError("in_group", in_group, "use shard or same")
    rank, size = place_in_group
    return {"num_shards": size, "shard": rank} if in_group == "shard" else {}
