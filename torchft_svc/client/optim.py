"""An optimizer whose updates count only if the whole quorum agrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager


class Optimizer(torch.optim.Optimizer):
    """Wraps ``optim``: `zero_grad` begins a step, `step` votes and applies the update, or not.

    It is an optimizer itself: learning-rate schedulers take it, and its state, parameter groups and
    hooks are those of ``optim``. Step hooks therefore run only for updates that are applied.

    A scheduler should follow the committed steps: step it where `step` returned True.

    A `torch.amp.GradScaler` takes it, too: a step with infinite gradients is voted on as any other,
    and its update changes nothing. See "Training loops" in docs/operations.md.
    """

    # A GradScaler then calls `step` in any case, and tells scale and finding by attributes.
    _step_supports_amp_scaling = True

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer) -> None:
        # Not torch's constructor: it would make groups and state of its own.
        if not isinstance(optim, torch.optim.Optimizer):
            raise ConfigError("optim", type(optim).__name__, "a torch.optim.Optimizer is needed")
        self.manager = manager
        self.optim = optim

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step, once, and clear the gradients.

        Called again in a step whose gradients were averaged already, it gives that step up.

        Raises:
            PeerError: at step 0, or without ``use_async_quorum``: there is no quorum.
        """
        if not self.manager.has_fresh_step():
            self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        """Apply the update if the step is committed; whether it was.

        Raises:
            ConfigError: a closure was given; it could run the backward pass several times.
            CommitFailed: too many steps in a row were discarded.
        """
        if closure is not None:
            raise ConfigError("closure", closure, "a step has one backward pass, before step()")
        if not self.manager.should_commit():
            return False
        try:
            self._apply()
        except BaseException as error:
            self.manager.report_spoiled_update(error)
            raise
        finally:
            self.manager.allow_state_dict_read()
        return True

    def _apply(self) -> None:
        """The wrapped optimizer's step; what a GradScaler has told this one is for that."""
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if found_inf is not None and getattr(self.optim, "_step_supports_amp_scaling", False):
            self.optim.grad_scale, self.optim.found_inf = scale, found_inf  # type: ignore[attr-defined]
            try:
                self.optim.step()
            finally:
                del self.optim.grad_scale, self.optim.found_inf  # type: ignore[attr-defined]
        elif found_inf is None or not found_inf.item():
            if scale is not None:
                self._unscale(scale)
            self.optim.step()

    def _unscale(self, scale: torch.Tensor) -> None:
        inverse = scale.double().reciprocal().float()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        """What is not decided here, is the wrapped optimizer's."""
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("save state_dict() instead: the manager cannot be pickled")

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the wrapped optimizer."""
        self.optim.add_param_group(param_group)


OptimizerWrapper = Optimizer
