"""Moves a process to a host of its own: a network namespace, whose address is the host's name."""

from __future__ import annotations

import ctypes
import os
import socket

_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000


def move_to(address: str, namespace: str) -> None:
    """Move this process, which has one thread yet, to a host's network ``namespace``.

    ``namespace``: its name, as iproute2 has it (empty: the process stays in its own).

    Others find what listens on all addresses under the name of the host, so that is the address.

    Raises: OSError: this takes root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if namespace:
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        try:
            _check(libc.setns(descriptor, _CLONE_NEWNET))
        finally:
            os.close(descriptor)
    _check(libc.unshare(_CLONE_NEWUTS))
    socket.sethostname(address)


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
