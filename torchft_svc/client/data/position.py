"""The position of a job in its data: it moves with the committed steps, and heals (D1, D3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torchft_svc.client.data.plan import EpochPosition
from torchft_svc.errors import ConfigError

_UNREAD = (
    "the step was voted on before all of its samples were read: read the loader, for which "
    "microbatch_size is set, until loader.ends_step is true, and vote then"
)
_REPLAYED = (
    "no batch was read in this step, and the program has kept the first batch of the epoch that is "
    "over: itertools.cycle(loader) and the like train on the samples of one epoch over and over. "
    "Loop with `for epoch in loader.epochs(number): for batch in loader`; close() a loader that is "
    "not needed any more"
)
_UNSUMMED = (
    "the gradients of a loader with ordered_sums are not summed: read it until loader.ends_step is "
    "true, and make each pass inside of loader.accumulate(model), of the same models for each "
    "batch, before anything else is summed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDescription:
    """What must be the same in all groups (``layout``), and what a position belongs to (``data``).

    A run may continue at a position with another batch size, but not in other data.
    """

    data: str
    rules: str

    @property
    def layout(self) -> str:
        return f"{self.data}, {self.rules}"


class Companion(Protocol):
    """What heals beside a position: where a stream is."""

    def save_place(self) -> Any:
        """The state from which the present step can be read; for any thread."""

    def move_place(self, state: Any) -> None:
        """Go on from the state of another group, or of a checkpoint."""


class _Place(NamedTuple):
    """``position`` is that of the data after ``step`` commits.

    ``is_used``: the step that begins there uses the samples from there on.
    """

    step: int
    position: EpochPosition
    is_used: bool


class JobPosition:
    """The position of one loader, as the manager moves it; see `DataPosition`.

    Nothing is counted when samples are read: the position follows from the manager's number of
    committed steps. So a discarded step, and an update that was lost, cannot move it.

    Args:
        following: the position after the step that begins at the given one.
        committed_step: the manager's number of committed steps.
        companion: what is saved and loaded with the position.
    """

    def __init__(
        self,
        description: DataDescription,
        following: Callable[[EpochPosition], EpochPosition],
        committed_step: Callable[[], int],
        companion: Companion | None = None,
    ) -> None:
        self._description, self._companion = description, companion
        self.layout = description.layout  # asked for in each step
        self._following = following
        self._committed_step = committed_step
        # One value, because a background thread reads it.
        self._place = _Place(committed_step(), EpochPosition(), False)
        self.num_moves = 0  # how many times it was moved to where another group, or a file, is
        self.moved_to = 0  # the epoch of the last one
        # Of the present step: pieces that the program has not read, and gradients kept apart.
        self.num_unread = self.num_unsummed = 0
        # The first batch of an epoch that has ended, if the program has kept it; see `replayed`.
        self.kept: Callable[[], object] = lambda: None

    @property
    def is_used(self) -> bool:
        return self._place.is_used

    def now(self) -> EpochPosition:
        """The position at the beginning of the next step, or of the present one until it commits;
        for any thread."""
        place = self._place
        if place.is_used and self._committed_step() > place.step:
            return self._following(place.position)
        return place.position

    def use_step(self) -> None:
        """Record that the present step uses the samples from the position on."""
        self._place = self._place._replace(is_used=True)
        self.kept = lambda: None

    def move_to(self, position: EpochPosition) -> None:
        """Continue at ``position`` after the steps that are committed."""
        self._place = _Place(self._committed_step(), position, False)

    def begin_step(self, step: int) -> None:
        self._place = _Place(step, self.now(), False)
        self.num_unread = self.num_unsummed = 0

    def unread(self) -> str:
        return _UNREAD if self.num_unread else ""

    def replayed(self) -> str:
        return "" if self.kept() is None else _REPLAYED

    def unsummed(self) -> str:
        return _UNSUMMED if self.num_unsummed else ""

    def save(self) -> dict[str, Any]:
        position = self.now()
        return {
            "step": self._committed_step(),
            "epoch": position.epoch,
            "first": position.first,
            "data": self._description.data,
            **({} if self._companion is None else {"place": self._companion.save_place()}),
        }

    def heal(self, state: Any) -> None:
        """Continue where the group is from which this one heals, before its step commits.

        A step that is under way uses the samples from there on, although this group has read
        others, which do not count.
        """
        place = self._checked(state)
        self._place = place._replace(is_used=self._place.is_used)
        self._count_move(state)

    def load(self, state: Any) -> None:
        """Continue where a checkpoint was written.

        Raises:
            ConfigError: it is the position of another data set.
        """
        place = self._checked(state)
        self._place = place._replace(step=self._committed_step())
        self._count_move(state)

    def _count_move(self, state: dict[str, Any]) -> None:
        if self._companion is not None:
            self._companion.move_place(state["place"])
        self.num_moves += 1
        self.moved_to = self._place.position.epoch

    def _checked(self, state: Any) -> _Place:
        if not isinstance(state, dict) or not {"step", "epoch", "first", "data"} <= state.keys():
            raise ConfigError("state_dict", type(state).__name__, "it is no position in data")
        if state["data"] != self._description.data:
            reason = f"it is a position in other data: here are {self._description.data}"
            raise ConfigError("state_dict", state["data"], reason)
        return _Place(state["step"], EpochPosition(state["epoch"], state["first"]), False)
