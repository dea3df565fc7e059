"""Finds parameters that a load function puts in the place of those that an optimizer updates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class Assignments:
    """The parameters that this thread assigns to modules, in a block of `watch`.

    ``load_state_dict(assign=True)`` and ``module.weight = nn.Parameter(...)`` are such assignments.
    The new parameter may have the memory of the former one, so their memory does not show it.
    """

    def __init__(self) -> None:
        self._former: dict[tuple[int, str], tuple[nn.Module, nn.Parameter]] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record the assignments of the block; those of other threads do not count."""
        thread = threading.get_ident()

        def record(module: nn.Module, name: str, _: nn.Parameter | None) -> None:
            former = module._parameters.get(name)
            if former is not None and threading.get_ident() == thread:
                self._former.setdefault((id(module), name), (module, former))

        hook = register_module_parameter_registration_hook(record)
        try:
            yield
        finally:
            hook.remove()

    def find_replaced(self, updated: Collection[int]) -> list[str]:
        """Return which trained parameters of ``updated`` are not those of their modules any more.

        ``updated``: the identities of what optimizers updated before the block.
        """
        return [
            f"{type(module).__name__}.{name}"
            for (_, name), (module, former) in self._former.items()
            if module._parameters.get(name) is not former
            and former.requires_grad
            and id(former) in updated
        ]
