"""Long computations in pieces, between which a service does other work."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
# A computation that yields after each piece, and returns its result.
Pieces: TypeAlias = Generator[None, None, T]


def finish(pieces: Pieces[T]) -> T:
    """Compute all pieces one after the other, and return the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
