"""Refuses updates of wrapped parameters in a backward pass, which is before the vote (rule T3).

Gradients are not averaged then, or not voted on: each group would silently train alone. A
step of an optimizer is refused before it changes anything. Other updates, such as a program's own
in a hook, are found at the end of the pass, by the versions of the parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch.optim.optimizer import Optimizer

from torchft_svc.client.process.optimizer_hooks import add_step_hooks
from torchft_svc.client.reduce.collectives import NO_GRAPH
from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

_present_graph = torch._C._current_graph_task_id
_STEPPED = (
    "a backward pass has to leave the parameters alone until the gradients are averaged and the "
    "step is voted on: an optimizer steps in a hook, such as register_post_accumulate_grad_hook, "
    "or is fused into the backward pass. Remove the hook, and step the optimizer after the vote: "
    "Optimizer(manager, optimizers).step()"
)


class Guarded(Protocol):
    """A wrapper that sums the gradients of parameters."""

    def guarded_names(self) -> Mapping[int, str]:
        """The names of the parameters by id; empty if it sums nothing any more."""

    def refuse_update(self, name: str) -> NoReturn:
        """Call `raise_early_update` for the parameter ``name``."""


_lock = threading.Lock()
_guarded: weakref.WeakSet[Guarded] = weakref.WeakSet()


def guard_updates(guarded: Guarded) -> None:
    """Refuse steps of optimizers in a backward pass from now on, while ``guarded`` lives."""
    with _lock:
        _guarded.add(guarded)
    add_step_hooks(before=_refuse_in_pass)


def _refuse_in_pass(optimizer: Optimizer, _: FrameType) -> None:
    if _present_graph() == NO_GRAPH:
        return
    with _lock:
        everybody = list(_guarded)
    for guarded in everybody:
        names = guarded.guarded_names()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    guarded.refuse_update(names[id(parameter)])


def raise_early_update(manager: Manager, name: str) -> NoReturn:
    """Raise the `ConfigError` of a parameter that is updated in a backward pass.

    It is the error of the step, too, in case that the program catches it.
    """
    error = ConfigError(name, "updated in a backward pass", _STEPPED)
    manager.report_error(error)
    raise error
