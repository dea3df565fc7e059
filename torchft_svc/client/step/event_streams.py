"""Three loggers with a record for each new quorum, each vote and each error of a worker.

Names and fields are the public release's: the message is empty, all is in ``extra``. A program that
wants them sets the level of a logger to INFO; without, a step costs a look at that level.
"""

from __future__ import annotations

import logging

from torchft_svc.coordination import QuorumResult

QUORUMS = logging.getLogger("torchft_quorums")
COMMITS = logging.getLogger("torchft_commits")
ERRORS = logging.getLogger("torchft_errors")


class EventStreams:
    """The streams of one worker of ``group``."""

    def __init__(self, job: str, group: str, group_rank: int) -> None:
        self._group = group
        self._fields: dict[str, object] = {"job_id": job, "rank": group_rank}
        self._quorum_id = 0

    def name_job(self, job: str) -> None:
        """Name the job in records from now on, for a program that knows it by another name."""
        self._fields["job_id"] = job

    def log_quorum(self, quorum: QuorumResult) -> None:
        """Log the quorum that the worker has entered, unless it is the one before."""
        if quorum.quorum_id != self._quorum_id:
            self._quorum_id = quorum.quorum_id
            if _is_wanted(QUORUMS):
                QUORUMS.info("", extra={**self._of(quorum), "step": quorum.max_step})

    def log_commit(self, quorum: QuorumResult | None, step: int, *, committed: bool) -> None:
        """Log the decision on ``step``."""
        if _is_wanted(COMMITS):
            fields = {**self._of(quorum), "step": step, "commit_result": committed}
            COMMITS.info("", extra=fields)

    def log_error(self, quorum: QuorumResult | None, error: Exception) -> None:
        """Log an error that costs a step."""
        if _is_wanted(ERRORS):
            ERRORS.info("", extra={**self._of(quorum), "error": str(error)})

    def _of(self, quorum: QuorumResult | None) -> dict[str, object]:
        if quorum is None:
            return {**self._fields, "replica_id": self._group, "quorum_id": 0}
        replica_id = quorum.replica_ids[quorum.replica_rank]
        return {**self._fields, "replica_id": replica_id, "quorum_id": quorum.quorum_id}


def _is_wanted(logger: logging.Logger) -> bool:
    """Whether the program has set the level of ``logger`` itself.

    A level of the root logger does not count: its handlers would print empty messages.
    """
    return logger.level != logging.NOTSET and logger.isEnabledFor(logging.INFO)
