"""The health check of a node: before it joins a run, and before it starts failed workers again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torchft_svc import env
from torchft_svc.host.health_check import check_health


class NodeHealth:
    """Runs ``command`` (empty: nothing) when it is due: at first, and after each failure."""

    def __init__(self, command: str, timeout_s: float) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._is_due = True

    def record_failure(self) -> None:
        """Let the next `check` run the command: the machine may be why workers have failed."""
        self._is_due = True

    def check(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Run the command if it is due; ``gives_up``: see `check_health`.

        Raises:
            HealthCheckFailed: this node must not join.
            ConfigError: the command cannot be started.
        """
        if self._command and self._is_due:
            check_health(self._command, self._timeout_s, gives_up)
        self._is_due = False

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Return a block whose workers do not run the command, too."""
        with env.set_while({env.HEALTH_CHECK_VARIABLE: ""} if self._command else {}):
            yield
