"""Makes one result of those of all workers."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

# The weight of a worker's numbers, where it is among its results.
NUM_SAMPLES = "num_samples"


def reduced(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of those of all workers.

    Numbers are averaged, weighted by ``num_samples`` where all report it; ``num_samples`` is added
    up. All else, and what is equal, is that of the first worker which has it.
    """
    names = dict.fromkeys(name for each in results for name in each)
    return {name: _merged(name, [each for each in results if name in each]) for name in names}


def _merged(name: str, results: Sequence[Mapping[str, Any]]) -> Any:
    values = [each[name] for each in results]
    if name == NUM_SAMPLES:
        return sum(values)
    if not all(_is_real(value) for value in values) or all(each == values[0] for each in values):
        return values[0]
    weights = [float(each.get(NUM_SAMPLES, 0)) for each in results]
    if sum(weights) <= 0:
        weights = [1.0] * len(values)
    weighted = zip(values, weights, strict=True)
    return sum(float(value) * weight for value, weight in weighted) / sum(weights)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
