"""`torchft.optim`: the optimizer whose step is a vote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchft_svc.client.optim import Optimizer as NativeOptimizer
from torchft_svc.compat.errors import public_errors


@dataclass(slots=True)
class _Applied:
    """What the native optimizer notes when it has begun to change the weights."""

    begun: bool = False


class OptimizerWrapper(NativeOptimizer):
    """The native optimizer by the public methods of its manager, which a program may override.

    `step` also returns whether the update was applied.
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step, once, and clear the gradients.

        Raises:
            RuntimeError, TimeoutError: there is no quorum.
        """
        with public_errors():
            super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        """Apply the update if the step is committed; returns whether it was.

        Raises:
            RuntimeError: more than ``max_retries`` steps in a row were discarded.
        """
        with public_errors():
            return super().step(closure)

    def _vote_and_apply(self) -> bool:
        committed = self.manager.should_commit()
        if committed:
            applied = _Applied()
            try:
                self._apply(applied)
            except BaseException as error:
                if applied.begun:
                    self.manager.report_spoiled_update(error)
                else:  # these weights are still those of the step before
                    self.manager._weights.lose_update()
                raise
            self.manager.allow_state_dict_read()
        return committed


Optimizer = OptimizerWrapper
