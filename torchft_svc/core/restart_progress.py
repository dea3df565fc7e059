"""Decides whether it helps to restart workers again: not if they never get beyond a step."""

from __future__ import annotations

from torchft_svc.errors import ConfigError


class RestartProgress:
    """Counts an agent's restarts since its workers have last committed a new step.

    ``limit``: so many restarts in a row without such a step are the last ones (None: no limit).
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ConfigError("max_restarts_without_progress", limit, "use 1 or more")
        self._limit = limit
        self._best_step: int | None = None
        self._num_without = 0

    def record_failure(self, step: int | None) -> str:
        """Record a failure of workers whose last committed step is ``step`` (None: not known).

        Returns why another restart would be in vain; empty: it may help.
        """
        if step is None:
            return ""
        if self._best_step is None or step > self._best_step:
            self._best_step, self._num_without = step, 0
            return ""
        self._num_without += 1
        if self._limit is None or self._num_without < self._limit:
            return ""
        num = self._num_without
        restarts = "1 restart has" if num == 1 else f"{num} restarts in a row have"
        return f"{restarts} not got beyond step {self._best_step}"
