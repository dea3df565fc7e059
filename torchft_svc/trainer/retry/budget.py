"""Counts the incidents of a trainer's command, and knows an error that comes again."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.errors import ConfigError

# Retries without a limit.
UNLIMITED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramError:
    """The user's program raised an error in a worker, or a collective failed (``is_peers``).

    Two errors are the same if ``kind``, ``place`` (in the code) and ``step`` are. ``payload`` is
    the shell's.

    Args:
        is_final: it would come again at once.
        refuses_state: the state that the worker was to begin with could not be read or loaded.
    """

    kind: str
    message: str
    step: int
    is_peers: bool
    place: str = ""
    is_final: bool = False
    refuses_state: bool = False
    payload: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudget:
    """The number of incidents that a command survives.

    Args:
        max_retries: `UNLIMITED`, or how many are survived; the next one ends the command.
        reset_after: the number of steps without an incident after which none counts; None: never.
    """

    max_retries: int = 0
    reset_after: int | None = None

    def __post_init__(self) -> None:
        if self.max_retries < UNLIMITED:
            reason = "use 0 or more, or -1 for no limit"
            raise ConfigError("max_retries", self.max_retries, reason)
        if self.reset_after is not None and self.reset_after < 1:
            raise ConfigError("reset_retries_after", self.reset_after, "use 1 step or more")


class Retries:
    """The retries of one command, which begins at ``step``."""

    def __init__(self, budget: RetryBudget | None = None, step: int = 0) -> None:
        self.num = 0  # that count at the moment
        self._budget = budget or RetryBudget()
        self._spent_at_step = step
        self._last_error: ProgramError | None = None

    def spend(self, step: int) -> bool:
        """Spend a retry for an incident after ``step``; return whether one was left."""
        limit = self._budget.max_retries
        if limit != UNLIMITED and self.num >= limit:
            return False
        self.num += 1
        self._spent_at_step = step
        return True

    def begin_at(self, step: int) -> None:
        """Count steps from ``step``, which may be an earlier one."""
        self._spent_at_step = step

    def record_step(self, step: int) -> None:
        """Record that ``step`` was completed."""
        reset_after = self._budget.reset_after
        if reset_after is not None and step - self._spent_at_step >= reset_after:
            self.num = 0

    def is_known(self, error: ProgramError) -> bool:
        """Whether ``error`` is like the last one."""
        last = self._last_error
        return last is not None and _identity(last) == _identity(error)

    def record_error(self, error: ProgramError) -> bool:
        """Record ``error``; return whether it is like the last one."""
        is_repeated = self.is_known(error)
        self._last_error = error
        return is_repeated


def _identity(error: ProgramError) -> tuple[str, str, int]:
    return error.kind, error.place, error.step
