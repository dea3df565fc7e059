"""Finds out whether a program that applies its updates itself has applied one completely (rule T6).

`Manager.commit` and `Optimizer` see the end of an update. After `Manager.should_commit` the program
steps its optimizers, and may catch what they raise. Torch's global hooks of ``Optimizer.step`` show
which steps began and which came to their end.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from torchft_svc.client.process.optimizer_hooks import add_step_hooks

log = logging.getLogger(__name__)

# How many updates in a row step the same optimizers before it counts that one of them is left out.
# Programs that step an optimizer from time to time, or in turns with another one, do it by design.
NUM_USUAL = 3
# A program that steps more optimizers than this in one update is not watched.
MAX_OPTIMIZERS = 64

_Ref = weakref.ref[Optimizer]


@dataclass(frozen=True, slots=True)
class LostUpdate:
    """The reason why an update is not in the weights; ``is_spoiled``: a part of it may be."""

    reason: str
    is_spoiled: bool


@dataclass(slots=True)
class _Window:
    """The steps of optimizers on one thread between a vote and the end of its update."""

    siblings: list[_Window]  # those of the thread, which the hooks read
    owner: weakref.ref[UpdateWatch]
    under_way: dict[_Ref, int] = field(default_factory=dict)  # steps that have no end
    ended: set[_Ref] = field(default_factory=set)

    def close(self) -> None:
        if self in self.siblings:
            self.siblings.remove(self)


class UpdateWatch:
    """Watches updates one after the other; its methods belong to the training thread.

    ``is_ours``: whether an optimizer updates what this group trains; others are ignored, such as
    those of an evaluation, or of another manager. ``average_of``: the averaged gradients of
    parameters, as far as they are still there.
    """

    def __init__(
        self,
        is_ours: Callable[[Optimizer], bool],
        average_of: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    ) -> None:
        self._is_ours = is_ours
        self._average_of = average_of
        self._window: _Window | None = None
        self._history: deque[frozenset[_Ref]] = deque(maxlen=NUM_USUAL)
        self._suspected_in: int | None = None  # the version of the weights that were suspected
        self._omits_by_design = False
        add_step_hooks(before=_begin_optimizer_step, after=_end_optimizer_step)

    def open_window(self) -> None:
        """Begin to watch: the program of this thread is about to apply an update."""
        self.close_window()
        siblings = _windows.of_thread
        siblings[:] = [window for window in siblings if window.owner() is not None]
        self._window = _Window(siblings, weakref.ref(self))
        siblings.append(self._window)

    def close_window(self) -> None:
        """Stop watching: what follows belongs to no update; idempotent."""
        if self._window is not None:
            self._window.close()
            self._window = None

    def is_under_way(self) -> bool:
        """Whether this call is made inside of an optimizer's step of the update."""
        window = self._window
        if window is None or not window.under_way:
            return False
        running = _running_steps()
        return any(ref() is each for ref in window.under_way for each in running)

    def find_failure(self) -> LostUpdate | None:
        """Return why the update is lost: an exception has left a step of an optimizer."""
        window = self._window
        if window is None or not window.under_way:
            return None
        begun = [optimizer for ref in window.under_way if (optimizer := ref()) is not None]
        running = _running_steps() if window.siblings is _windows.of_thread else begun
        for optimizer in begun:
            if not any(optimizer is each for each in running) and self._is_ours(optimizer):
                name = type(optimizer).__name__
                return LostUpdate(f"an exception has ended {name}.step()", is_spoiled=True)
        return None

    def end_window(self, weights_version: int) -> LostUpdate | None:
        """End the update; returns why it is lost (None: nothing speaks against it).

        ``weights_version`` changes when the weights are replaced by those of another group.
        """
        window = self._window
        if window is None:
            return None
        loss = self.find_failure()
        self.close_window()
        if self._suspected_in is not None and loss is None:
            if self._suspected_in == weights_version:
                self._omits_by_design = True
                log.info(
                    "no other group was ahead after the update that was left out: from now on this "
                    "is taken for the program's way"
                )
            self._suspected_in = None
        ended = frozenset(window.ended)
        if loss is None and ended != self._usual() and len(window.ended) <= MAX_OPTIMIZERS:
            loss = self._find_omission(ended)
            if loss is not None:
                self._suspected_in = weights_version
        self._history.append(ended)
        return loss

    def last_optimizers(self) -> list[Optimizer]:
        """The optimizers that the last update has stepped, in no order; empty: not known."""
        refs = self._history[-1] if self._history else frozenset()
        return [optimizer for ref in refs if (optimizer := ref()) is not None]

    def _usual(self) -> frozenset[_Ref]:
        """The optimizers that each of the last updates has stepped; empty: they differ."""
        history = self._history
        is_usual = len(history) == NUM_USUAL and all(each == history[0] for each in history)
        return history[0] if is_usual else frozenset()

    def _find_omission(self, ended: frozenset[_Ref]) -> LostUpdate | None:
        """Whether an optimizer was not stepped that always was, although it has something to do.

        It has not if its gradients are infinite, as where a GradScaler leaves out the update, or
        zero. That a part is missing is no certain sign, so the weights do not count as spoiled: the
        group heals if another one is ahead of it, and goes on with them otherwise.
        """
        usual = self._usual()
        if self._omits_by_design or not ended < usual:
            return None
        missing = [optimizer for ref in usual - ended if (optimizer := ref()) is not None]
        omitted = [each for each in missing if self._is_ours(each) and self._has_gradients(each)]
        if not omitted:
            return None
        names = ", ".join(sorted({type(each).__name__ for each in omitted}))
        return LostUpdate(
            f"{names}.step() was not called after should_commit(), as it was in the "
            f"{NUM_USUAL} steps before: if an exception was caught there, apply the update in the "
            "block of `with manager.commit()`",
            is_spoiled=False,
        )

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether its averaged gradients are still there, all finite, and not all zero."""
        groups = optimizer.param_groups
        trained = [each for group in groups for each in group["params"] if each.requires_grad]
        found = [getattr(each, "_local_tensor", each) for each in self._average_of(trained)]
        return all(bool(each.isfinite().all()) for each in found) and any(
            bool(each.any()) for each in found
        )


class _Windows(threading.local):
    """The open windows of the present thread."""

    def __init__(self) -> None:
        self.of_thread: list[_Window] = []


_windows = _Windows()


def _begin_optimizer_step(optimizer: Optimizer, caller: FrameType) -> None:
    if not _windows.of_thread or not _is_step(caller, optimizer):
        return
    for window in _windows.of_thread:
        if len(window.under_way) <= MAX_OPTIMIZERS:
            ref = weakref.ref(optimizer)
            window.under_way[ref] = window.under_way.get(ref, 0) + 1


def _end_optimizer_step(optimizer: Optimizer) -> None:
    for window in _windows.of_thread:
        ref = weakref.ref(optimizer)
        num = window.under_way.pop(ref, 0)
        if num > 1:
            window.under_way[ref] = num - 1
        if len(window.ended) <= MAX_OPTIMIZERS:
            window.ended.add(ref)


def _running_steps() -> list[Any]:
    """The optimizers whose ``step`` this call is inside of, such as in one of their hooks."""
    found = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _step_codes:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found


# Torch's function around ``Optimizer.step``, which calls the hooks.
_step_codes: set[CodeType] = set()


def _is_step(caller: FrameType, optimizer: Optimizer) -> bool:
    """Whether ``caller``, which has called a hook, is what `_running_steps` finds ``optimizer`` by.

    If it is not, as another version of torch may have it, nobody can know which steps are running:
    then none is followed, rather than one reported as left that runs.
    """
    if caller.f_code not in _step_codes and caller.f_locals.get("self") is optimizer:
        _step_codes.add(caller.f_code)
    return caller.f_code in _step_codes
