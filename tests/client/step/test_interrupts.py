"""Tests Ctrl-C, or any other exception, at any moment of a step: the manager stays consistent.

The exception is raised by a profiling hook, at each place of ours in a step where a signal's
handler could raise it: when the step comes there first, and when it does so last.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from support.training import Trainer, bits, lighthouse, together

from torchft_svc.core.quorum.activity import Phase

_OURS = ("torchft_svc/client/", "torchft_svc/core/quorum/worker/step.py")


class Interrupt(BaseException):
    """Stands for a KeyboardInterrupt, which pytest would take for its own."""


# A place: file, line and event. A moment: how often a step has been at a place.
Place = tuple[str, int, str]
Moment = tuple[Place, int]


class Hook:
    """Counts the places of ours where CPython handles signals, and raises at one moment.

    Those are the beginning of a function and the end of a call of one that is written in C.
    """

    def __init__(self, at: Moment | None = None) -> None:
        self._at = at
        self.visits: collections.Counter[Place] = collections.Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_return"):
            return
        if not any(part in frame.f_code.co_filename for part in _OURS):
            return
        place = frame.f_code.co_filename, frame.f_lineno, event
        self.visits[place] += 1
        if (place, self.visits[place]) == self._at:
            raise Interrupt(str(self._at))

    def moments(self) -> Iterator[Moment]:
        """The first and the last one at each place, in the order of the first ones."""
        for place, num in self.visits.items():
            yield from ((place, each) for each in sorted({1, num}))


@contextlib.contextmanager
def hooked(at: Moment | None = None) -> Iterator[Hook]:
    hook = Hook(at)
    sys.setprofile(hook)
    try:
        yield hook
    finally:
        sys.setprofile(None)


class Witness:
    """I3: all that was seen at one step, by whomever, are the same bits."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[Any, list[str]]] = collections.defaultdict(dict)

    def look(self, trainer: Trainer, why: str) -> None:
        state = trainer.manager._worker.state
        if not state.spoiled:
            found = repr(bits(trainer.state_dict()))
            self.seen[state.step].setdefault(found, []).append(f"{trainer.name} {why}")

    def check(self) -> None:
        differ = {step: list(found.values()) for step, found in self.seen.items() if len(found) > 1}
        assert not differ, differ


def everywhere(
    interrupted: Callable[[Trainer], object],
    before: Callable[[Trainer], object] = lambda _: None,
    after: Callable[[Trainer], object] = lambda _: None,
    stride: int = 1,
    first: int = 0,
) -> None:
    """Two groups train; one of them is interrupted at each ``stride``-th moment of a part of a
    step, from the ``first`` one on, which comes after another part, and goes on with the next step.

    The moments are those of an undisturbed step, and the places that others show. Where a step does
    not come to its moment, what comes ``after`` a part that returns something true follows."""
    witness = Witness()
    over = threading.Event()

    def goes_on(b: Trainer) -> None:
        while not over.is_set():
            b.step()
            witness.look(b, "after its step")

    def is_interrupted(a: Trainer) -> None:
        try:
            a.until(a.manager.current_step() + 1)
            before(a)
            with hooked() as hook:
                has_ended = interrupted(a)
            if has_ended:
                after(a)
            moments = list(hook.moments())
            assert len(moments) > 20, "a step has many places"
            number = first
            while number < len(moments):
                at = moments[number]
                number += stride
                a.until(a.manager.current_step() + 1)
                before(a)
                try:
                    with hooked(at) as hook:
                        has_ended = interrupted(a)
                    if has_ended:
                        after(a)
                except Interrupt:
                    state = a.manager._worker.state
                    assert state.phase not in (Phase.VOTING, Phase.APPLYING), at
                    assert not state.spoiled or state.unhealed, at
                known = {place for place, _ in moments}
                moments += [(place, 1) for place in hook.visits if place not in known]
                if a.manager._worker.state.phase is Phase.IDLE:
                    witness.look(a, str(at))
                a.step()
                witness.look(a, f"after {at}")
                witness.check()
        finally:
            over.set()
            a.manager.shutdown()

    with lighthouse() as address, Trainer(address, "a", 0) as a, Trainer(address, "b", 1) as b:
        together(lambda: is_interrupted(a), lambda: goes_on(b))
        witness.check()


@pytest.mark.parametrize("first", [0, 1, 2])  # three tests, each with its own time limit
def test_between_the_vote_and_the_end_of_the_update(first: int) -> None:
    everywhere(lambda a: a.optimizer.step(), before=lambda a: a.backward(), stride=3, first=first)


def test_in_the_vote_of_a_program_that_applies_the_update_itself() -> None:
    everywhere(
        lambda a: a.manager.should_commit(),
        before=lambda a: a.backward(),
        after=lambda a: a.inner.step(),
        stride=3,
    )


def test_from_the_beginning_of_a_step_to_its_end() -> None:
    everywhere(lambda a: a.step(), stride=7)
