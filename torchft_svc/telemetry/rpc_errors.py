"""Counts the errors with which a service has answered its callers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class RpcErrors:
    """Errors by method and code; for one event loop."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._known: frozenset[str] = frozenset()

    def know_methods(self, methods: Iterable[str]) -> None:
        """Count these methods by their names; all others, which callers invent, as one."""
        self._known = frozenset(methods)

    def count(self, method: str, code: str) -> None:
        """Count an error of ``method``, which is a name without its service's."""
        self.counts[method if method in self._known else "unknown", code] += 1
