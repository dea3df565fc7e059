"""Runs a program in which `import torchft` finds this package, as well as in all that it starts.

python -m torchft_svc.compat [--replace] train.py [arguments]
python -m torchft_svc.compat [--replace] -m package.module [arguments]
torchrun --nproc-per-node 2 -m torchft_svc.compat train.py [arguments]
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from torchft_svc.compat.finder import install
from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError
from torchft_svc.manager_server.early import start_manager_early

_USAGE = "usage: python -m torchft_svc.compat [--replace] (program.py | -m module) [arguments]"


def main(arguments: Sequence[str]) -> None:
    """Run the program that ``arguments`` name, as Python would."""
    rest = list(arguments)
    replace = rest[:1] == ["--replace"]
    if replace:
        rest.pop(0)
    is_module = rest[:1] == ["-m"]
    if is_module:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(2)
    try:
        install(replace=replace, for_children=True)
    except ConfigError as error:
        raise SystemExit(f"torchft_svc.compat: {error}") from None
    _prepare_manager()
    sys.argv[:] = rest
    if is_module:
        # As with Python's own -m, the first entry of the path is the present directory.
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(rest[0]).resolve().parent)
        runpy.run_path(rest[0], run_name="__main__")


def _prepare_manager() -> None:
    """Start the group's manager while the program imports torch, if this is a worker of a job."""
    with contextlib.suppress(ConfigError):  # the program's own manager raises it
        if Environment().lighthouse_address is not None:
            start_manager_early()


if __name__ == "__main__":
    main(sys.argv[1:])
