"""Makes `import torchft` find this package, in this process and in those that it starts."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from torchft_svc import env
from torchft_svc.errors import ConfigError

PUBLIC = "torchft"
HERE = "torchft_svc.compat"
# Has a package `torchft` that installs the finder: for processes that this one starts.
SEARCH_PATH = str(Path(__file__).parent / "search_path")
_PATH_VARIABLE = "PYTHONPATH"


def install(*, replace: bool = False, for_children: bool = False) -> None:
    """Make ``import torchft`` and all imports below it find this package; may be called twice.

    Args:
        replace: also where the public release is installed; without it that is an error.
        for_children: also in the Python programs that this process starts from now on, by
            ``PYTHONPATH``.

    Raises:
        ConfigError: the public release is installed, or was imported already.
    """
    _check_absent(replace)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if for_children:
        others = [each for each in env.value_of(_PATH_VARIABLE, "").split(os.pathsep) if each]
        if SEARCH_PATH not in others:
            env.update({_PATH_VARIABLE: os.pathsep.join([SEARCH_PATH, *others])})


def _check_absent(replace: bool) -> None:
    imported = sys.modules.get(PUBLIC)
    if imported is not None and not _is_ours(imported):
        reason = "it was imported already: call install() before the first `import torchft`"
        raise ConfigError(PUBLIC, getattr(imported, "__file__", None), reason)
    if replace:
        return
    elsewhere = [each for each in sys.path if each != SEARCH_PATH]
    found = importlib.machinery.PathFinder.find_spec(PUBLIC, elsewhere)
    if found is not None and found.origin is not None:
        reason = (
            "the public release is installed here: uninstall it, or ask for its replacement with "
            "install(replace=True) or `python -m torchft_svc.compat --replace`"
        )
        raise ConfigError(PUBLIC, found.origin, reason)


def _is_ours(module: ModuleType) -> bool:
    return module.__name__ == HERE or str(module.__file__).startswith(SEARCH_PATH)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `torchft.x` as `torchft_svc.compat.x`, which is one module under both names."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != PUBLIC:
            return None
        home = f"{HERE}.{rest}" if rest else HERE
        found = importlib.util.find_spec(home)
        if found is None:
            return None
        spec = importlib.machinery.ModuleSpec(
            fullname, _Alias(home), origin=found.origin, is_package=_is_package(found)
        )
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


class _Alias(importlib.abc.Loader):
    """Loads the module ``home`` under another name."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing but keep the module's own spec, which Python has just replaced."""
        module.__spec__ = self._spec


def _is_package(spec: importlib.machinery.ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None
