"""Decides what is one incident: all that breaks until the workers have formed again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# How many worlds in a row, which break before all have joined, are part of one incident.
MAX_FORMINGS = 3


class Remedy(Enum):
    """The remedies of an incident, the cheapest first."""

    REPLACE = "per-step"
    GROW = "growth"
    RESTART = "restart"


class IncidentCause(Enum):
    """The causes of incidents; a later one of this list explains those before it."""

    GROWTH = "workers are added"
    COLLECTIVE = "a collective failed"
    PROGRAM = "the program raised an error"
    SILENT = "a worker was silent"
    LOST = "a worker was lost"
    NO_RESOURCES = "there were no resources"

    @property
    def weight(self) -> int:
        return list(IncidentCause).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportBroken:
    """Training is interrupted (``remedy`` RESTART, GROW), or continues without a worker (REPLACE).

    ``rank``: of the worker that was lost or failed; None: of none. ``explains``: this is a better
    reason for the incident than those that were reported before.
    """

    remedy: Remedy
    cause: IncidentCause
    reason: str
    rank: int | None
    explains: bool = False


class OpenIncident:
    """The reason why all workers are started anew.

    ``cause``: None while nothing is wrong. ``is_spent``: it has cost a retry.
    """

    def __init__(self) -> None:
        self.cause: IncidentCause | None = None
        self.reason = ""
        self.is_spent = False
        self._num_formings = 0

    @property
    def cause_unknown(self) -> bool:
        """Whether a collective failed, and it is not known whose fault that is."""
        return self.cause is IncidentCause.COLLECTIVE

    @property
    def is_loss(self) -> bool:
        """Whether workers were lost, or may have been: those lost at once are one incident."""
        return self.cause is IncidentCause.LOST or self.cause_unknown

    def interrupt(
        self, remedy: Remedy, cause: IncidentCause, reason: str, rank: int | None
    ) -> list[ReportBroken]:
        """Apply ``remedy`` to all workers."""
        if self.cause is not None:
            self._num_formings += 1
            if self._num_formings < MAX_FORMINGS:
                return self.merge(cause, reason, rank)
        self._num_formings = 0
        self.cause, self.reason, self.is_spent = cause, reason, False
        return [ReportBroken(remedy=remedy, cause=cause, reason=reason, rank=rank)]

    def merge(self, cause: IncidentCause, reason: str, rank: int | None) -> list[ReportBroken]:
        """Add a cause, which may explain it better, to the open incident."""
        if self.cause is None:
            return []
        explains = cause.weight > self.cause.weight
        if explains:
            self.cause, self.reason = cause, reason
        return [
            ReportBroken(
                remedy=Remedy.RESTART, cause=cause, reason=reason, rank=rank, explains=explains
            )
        ]

    def close(self) -> None:
        """Close the incident: all workers have formed again, or are given up."""
        self.cause, self.reason = None, ""
