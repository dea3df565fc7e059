"""Process groups by the name of their backend; other packages add theirs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchft_svc.errors import ConfigError

# Returns a `ProcessGroup`, which stands above this module.
Factory = Callable[[timedelta], Any]

_HERE = __name__.rpartition(".")[0]
# A module is imported when its group is made: most programs need one of them.
_BUILT_IN = {
    "gloo": (f"{_HERE}.gloo", "ProcessGroupGloo"),
    "nccl": (f"{_HERE}.nccl", "ProcessGroupNCCL"),
    "baby-gloo": (f"{_HERE}.isolated.group", "ProcessGroupBabyGloo"),
    "baby-nccl": (f"{_HERE}.isolated.group", "ProcessGroupBabyNCCL"),
}
_factories: dict[str, Factory] = {}
_devices = ["cpu", "cuda"]


def register_process_group(
    backend: str, factory: Factory, *, device_type: str | None = None
) -> None:
    """Register ``factory`` under a name, by which ``Manager(pg=backend)`` makes its process group.

    Args:
        backend: a name, such as ``"xccl"``.
        factory: gets the timeout of collectives, and returns a `ProcessGroup` without members.
        device_type: torch's name of the accelerator whose tensors the group reduces, such as
            ``"xpu"``: so that `ft_init_device_mesh` and `ProcessGroup.register` accept it.

    Raises:
        ConfigError: the name is empty or taken, or ``factory`` is not callable.
    """
    if not backend or not isinstance(backend, str):
        raise ConfigError("backend", backend, "the name of a backend is needed")
    if backend in _factories or backend in _BUILT_IN:
        raise ConfigError("backend", backend, "another process group has this name")
    if not callable(factory):
        raise ConfigError("factory", factory, "a function of a timeout is needed")
    _factories[backend] = factory
    if device_type is not None and device_type not in _devices:
        _devices.append(device_type)


def make_process_group(backend: str, timeout: timedelta) -> Any:
    """Return a new process group for ``backend``, without members.

    Raises:
        ConfigError: nothing was registered under that name.
    """
    factory = _factories.get(backend)
    if factory is None:
        if backend not in _BUILT_IN:
            known = ", ".join(sorted({*_BUILT_IN, *_factories}))
            reason = f"known are {known}; add it with torchft_svc.register_process_group"
            raise ConfigError("pg", backend, reason)
        module, name = _BUILT_IN[backend]
        factory = getattr(importlib.import_module(module), name)
    assert factory is not None
    return factory(timeout)


def device_types() -> list[str]:
    """The types of device whose tensors a process group may reduce."""
    return list(_devices)
