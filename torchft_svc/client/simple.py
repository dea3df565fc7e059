"""The shortest way in: a manager from two functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchft_svc.client.manager import Manager


class FaultToleranceManager(Manager):
    """A `Manager` that takes ``state_dict`` first; every other keyword is the manager's own."""

    def __init__(
        self,
        save_state_dict: Callable[[], Any],
        load_state_dict: Callable[[Any], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(state_dict=save_state_dict, load_state_dict=load_state_dict, **kwargs)

    def step(self) -> None:
        """Begin a step: `Manager.start_quorum`."""
        self.start_quorum()
