"""Finds a smaller program that fails as well: what it does without had nothing to do with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tools.matrix.program import Mode, Pg, Program, Transport, Wrapper, reason_against

# What is plain; each stands for one step towards a program that nobody has to think about.
_PLAIN: tuple[tuple[str, object], ...] = (
    ("pg", Pg.GLOO),
    ("wrapper", Wrapper.DDP),
    ("transport", Transport.HTTP),
    ("mode", Mode.DYNAMIC),
    ("use_async_quorum", True),
    ("num_workers", 1),
    ("num_groups", 2),
)


def find_smallest(program: Program, fails: Callable[[Program], bool | None]) -> Program:
    """Leave out one thing after another as long as ``fails``; None from it: there is no time left.

    What fails now and then only may be taken for needed; it is tried once.
    """
    smallest = program
    tried = {program}
    while True:
        for smaller in _smaller(smallest):
            if smaller in tried:
                continue
            tried.add(smaller)
            outcome = fails(smaller)
            if outcome is None:
                return smallest
            if outcome:
                smallest = smaller
                break
        else:
            return smallest


def _smaller(program: Program) -> Iterator[Program]:
    """All programs that are one step simpler and can work."""
    if len(program.kills) > 1:
        yield dataclasses.replace(program, kills=program.kills[:-1])
    for feature in program.features:
        yield _valid(program, features=program.features - {feature})
    for name, value in _PLAIN:
        if getattr(program, name) != value:
            yield _valid(program, **{name: value})


def _valid(program: Program, **changes: object) -> Program:
    """The changed program, or the same one if it could not work, or had nobody to kill."""
    changed = dataclasses.replace(program, **changes)  # type: ignore[arg-type]
    fits = all(
        kill.group < changed.num_groups and kill.worker < changed.num_workers
        for kill in changed.kills
    )
    return changed if fits and reason_against(changed) is None else program
