"""Lets no forward pass of an FSDP model run while a function of the program exports its state.

The manager calls the program's `state_dict` functions on its background thread, once the answer of
the lighthouse is there. FSDP's own `state_dict()` reshards the weights, which a forward pass has
just gathered. Native programs use `sharded_state_dict` instead; those for the public release call
`model.state_dict()`, so their pass waits for the answer, in steps that ask for a quorum.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

from torch import nn

from torchft_svc.client.step.stepper import Stepper

# Models are made before the first steps; to look for them costs some hundredths of a second.
_LOOKS = 2
_FSDP = "torch.distributed.fsdp"


class ForwardGate:
    """Holds FSDP modules back in their forward pass until the state of the step was exported."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._num_looks = 0
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def close_for_step(self) -> None:
        """Begin to hold back, in the step that has just begun, the modules that there are."""
        if _FSDP not in sys.modules or self._num_looks >= _LOOKS:
            return
        # Any optimizer imports FSDP. Most programs shard nothing, and need not look.
        kinds = sharded_kinds(sys.modules[_FSDP].FSDPModule)
        if not kinds:
            return
        self._num_looks += 1
        numbers = {id(kind) for kind in kinds}  # a class need not be hashable
        for module in [each for each in gc.get_objects() if id(type(each)) in numbers]:
            if module not in self._known:
                self._known.add(module)
                module.register_forward_pre_hook(self._wait, prepend=True)

    def _wait(self, module: nn.Module, inputs: Any) -> None:
        self._stepper.wait_for_export()


def sharded_kinds(base: type) -> list[type[nn.Module]]:
    """Return the modules' classes below ``base``: FSDP makes one for each class that it shards."""
    found: list[type[nn.Module]] = []
    below: list[type] = base.__subclasses__()
    for kind in below:
        if issubclass(kind, nn.Module):
            found.append(kind)
        found += sharded_kinds(kind)
    return found
