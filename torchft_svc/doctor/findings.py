"""What checks find, and how they run: side by side, each with a deadline."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

# A check that has not ended by then is reported as such; the others do not wait for it.
CHECK_DEADLINE_S = 5.0


class Level(enum.Enum):
    """How a check ended; ``UNCHECKED``: it could not be made here."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One line of the report: what was checked, what was ``found``, and what to do about it."""

    check: str
    level: Level
    found: str
    advice: str = ""


def found_ok(check: str, found: str) -> Diagnosis:
    """Return a finding that needs no advice."""
    return Diagnosis(check=check, level=Level.OK, found=found)


def found_warning(check: str, found: str, advice: str) -> Diagnosis:
    """Return a finding of something that works, but not as well as it could."""
    return Diagnosis(check=check, level=Level.WARNING, found=found, advice=advice)


def found_problem(check: str, found: str, advice: str) -> Diagnosis:
    """Return a finding of something that does not work."""
    return Diagnosis(check=check, level=Level.PROBLEM, found=found, advice=advice)


def found_nothing(check: str, why: str, advice: str = "") -> Diagnosis:
    """Return the finding of a check that could not be made."""
    return Diagnosis(check=check, level=Level.UNCHECKED, found=why, advice=advice)


class Running(Generic[T]):
    """A call on a thread of its own, which may be waited for with a deadline and left.

    A name that is being resolved cannot be interrupted: the thread is a daemon.
    """

    def __init__(self, name: str, call: Callable[..., T], *args: object) -> None:
        self._call, self._args = call, args
        self._over = threading.Event()
        self._values: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=f"doctor-{name}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._values.append(self._call(*self._args))
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        self._over.set()

    def wait(self, timeout_s: float) -> T:
        """Return what the call has returned, or raise what it has raised.

        Raises:
            TimeoutError: it goes on after ``timeout_s``.
        """
        if not self._over.wait(max(0.0, timeout_s)):
            raise TimeoutError(f"no end within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._values[0]


@dataclass(frozen=True, slots=True)
class Check:
    """A named check; ``run`` returns its findings, or raises what ends it."""

    name: str
    run: Callable[[], Iterable[Diagnosis]]
    deadline_s: float = CHECK_DEADLINE_S

    def list_findings(self) -> list[Diagnosis]:
        """Make the check."""
        return list(self.run())


def run_checks(checks: Sequence[Check]) -> list[Diagnosis]:
    """Run all checks at once, and return their findings in the order of the checks.

    One that does not end in time, or fails, is a problem; the others' findings stay.
    """
    began_at = time.monotonic()
    running = [(each, Running(each.name, each.list_findings)) for each in checks]
    findings: list[Diagnosis] = []
    for check, thread in running:
        left_s = began_at + check.deadline_s - time.monotonic()
        try:
            findings += thread.wait(left_s)
        except TimeoutError:
            advice = "something that it asks does not answer: look at the other findings"
            late = f"the check did not end within {check.deadline_s:g} s"
            findings.append(found_problem(check.name, late, advice))
        except Exception as error:
            log.debug("check %s failed", check.name, exc_info=error)
            reason = f"the check failed: {type(error).__name__}: {error}"
            findings.append(found_problem(check.name, reason, "report this"))
    return findings
