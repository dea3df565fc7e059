"""Decides whether a call that clears the gradients belongs to the present step or begins another.

A step may have several passes with cleared gradients between (sharpness-aware minimization,
adversarial training), and a program may give a step up and begin its loop anew (rule T12). The
place of the call shows the difference: a loop that is begun anew clears where it began the step,
which it did not do again in the last step that was voted on.
"""

from __future__ import annotations

from collections.abc import Hashable

Site = Hashable  # a place in the program
Segments = tuple[frozenset[Site], ...]

# More calls with passes between are not remembered; they belong to their step.
MAX_SEGMENTS = 64
# An iteration that gives up its first passes so many times in a row, at the same places, means one
# step by them.
NUM_ALIKE = 3


class ClearingPattern:
    """The places at which the calls of a step were made, by how many passes had ended before."""

    def __init__(self) -> None:
        self._usual: Segments = ()  # of the last step that was voted on
        self._segments: list[set[Site]] = [set()]  # of the present step
        self._given_up: list[set[Site]] = []  # since the last vote
        self._num_launched = 0  # at the last call
        self._is_voted = True
        self._last: Segments = ()  # the last iteration that had given up passes
        self._num_alike = 0

    def begin_step(self) -> None:
        """Begin a step, which has made no call yet."""
        if not self._is_voted and any(self._segments):
            self._given_up = [*self._given_up, *self._segments][-MAX_SEGMENTS:]
        self._segments, self._num_launched, self._is_voted = [set()], 0, False

    def record_vote(self) -> None:
        """End the present step: its calls are those of this program's steps."""
        whole = _frozen([*self._given_up, *self._segments])
        self._num_alike = self._num_alike + 1 if whole == self._last else 1
        self._last = whole
        is_one = not self._given_up or self._num_alike >= NUM_ALIKE
        self._usual = whole if is_one else _frozen(self._segments)
        self._segments, self._given_up, self._is_voted = [set()], [], True

    def continues_step(self, site: Site, num_launched: int, *, has_failed: bool = False) -> bool:
        """Whether a call at ``site`` belongs to the present step, or else begins another one.

        ``num_launched``: how many sums the step has launched. ``has_failed``: it cannot be
        committed any more.
        """
        segments = self._segments
        if num_launched and num_launched != self._num_launched and len(segments) < MAX_SEGMENTS:
            index = len(segments)
        else:
            index = len(segments) - 1
        is_expected = index < len(self._usual) and site in self._usual[index]
        is_known = bool(self._usual) or has_failed
        if num_launched and is_known and not is_expected and site in segments[0]:
            return False
        if index == len(segments):
            segments.append(set())
        segments[index].add(site)
        self._num_launched = num_launched
        return True


def _frozen(segments: list[set[Site]]) -> Segments:
    return tuple(frozenset(segment) for segment in segments)
