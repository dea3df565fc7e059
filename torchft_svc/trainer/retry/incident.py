"""Decides what is one incident: all that breaks until the workers have formed again."""

from __future__ import annotations

from torchft_svc.trainer.retry.orders import IncidentCause, Remedy, ReportBroken, RetryOrder

# Worlds that break before all have joined are part of the incident before, up to so many.
MAX_FORMINGS = 3


class OpenIncident:
    """Why all workers are started anew.

    ``cause``: None while nothing is wrong. ``is_spent``: it has cost a retry.
    """

    def __init__(self) -> None:
        self.cause: IncidentCause | None = None
        self.reason = ""
        self.is_spent = False
        self._num_formings = 0

    @property
    def is_riddle(self) -> bool:
        """Whether a collective failed, and it is not known whose fault that is."""
        return self.cause is IncidentCause.COLLECTIVE

    @property
    def is_loss(self) -> bool:
        """Whether workers were lost, or may have been: those lost at once are one incident."""
        return self.cause is IncidentCause.LOST or self.is_riddle

    def interrupt(
        self, remedy: Remedy, cause: IncidentCause, reason: str, rank: int | None
    ) -> list[RetryOrder]:
        """All workers are concerned."""
        if self.cause is not None:
            self._num_formings += 1
            if self._num_formings < MAX_FORMINGS:
                return self.merge(cause, reason, rank)
        self._num_formings = 0
        self.cause, self.reason, self.is_spent = cause, reason, False
        return [ReportBroken(remedy=remedy, cause=cause, reason=reason, rank=rank)]

    def merge(self, cause: IncidentCause, reason: str, rank: int | None) -> list[RetryOrder]:
        """This belongs to the incident that is open, and may explain it better."""
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
        """All workers have formed again, or are given up."""
        self.cause, self.reason = None, ""
