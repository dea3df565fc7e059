"""Checks this machine: open files, shared memory, memory, and the versions that are installed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from torchft_svc.doctor.findings import (
    Diagnosis,
    found_nothing,
    found_ok,
    found_problem,
    found_warning,
)
from torchft_svc.host.available_memory import available_bytes
from torchft_svc.host.quantities import show_bytes
from torchft_svc.rpc.descriptors import TRAINER_DESCRIPTORS
from torchft_svc.version import VERSION

# What a program with data loaders opens beside ours, and what each other group needs: connections
# of collectives and heals.
_OWN_FILES, _FILES_PER_GROUP = 232, 8
_LEAST_PYTHON = (3, 10)
_LEAST = {"torch": (2, 7), "grpcio": (1, 66), "protobuf": (6, 31)}
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is looked at, not written to
# Loaders of data pass batches through it; containers have 64 MB by default.
_LEAST_SHARED = 256 << 20


def check_files(num_groups: int) -> Iterator[Diagnosis]:
    """Check the limit of open files against what a trainer with so many other groups opens."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = TRAINER_DESCRIPTORS + _OWN_FILES + _FILES_PER_GROUP * num_groups
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield found_ok("open files", f"{shown} are allowed, about {needed} may be needed")
        return
    found = f"{soft} are allowed, about {needed} may be needed with {num_groups} groups"
    is_enough = soft >= TRAINER_DESCRIPTORS + _FILES_PER_GROUP * num_groups
    advice = f"ulimit -n {needed}"
    if hard != resource.RLIM_INFINITY and hard < needed:
        advice += f" (the hard limit is {hard}: raise LimitNOFILE or limits.conf)"
    yield (found_warning if is_enough else found_problem)("open files", found, advice)


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> Iterator[Diagnosis]:
    """Check the size of the file system that data loaders and isolated process groups share."""
    try:
        stats = os.statvfs(folder)
    except OSError as error:
        yield found_problem(
            "shared memory", f"{folder}: {error.strerror}", f"mount a tmpfs at {folder}"
        )
        return
    size, free = stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail
    found = f"{folder} has {show_bytes(size)}, {show_bytes(free)} free"
    if free < _LEAST_SHARED:
        yield found_warning(
            "shared memory",
            found,
            "docker run --shm-size=2g, or an emptyDir with medium Memory: data loaders with "
            "workers and isolated process groups need it",
        )
    else:
        yield found_ok("shared memory", found)


def check_memory(state_bytes: float | None) -> Iterator[Diagnosis]:
    """Check that a copy of the state fits into the memory that is available."""
    available = available_bytes()
    if available is None:
        yield found_nothing("memory", "this system does not report it")
        return
    found = f"{show_bytes(available)} available"
    if state_bytes is None:
        yield found_ok("memory", f"{found} (--state-size shows whether a heal fits)")
    elif available < state_bytes:
        yield found_problem(
            "memory",
            f"{found}, and a worker that starts or heals holds {show_bytes(state_bytes)} once more",
            "give the container or the machine more memory",
        )
    else:
        yield found_ok("memory", f"{found}; a heal needs {show_bytes(state_bytes)} of it")


def check_versions() -> Iterator[Diagnosis]:
    """Check the versions of Python, of this package and of what it builds on."""
    found = [f"torchft_svc {VERSION}", f"Python {platform.python_version()}"]
    too_old = [] if sys.version_info >= _LEAST_PYTHON else ["Python"]
    missing = []
    for name, least in _LEAST.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        found.append(f"{name} {version}")
        if _numbers(version) < least:
            too_old.append(f"{name} (at least {'.'.join(map(str, least))})")
    if too_old:
        advice = f"install a newer {', '.join(too_old)}"
        yield found_problem("versions", ", ".join(found), advice)
    else:
        yield found_ok("versions", ", ".join(found))
    if "torch" in missing:
        yield found_nothing(
            "torch",
            "it is not installed: gloo, NCCL and devices were not checked, nor whether it is new "
            "enough",
            "run this where the trainer runs",
        )


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split("+")[0].split(".")[:2]:
        digits = "".join(char for char in part if char.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)
