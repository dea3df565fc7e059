"""Differences between two documents as JSON merge patches (RFC 7396)."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def difference(before: Document, after: Document) -> Document:
    """Return the merge patch that makes ``after`` of ``before``; neither contains a None.

    Lists are values: one that differs is sent whole.
    """
    patch: Document = {name: None for name in before if name not in after}
    for name, value in after.items():
        if name not in before:
            patch[name] = value
            continue
        old = before[name]
        if old == value:
            continue
        if isinstance(old, dict) and isinstance(value, dict):
            patch[name] = difference(old, value)
        else:
            patch[name] = value
    return patch
