"""Long computations in pieces, between which a service does other work."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Pieces: TypeAlias = Generator[None, None, T]


def finish(pieces: Pieces[T]) -> T:
    """Compute all pieces at once; returns the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
