"""Plants faults: replaces a guard, which is a public method or function of a machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest


def replace_guard(
    plant: pytest.MonkeyPatch, guard: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Let ``fake`` stand for ``guard`` until the test ends.

    The guard is given itself, not by its name, so that whoever renames it renames it here.
    """
    owner: Any = sys.modules[guard.__module__]
    *classes, name = guard.__qualname__.split(".")
    assert not name.startswith("_"), f"{guard.__qualname__} is private"
    for each in classes:
        owner = getattr(owner, each)
    plant.setattr(owner, name, fake)
