"""Finds out whether forks of this process would be like new processes, or would hang or fail.

Threads do not live on in a fork, and what waits for one of them there waits for ever: a pool of
OpenMP, for example, whose threads torch starts with the first larger sum. A driver of devices that
was initialized before the fork fails in it, whether or not torch knows that it was: the step of an
optimizer asks the current stream of a device, which initializes CUDA and not `torch.cuda`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

_DRIVER = "libcuda.so.1"
# What each of its functions returns before `cuInit` was called.
_NOT_INITIALIZED = 3
_USES_CUDA = "preloaded modules use CUDA, which does not work in forked processes"
# A thread that has ended is listed until the kernel has removed it.
_GONE_WITHIN_S, _LOOK_S = 1.0, 0.01


def why_not_forked() -> str:
    """Return why forks of this process would not be like new processes (empty: they would)."""
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if others:
        names = ", ".join(others)
        return f"preloaded modules have started threads, which workers would not have: {names}"
    torch = sys.modules.get("torch")
    if (torch is not None and torch.cuda.is_initialized()) or _is_driver_initialized():
        return _USES_CUDA
    if _does_torch_refuse_devices_in_a_fork():
        return "preloaded modules use a device, which torch refuses in forked processes"
    # Libraries that end their threads before a fork, such as OpenBLAS, have done so now.
    if num := _num_native_threads():
        return (
            f"preloaded modules have started {num} thread{'s' * (num > 1)} of native code, which "
            "workers would wait for; for example, they compute with torch"
        )
    return ""


def _is_driver_initialized() -> bool:
    """Whether this process has initialized CUDA; asks the driver only if something has loaded
    it."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def _does_torch_refuse_devices_in_a_fork() -> bool:
    """Fork, and return whether torch would raise an error there where a device is used."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch = sys.modules.get("torch")
            kinds = [getattr(torch, kind, None) for kind in ("cuda", "xpu")]
            checks = [getattr(kind, "_is_in_bad_fork", None) for kind in kinds]
            status = any(check() for check in checks if check is not None)
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return status != 0


def _num_native_threads() -> int:
    """The number of threads besides this one, where the system lists them."""
    until = time.monotonic() + _GONE_WITHIN_S
    while True:
        try:
            num = len(os.listdir("/proc/self/task")) - 1
        except OSError:
            return 0
        if not num or time.monotonic() > until:
            return num
        time.sleep(_LOOK_S)
