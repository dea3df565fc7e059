"""Calls functions before and after each step of any optimizer, by one pair of torch's global hooks.

Torch iterates over its global hooks on any thread, so they are registered once, and for the life of
the process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# Gets the optimizer, and the frame of torch's function around its step.
BeforeStep = Callable[[Optimizer, FrameType], None]
AfterStep = Callable[[Optimizer], None]

_lock = threading.Lock()
_before: tuple[BeforeStep, ...] = ()
_after: tuple[AfterStep, ...] = ()
_is_registered = False


def add_step_hooks(*, before: BeforeStep, after: AfterStep | None = None) -> None:
    """Call ``before`` and ``after`` around each step of any optimizer from now on; idempotent.

    They are not called in a step that torch compiles, nor ``after`` if the step raises.
    """
    global _before, _after, _is_registered
    with _lock:
        if before not in _before:
            _before = (*_before, before)
        if after is not None and after not in _after:
            _after = (*_after, after)
        if not _is_registered:
            register_optimizer_step_pre_hook(_call_before)
            register_optimizer_step_post_hook(_call_after)
            _is_registered = True


def _call_before(optimizer: Optimizer, _: Any, __: Any) -> None:
    if torch.compiler.is_compiling():
        return
    caller = sys._getframe(1)
    for hook in _before:
        hook(optimizer, caller)


def _call_after(optimizer: Optimizer, _: Any, __: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for hook in _after:
        hook(optimizer)
