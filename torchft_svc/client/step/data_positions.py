"""Positions in data that move with the committed steps: the manager's side (rules D1, D3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torchft_svc.client.step.state import StateRegistry
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.worker.step import Participation, StepState
from torchft_svc.errors import ConfigError, RequestRefused

_KEY = "torchft.data."
ALONE = Participation(participating_rank=0, num_participants=1)
_JOINED = (
    "another group has joined in this step, whose samples this group has read as the only one: "
    "they are divided among both in the next step"
)
_ONE_LOADER = (
    "a step with several loaders cannot be divided anew: use one loader, or recover_within_step="
    "False in all"
)
_READ_TWICE = (
    "the samples of this step were read, and it was not voted on: call optimizer.step() before the "
    "next batch. To accumulate gradients give the loader a microbatch_size and vote where "
    "loader.ends_step; to skip a batch make its loss zero; after an exception in the pass call "
    "manager.report_error(error), and the same samples come again. To evaluate, or to read without "
    "steps, use a DataLoader of its own"
)
_READ_IN_TURNS = (
    "this loader has no further batch in this step, but %s: loaders that are read in turns, as by "
    "zip(), need equal numbers of batches in each step, also in a short one at an epoch's end. Use "
    "last='drop' in all of them, or read one until its ends_step is true, then the next"
)


class DataPosition(Protocol):
    """A position in data that groups heal by."""

    @property
    def is_used(self) -> bool:
        """Whether the present step uses samples from there on."""

    @property
    def layout(self) -> str:
        """What must be equal in all groups, in words."""

    def begin_step(self, step: int) -> None:
        """Record that a step begins after ``step`` committed ones."""

    def unread(self) -> str:
        """Why the present step must not be summed; empty: all of its samples were read."""

    def replayed(self) -> str:
        """Why a step in which no loader is read must not be summed; empty: nothing is known."""

    def unsummed(self) -> str:
        """Why it must not be voted on; empty: no gradients are kept apart, see `summing_kept`."""

    def save(self) -> Any:
        """The position at the beginning of the present step; for any thread."""

    def heal(self, state: Any) -> None:
        """Continue at the position of another group."""


class Divisible(Protocol):
    """A loader whose step the groups can divide anew when one of them is lost (rule D11)."""

    def may_divide(self) -> bool:
        """Whether this group has read its share of the present step, which counts."""

    def divide_anew(self, entered: EnteredStep) -> bool:
        """Divide the present step, in another quorum now, among the groups that are left.

        Returns whether this one has to read, and to make passes, before its gradients are summed.
        """


class EnteredStep(NamedTuple):
    """A step whose members are known.

    ``number`` grows with each step that is begun; ``participating_rank`` is None for a group that
    does not contribute, ``num_participants`` is 0 if there is no quorum.
    """

    number: int
    participating_rank: int | None
    num_participants: int


class DataPositions:
    """The positions of all loaders of a manager; for the training thread."""

    def __init__(self, registry: StateRegistry) -> None:
        self._registry = registry
        self._positions: dict[str, DataPosition] = {}
        self._is_guessed = False  # whether this step's samples were read as by the only group
        self._sums_kept = False
        self.divisible: Divisible | None = None

    def add(self, name: str, position: DataPosition, divisible: Divisible | None = None) -> None:
        """Move ``position`` with the steps from now on, and heal by it.

        Raises:
            ConfigError: another loader has this name, or is there beside a divisible one.
        """
        if self._positions and (divisible or self.divisible):
            raise ConfigError("recover_within_step", True, _ONE_LOADER)
        if name in self._positions:
            reason = "another loader has it: give each loader its own, the same in all groups"
            raise ConfigError("name", name, reason)
        self._registry.register(_KEY + name, position.heal, position.save)
        self._positions[name] = position
        self.divisible = divisible

    @property
    def names(self) -> list[str]:
        """The names of all loaders."""
        return list(self._positions)

    def layouts(self) -> list[str]:
        """What must be equal in all groups, in words, for each loader."""
        return [f"data {name!r}: {each.layout}" for name, each in self._positions.items()]

    def begin_step(self, step: int) -> None:
        self._is_guessed = False
        for each in self._positions.values():
            each.begin_step(step)

    def why_read_again(self) -> str:
        """Why a loader is asked for more than its share: another one has batches left (empty: it is
        not that)."""
        left = [name for name, each in self._positions.items() if each.unread()]
        return _READ_IN_TURNS % f"loader {left[0]!r} has some" if left else ""

    def guess_alone(self) -> None:
        """Record that a loader reads before the quorum is known, as for the only group."""
        self._is_guessed = True

    @contextlib.contextmanager
    def summing_kept(self) -> Iterator[None]:
        """Return a block that sums what a loader has kept apart: others still keep and read
        theirs."""
        self._sums_kept = True
        try:
            yield
        finally:
            self._sums_kept = False

    def why_not_summed(self, participation: Participation) -> RequestRefused | None:
        """The error of a step whose samples were not all read, or not those of this group."""
        if self._is_guessed and participation != ALONE:
            return RequestRefused(_JOINED)
        positions = self._positions.values()
        reasons = []
        if not self._sums_kept:  # a loader sums what it has read, while others may have more
            reasons += [each.unsummed() for each in positions]
            reasons += [each.unread() for each in positions]
        if not any(each.is_used for each in positions):
            reasons += [each.replayed() for each in positions]
        return next((RequestRefused(reason) for reason in reasons if reason), None)


def needs_another_step(
    state: StepState,
    read_in: int,
    is_under_way: bool,
    has_failed: Callable[[], bool],
    why_again: Callable[[], str],
) -> bool:
    """Whether a loader begins a step before it reads, or reads for the one that is under way.

    ``read_in``: the step for which it has read its last batch. ``has_failed``: whether the present
    step can only be discarded. ``why_again``: see `DataPositions.why_read_again`.

    Raises:
        RequestRefused: it has read all of the present step already, which was not voted on.
    """
    if not is_under_way or state.phase is Phase.VOTING:
        return True
    if state.epoch != read_in:
        return False
    if has_failed():
        return True
    raise RequestRefused(why_again() or _READ_TWICE)
