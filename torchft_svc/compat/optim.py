"""`torchft.optim`: the optimizer whose step is a vote."""

from __future__ import annotations

from collections.abc import Callable

from torchft_svc.client.optim import Optimizer as NativeOptimizer
from torchft_svc.compat.errors import public_errors


class OptimizerWrapper(NativeOptimizer):
    """The native optimizer with the public release's errors.

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


Optimizer = OptimizerWrapper
