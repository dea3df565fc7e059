"""An optimizer whose updates count only if the whole quorum agrees."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchft_svc.client.reduce.collectives import uncompiled
from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager


# Between a program and this module may be our own frames, and those of torch.compile.
_NOT_THE_PROGRAM = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
)

_CLOSURE = (
    "a step has its backward pass before step(), and a closure would make others after the vote: "
    "call the optimizer's own step in the block of `with manager.commit()`, with a closure that "
    "returns the loss of that pass; LBFGS needs max_iter=1 for this"
)


class Optimizer(torch.optim.Optimizer):
    """Wraps ``optim``: `zero_grad` begins a step, `step` votes and applies the update, or not.

    It is an optimizer itself: learning-rate schedulers accept it, and its state, parameter groups
    and hooks are those of ``optim``. So step hooks run only for updates that are applied.

    ``optim`` may also be a list of optimizers, such as one for each kind of parameter: one vote
    decides on all their updates, which are applied in this order. Then ``param_groups`` are those
    of all, and ``state_dict()`` holds one for each; use hooks, ``state`` and schedulers of the
    single optimizers.

    A scheduler should follow the committed steps: step it where `step` returned True.

    A `torch.amp.GradScaler` accepts it, too, if the manager has ``use_async_quorum=False``: a step
    with infinite gradients is voted on like any other, and its update changes nothing. See
    docs/training-loops.md.

    Raises:
        ConfigError: ``optim`` is no optimizer, or a list that is empty or contains one twice.
    """

    # A GradScaler then always calls `step`, and passes its scale and findings as attributes.
    _step_supports_amp_scaling = True

    def __init__(
        self, manager: Manager, optim: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    ) -> None:
        # Not torch's constructor, which would create groups and state.
        self.manager = manager
        self.optims = _checked(optim)
        for each in self.optims:
            manager.register_optimizer(each)
        if isinstance(optim, torch.optim.Optimizer):
            self.optim = optim

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step, once, and clear the gradients.

        Until the step is voted on, a further call only clears them: a step may have several passes,
        all of which are averaged. It begins another step, and gives the present one up, after an
        exception in a backward pass, and where a loop comes back to the call with which it began
        the step, which it did not repeat in the step before (rule T12).

        Raises:
            PeerError: there is no quorum (only at step 0, or without ``use_async_quorum``).
        """
        site = _call_site()
        if not self.manager._continues_step(site):
            self.manager.start_quorum()
            self.manager._continues_step(site)
        for optim in self.optims:
            optim.zero_grad(set_to_none)

    @uncompiled
    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        """Apply the update if the step is committed; returns whether it was.

        After an exception in the update itself this worker is behind the others: it heals in the
        next step, and ends if there is no group to heal from.

        Raises:
            ConfigError: a closure was given, or is needed (LBFGS); it could run the backward pass
                several times. Or a GradScaler is used without ``use_async_quorum=False``. Nothing
                was voted on.
            CommitFailed: too many steps in a row were discarded.
        """
        try:
            self._check(closure)
            return self._vote_and_apply()
        except BaseException:
            # The scaler deletes them only if nothing is raised, and would scale by both the next
            # time.
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise

    def _check(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            raise ConfigError("closure", closure, _CLOSURE)
        if any(isinstance(optim, torch.optim.LBFGS) for optim in self.optims):
            raise ConfigError("closure", None, _CLOSURE)
        if "found_inf" in self.__dict__ and self.manager.heals_during_steps():
            reason = (
                "with a GradScaler it has to be False: a group that heals would divide the others' "
                "gradients by its own scale"
            )
            raise ConfigError("use_async_quorum", True, reason)

    def _vote_and_apply(self) -> bool:
        update = self.manager.commit()
        update.begun = False
        try:
            with update as committed:
                if committed:
                    self._apply(update)
        except BaseException as error:
            update.end(error)  # if an interrupt came before the block's own end
            raise
        return committed

    def _apply(self, update: _Applying) -> None:
        """Run the wrapped optimizers' steps, with the attributes that a GradScaler has set."""
        found_inf: torch.Tensor | None = self.__dict__.get("found_inf")
        scale: torch.Tensor | None = self.__dict__.get("grad_scale")
        for optim in self.optims:
            if found_inf is not None and getattr(optim, "_step_supports_amp_scaling", False):
                optim.grad_scale, optim.found_inf = scale, found_inf  # type: ignore[attr-defined]
                try:
                    update.begun = True
                    optim.step()
                finally:
                    del optim.grad_scale, optim.found_inf  # type: ignore[attr-defined]
            elif found_inf is None or not found_inf.item():
                if scale is not None:
                    _unscale(optim, scale)
                update.begun = True
                optim.step()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer, or of all, in a new list."""
        if len(self.optims) == 1:
            return self.optims[0].param_groups
        return [group for optim in self.optims for group in optim.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._only("param_groups").param_groups = groups

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped optimizer."""
        if name == "optims":
            raise AttributeError(name)
        if "optim" not in self.__dict__:
            raise AttributeError(
                f"an Optimizer of {len(self.optims)} optimizers has no {name!r}: use that of the "
                "single ones"
            )
        return getattr(self.optim, name)

    def _only(self, what: str) -> torch.optim.Optimizer:
        if "optim" not in self.__dict__:
            reason = "a list of optimizers is wrapped: use the single optimizer"
            raise ConfigError(what, f"of {len(self.optims)} optimizers", reason)
        return self.optim

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optims if len(self.optims) > 1 else self.optims[0]!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("save state_dict() instead: the manager cannot be pickled")

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer; of a list ``{"optimizers": [...]}``."""
        if "optim" in self.__dict__:
            return self.optim.state_dict()
        return {"optimizers": [optim.state_dict() for optim in self.optims]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer, or of each of them.

        Raises:
            ConfigError: a state for another number of optimizers; nothing was loaded.
        """
        if "optim" in self.__dict__:
            self.optim.load_state_dict(state_dict)
            return
        states = state_dict.get("optimizers", [state_dict])
        if len(states) != len(self.optims):
            reason = f"a state for each of {len(self.optims)} optimizers is needed"
            raise ConfigError("state_dict", f"for {len(states)}", reason)
        for optim, state in zip(self.optims, states, strict=True):
            optim.load_state_dict(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer.

        Raises:
            ConfigError: several are wrapped.
        """
        self._only("add_param_group").add_param_group(param_group)


class _Applying(Protocol):
    """What is to know that the weights begin to change."""

    begun: bool


def _checked(
    optim: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    if isinstance(optim, torch.optim.Optimizer):
        return [optim]
    if not isinstance(optim, Sequence):
        reason = "a torch.optim.Optimizer is needed, or a list of them"
        raise ConfigError("optim", type(optim).__name__, reason)
    optims = list(optim)
    if not optims:
        raise ConfigError("optim", optims, "a list needs one optimizer or more")
    for index, each in enumerate(optims):
        if not isinstance(each, torch.optim.Optimizer):
            reason = "a torch.optim.Optimizer is needed"
            raise ConfigError(f"optim[{index}]", type(each).__name__, reason)
    if len({id(each) for each in optims}) < len(optims):
        raise ConfigError("optim", optims, "an optimizer is in the list twice")
    return optims


def _call_site() -> tuple[object, int]:
    """The place in the program from which this package was called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


def _unscale(optim: torch.optim.Optimizer, scale: torch.Tensor) -> None:
    inverse = scale.double().reciprocal().float()
    for group in optim.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))


OptimizerWrapper = Optimizer
