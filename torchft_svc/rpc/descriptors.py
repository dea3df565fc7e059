"""Finds out whether this process can open files: where it cannot, other errors mislead.

Without a descriptor no connection can be made. gRPC reports that as a host name that cannot be
resolved, and would try again for ever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from torchft_svc.errors import ConfigError

# What a service or a trainer opens to train alone; each other group needs some more.
SERVICE_DESCRIPTORS = 16
TRAINER_DESCRIPTORS = 24


def shortage(error: BaseException | None = None) -> str:
    """Why no file can be opened now, or could not when ``error`` was raised; empty: one can be.

    ``error``: one that torch's backends have caused; what they had opened is closed again.
    """
    cause = None if error is None else error.__cause__
    if isinstance(cause, RuntimeError):  # torch's only class for errors of its backends
        for number in (errno.EMFILE, errno.ENFILE):
            if os.strerror(number) in str(cause):
                return _explain(OSError(number, os.strerror(number)))
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return _explain(error)
    return ""


def require_descriptors(num_files: int, who: str) -> None:
    """Check that ``num_files`` more files can be opened.

    Raises:
        ConfigError: they cannot: the limit of this process or of the system is reached.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(num_files):
            try:
                descriptor = os.open(os.devnull, os.O_RDONLY)
            except OSError as error:
                if reason := _explain(error):
                    reason = f"{who} opens {num_files} files at its start: {reason}"
                    raise limit_error(reason) from None
                raise
            opened.callback(os.close, descriptor)


def limit_error(reason: str) -> ConfigError:
    """The error that ends a process which can open no file because of ``reason``."""
    return ConfigError("ulimit -n", resource.getrlimit(resource.RLIMIT_NOFILE)[0], reason)


def _explain(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"too many open files (EMFILE): this process may have {allowed}; raise the limit "
            "(ulimit -n), or look for files and sockets that stay open"
        )
    if error.errno == errno.ENFILE:
        return "too many open files on this system (ENFILE): raise the sysctl fs.file-max"
    return ""
