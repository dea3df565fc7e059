"""What a group remembers of its last commit barrier, for a worker that votes when it is over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EndedBarrier:
    """The barrier of ``round``, about one of ``steps``.

    ``decision`` is None if there was none, because of ``reason``; then nobody was told yes.
    """

    round: int
    steps: frozenset[int]
    decision: bool | None
    reason: str

    def concerns(self, round_: int, step: int) -> bool:
        """Whether a vote belongs here; ``round_`` is 0 if the voter does not know rounds."""
        return round_ in (0, self.round) and step in self.steps
