"""Runs a module in another process, whatever lies in the folder where that is started.

``python -m`` looks for modules in the working directory first, where a user's ``secrets.py`` or
``random.py`` would replace the standard library's. ``-P`` is not known before Python 3.11. So
`module_command` runs this file as a program: it removes its own folder from ``sys.path``, and then
runs the module as ``python -m`` does. ``PYTHONPATH`` and virtual environments work as usual.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

# Begins a line that reports the error which has ended the process.
FAILED = "failed: "
# The longest such report: what a pipe accepts in one piece.
MAX_FAILURE_BYTES = 512


def module_command(module: str, report_to: int, *arguments: str) -> list[str]:
    """The command that runs ``module`` with ``arguments`` in this Python.

    ``report_to``: a descriptor of the new process. If an error ends it, the last line of that goes
    there after `FAILED`, and the whole to standard error, as always.
    """
    return [sys.executable, os.path.abspath(__file__), str(report_to), module, *arguments]


def last_line(error: BaseException) -> str:
    """The last line of the traceback of ``error``, or of the error that made it exit."""
    import traceback

    if isinstance(error, SystemExit) and error.__cause__ is not None:
        error = error.__cause__
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    line = text.splitlines()[-1] if text else type(error).__name__
    return line.encode(errors="backslashreplace")[:MAX_FAILURE_BYTES].decode(errors="ignore")


def ended_how(status: int) -> str:
    """Describe the unexpected end of a child; ``status`` is negative for a signal."""
    if status >= 0:
        return f"ended with status {status}, see its output on stderr"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    return f"was killed by {name}"


def _report(descriptor: int, error: BaseException) -> None:
    if isinstance(error, SystemExit) and error.code in (0, None):
        return
    with contextlib.suppress(OSError):  # whoever has started this process is gone
        os.write(descriptor, f"{FAILED}{last_line(error)}\n".encode())


def main() -> None:
    _, report_to, module, *arguments = sys.argv
    sys.argv[1:] = arguments
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file
    import importlib.util
    import runpy

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    needed = ("torchft_svc", module.partition(".")[0])
    if any(importlib.util.find_spec(each) is None for each in needed):  # in a checkout
        sys.path.append(root)

    pid = os.getpid()

    run_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]
    try:
        run_as_main(module)
    except BaseException as error:
        if os.getpid() == pid:  # not what a fork server has forked: its descriptors are others
            _report(int(report_to), error)
        raise


if __name__ == "__main__":
    main()
