"""A copy of this checkout to build from: setuptools leaves its work beside the sources."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.running import ROOT

# What no clean checkout has.
_LEFT_BY_TOOLS = shutil.ignore_patterns(
    ".git",
    ".venv",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "results",
)


def copy_sources(folder: Path) -> Path:
    """Copy the checkout into ``folder``, which does not exist yet; returns ``folder``."""
    shutil.copytree(ROOT, folder, ignore=_LEFT_BY_TOOLS)
    return folder
