"""The memory that a process may still use: of its machine, and of its container."""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# Limit and usage of a container: cgroup version 2, and 1.
_CONTAINER_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_bytes() -> int | None:
    """Return the memory that is available at once; None if this system does not report it."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(_MEMINFO), re.MULTILINE)
    if found is None:
        return None
    available = int(found[1]) << 10
    for limit_file, used_file in _CONTAINER_LIMITS:
        limit, used = _read(limit_file).strip(), _read(used_file).strip()
        if limit.isdigit() and used.isdigit():  # "max" where there is no limit
            available = min(available, max(int(limit) - int(used), 0))
    return available


def total_bytes() -> int | None:
    """Return the memory of this machine, or of the container; None if it is not reported."""
    found = re.search(r"^MemTotal:\s+(\d+) kB$", _read(_MEMINFO), re.MULTILINE)
    if found is None:
        return None
    limits = [_read(limit_file).strip() for limit_file, _ in _CONTAINER_LIMITS]
    return min([int(found[1]) << 10, *(int(limit) for limit in limits if limit.isdigit())])


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
