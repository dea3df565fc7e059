"""Decides when groups compare their states, and from the fingerprints which differ (rule C1).

Every member computes both from what all members know alike, so they agree without a message.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchft_svc.core.limits import MAX_INT64
from torchft_svc.errors import ConfigError

DEFAULT_CHECK_EVERY = 500
OnDifference = Literal["heal", "warn", "stop"]
ON_DIFFERENCE: tuple[OnDifference, ...] = ("heal", "warn", "stop")
# After the step in which members met or one healed. Two, because a healed optimizer state that is
# stale shows in the parameters only after the next update.
NUM_STEPS_AFTER_MEETING = 2
# More parameters or settings than this are compared, but the first difference is not named.
MAX_ITEMS = 1 << 16
MAX_NAMES = 8  # of groups, in a sentence


class Part(enum.IntEnum):
    """The parts of a fingerprint; a cause stands before its effects."""

    LAYOUT = 0  # names, order, shapes and types of the trained parameters
    OBJECTS = 1  # whether each of them is the object that was wrapped
    OPTIMIZERS = 2  # classes of the optimizers, and which parameters they update
    SETTINGS = 3  # numbers in `param_groups`
    VALUES = 4  # bytes of the parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRules:
    """The settings of state checks: one every ``check_every`` steps (0: never), and what follows.

    ``heal``: the minority heals; ``warn``: the difference is logged; ``stop``: all groups end.
    Both settings are equal in all groups of a job.
    """

    check_every: int = DEFAULT_CHECK_EVERY
    on_difference: OnDifference = "heal"

    def __post_init__(self) -> None:
        as_policy(self.on_difference)
        if isinstance(self.check_every, bool) or not isinstance(self.check_every, int):
            raise ConfigError("check_every", self.check_every, "use a whole number of steps")
        if self.check_every < 0:
            raise ConfigError("check_every", self.check_every, "use 0 (never) or more steps")
        if self.check_every > MAX_INT64:
            raise ConfigError("check_every", self.check_every, "use 0 (never) for so many steps")

    def described(self) -> dict[str, object]:
        """The settings that must be equal in all groups, by name."""
        if not self.check_every:
            return {"check_every": 0}
        return {"check_every": self.check_every, "on_difference": self.on_difference}


def as_policy(on_difference: str) -> OnDifference:
    """Return ``on_difference`` as an `OnDifference`; raises `ConfigError` if it is none."""
    for known in ON_DIFFERENCE:
        if on_difference == known:
            return known
    reason = f"use {', '.join(ON_DIFFERENCE[:-1])} or {ON_DIFFERENCE[-1]}"
    raise ConfigError("on_difference", on_difference, reason)


NEVER = CheckRules(check_every=0)


class CheckSchedule:
    """Decides which steps of a job compare states (rule C1).

    ``since``: the step since which this group has its state: it joined or healed then.
    """

    def __init__(self, check_every: int) -> None:
        self._check_every = check_every
        self._met_at = 0
        self._is_member = False
        self.since = 0

    def begin_quorum(self, step: int, *, heals: bool, is_new: bool) -> None:
        """Record that a quorum begins at ``step``.

        ``heals``: this group has to heal. ``is_new``: the members connect, or one of them heals;
        all of them know that.
        """
        if heals or not self._is_member:
            self.since = step
        self._is_member = True
        if is_new or step < self._met_at:  # the job may have gone back to a checkpoint
            self._met_at = step

    def is_due(self, step: int) -> bool:
        """Whether the members compare their states in ``step``; equal on all of them."""
        if not self._check_every:
            return False
        return step <= self._met_at + NUM_STEPS_AFTER_MEETING or step % self._check_every == 0

    def is_settled(self, step: int) -> bool:
        """Whether an equal state in ``step`` shows that this group's last heal was complete."""
        return step >= self.since + NUM_STEPS_AFTER_MEETING


class Row(NamedTuple):
    """A group's fingerprint, as it travels: numbers only.

    ``is_present`` 0: the group heals in this step, and is not compared. ``since``: see
    `CheckSchedule`. Then a digest for each `Part`, and how many items each part has.
    """

    is_present: int = 0
    since: int = 0
    digests: tuple[int, ...] = (0,) * len(Part)
    num_items: tuple[int, ...] = (0,) * len(Part)

    def encode(self) -> list[int]:
        """Return the row as `ROW_LENGTH` numbers."""
        return [self.is_present, self.since, *self.digests, *self.num_items]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Row:
        """The row of another group."""
        digests, num_items = numbers[2 : 2 + len(Part)], numbers[2 + len(Part) : ROW_LENGTH]
        return cls(numbers[0], numbers[1], tuple(digests), tuple(num_items))


ROW_LENGTH = 2 + 2 * len(Part)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """Groups whose states differ, by replica rank.

    ``part`` is the first one in which a group of the ``minority`` differs from the ``majority``;
    ``first`` is the lowest such group. ``num_items``: how many items of it to look through.
    """

    part: Part
    majority: tuple[int, ...]
    minority: tuple[int, ...]
    first: int
    num_items: int


def find_difference(rows: Sequence[Row]) -> StateDifference | None:
    """The difference between the groups that are compared; None: they are equal.

    A part that one of them does not know, because it has no items there, is not compared. The
    largest set of equal groups is the majority. Of two that are equally large it is not the one
    with the group that has joined or healed last, and then not the one with higher replica ranks.
    """
    present = [(rank, row) for rank, row in enumerate(rows) if row.is_present]
    parts = [part for part in Part if all(row.num_items[part] for _, row in present)]
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank, row in present:
        sets.setdefault(tuple(row.digests[part] for part in parts), []).append(rank)
    if len(sets) < 2:
        return None

    def order(ranks: list[int]) -> tuple[int, int, int]:
        return -len(ranks), max(rows[rank].since for rank in ranks), ranks[0]

    majority = min(sets.values(), key=order)
    minority = sorted(rank for ranks in sets.values() if ranks is not majority for rank in ranks)
    ours = rows[majority[0]].digests
    part, first = min(
        (next(part for part in parts if rows[rank].digests[part] != ours[part]), rank)
        for rank in minority
    )
    num_items = max(rows[rank].num_items[part] for rank in (majority[0], first))
    return StateDifference(
        part=part,
        majority=tuple(majority),
        minority=tuple(minority),
        first=first,
        num_items=max(0, min(num_items, MAX_ITEMS)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The first item that differs, by the digest of its ``name``; ``num_more`` others differ.

    ``theirs`` and ``ours``: its numbers in the minority's first group and in the majority (None:
    it does not exist there, or is at another place).
    """

    name: int
    theirs: int | None
    ours: int | None
    num_more: int = 0


NamedNumber = tuple[int, int]  # a digest of a name (0: none), and a number


def find_item(theirs: Sequence[NamedNumber], ours: Sequence[NamedNumber]) -> Item | None:
    """The first item that differs between two lists.

    Items of one name are compared, wherever they are; if these are equal, the first place with
    different names is meant.
    """
    numbers = dict(ours)
    unlike = [
        (name, number, numbers[name])
        for name, number in theirs
        if name and name in numbers and number != numbers[name]
    ]
    if unlike:
        name, their, our = unlike[0]
        return Item(name=name, theirs=their, ours=our, num_more=len(unlike) - 1)
    for (their_name, _), (our_name, _) in zip(theirs, ours, strict=True):
        if their_name != our_name:
            return Item(name=our_name or their_name, theirs=None, ours=None)
    return None


def describe_difference(
    difference: StateDifference,
    item: Item | None,
    name_item: Callable[[Part, int], str],
    show_number: Callable[[int], str],
    group_names: Mapping[int, str],
    step: int,
    last_equal: int | None,
) -> str:
    """The sentence for people: what differs, on which group, since which check.

    ``name_item`` returns what an item is called, by the digest of its name (empty: not known here);
    ``last_equal``: the step of the last check without a difference.
    """
    first, others = group_names[difference.first], group_names[difference.majority[0]]
    part = difference.part
    name = "" if item is None else name_item(part, item.name)
    found = f"{_WHAT[part]} of group {first} are not those of group {others}"
    if item is not None and name and (item.theirs is None or item.ours is None):
        found += f", from {name} on"
    elif item is not None and name:
        found = _describe_item(part, item, name, show_number, first, others)
    more_groups = [group_names[rank] for rank in difference.minority if rank != difference.first]
    also = f"; groups that differ, too: {', '.join(more_groups[:MAX_NAMES])}" if more_groups else ""
    since = (
        "they were not compared before"
        if last_equal is None
        else f"they were equal in the check of step {last_equal}"
    )
    return f"in the check of step {step}, {found} ({since}{also})"


def _describe_item(
    part: Part, item: Item, name: str, show_number: Callable[[int], str], first: str, others: str
) -> str:
    assert item.theirs is not None
    assert item.ours is not None
    more = f" and {item.num_more} more" if item.num_more else ""
    if part is Part.SETTINGS:
        theirs, ours = show_number(item.theirs), show_number(item.ours)
        return f"{name} is {theirs} in group {first} and {ours} in group {others}"
    if part is Part.OBJECTS:
        replaced, whole = (others, first) if item.theirs else (first, others)
        were = "were replaced by other objects" if more else "was replaced by another object"
        return (
            f"{name}{more} {were} in group {replaced} after the model was wrapped, and not in "
            f"group {whole}"
        )
    if part is Part.VALUES:
        return f"the values of {name}{more} in group {first} are not those of group {others}"
    if part is Part.LAYOUT:
        return f"{name} has another shape or type in group {first} than in group {others}"
    return f"{name} updates other parameters in group {first} than in group {others}"


_WHAT = {
    Part.LAYOUT: "names, order, shapes or types of the parameters",
    Part.OBJECTS: "the wrapped parameters",
    Part.OPTIMIZERS: "the optimizers or the parameters that they update",
    Part.SETTINGS: "the settings of the optimizers",
    Part.VALUES: "the values of the parameters",
}
