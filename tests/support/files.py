"""Reads files that other processes may be writing."""

from __future__ import annotations

from pathlib import Path


def complete_lines(file: Path) -> list[str]:
    """The lines of ``file``, if it is there, without a last one that has no end yet."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line.removesuffix("\n") for line in lines if line.endswith("\n")]
