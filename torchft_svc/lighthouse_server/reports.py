"""What a lighthouse writes in its log: the sentences of its reports."""

from __future__ import annotations

import logging

from torchft_svc.core.quorum.lighthouse.jobs import (
    ReportEviction,
    ReportHang,
    ReportLeftHealing,
    ReportLoss,
    ReportPace,
    ReportPlaceReturned,
    ReportPlaceTaken,
    ReportStraggler,
)
from torchft_svc.core.quorum.lighthouse.lighthouse import (
    Publish,
    Report,
    ReportAcceptedLoss,
    ReportCommand,
    ReportPause,
)
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.session_messages import Kill

_log = logging.getLogger(__name__)
_FIELDS = ("job", "replica_id", "quorum_id", "step")


class Reports:
    """Writes the log; remembers the last quorums of ``max_jobs`` jobs, to log changes only."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._quorum_ids: dict[str, int] = {}  # the last one logged, by job

    def write(self, report: Report) -> None:
        """Write one line."""
        log = _bound_log(report)
        if isinstance(report, ReportLoss):
            _write_loss(log, report)
        elif isinstance(report, ReportEviction | ReportStraggler):
            whose = report.job, report.replica_id, report.reason
            log.warning("group left out job=%s replica=%s: %s", *whose)
        elif isinstance(report, ReportHang):
            log.warning(
                "group hangs job=%s replica=%s phase=%s step=%d for %.1f s",
                report.job,
                report.replica_id,
                report.phase.value,
                report.step,
                report.for_s,
            )
        elif isinstance(report, ReportPace):
            _write_pace(log, report)
        elif isinstance(report, ReportPlaceTaken | ReportPlaceReturned):
            _write_place(log, report)
        elif isinstance(report, ReportLeftHealing):
            log.warning(
                "group left out job=%s replica=%s: it has been healing for %.1f s, and has to "
                "start again: raise --heal-timeout-ms, or repair its link",
                report.job,
                report.replica_id,
                report.for_s,
            )
        elif isinstance(report, ReportPause):
            log.warning("no quorum job=%s for %.0f s: %s", report.job, report.for_s, report.why)
        elif isinstance(report, ReportCommand):
            _write_command(log, report)
        elif isinstance(report, ReportAcceptedLoss):
            log.warning(
                "loss accepted by an operator job=%s step=%d", report.job, report.committed_step
            )
        else:
            log.warning(
                "this process did not run for %.1f s, for which no group is blamed", report.for_s
            )

    def write_quorum(self, published: Publish) -> None:
        """Write a line about a quorum, if it is another one, and what is odd about it."""
        job, quorum = published.job, published.quorum
        fields = {"job": job, "quorum_id": quorum.quorum_id, "step": quorum.max_step}
        log = logging.LoggerAdapter(_log, fields)
        if published.lost_from is not None and published.begins_anew:
            log.info(
                "job begins anew job=%s at step %d: it had finished after step %d",
                job,
                quorum.max_step,
                published.lost_from,
            )
        elif published.lost_from is not None:
            log.warning(
                "job went back job=%s from step %d to step %d: no group has the newer state",
                job,
                published.lost_from,
                quorum.max_step,
            )
        for member in quorum.participants:
            if member.doubted_step:
                log.warning(
                    "step not believed job=%s replica=%s: it reports step %d, the job is at step "
                    "%d; it has to heal (--on-step-jump follow lets the job follow it)",
                    job,
                    member.replica_id,
                    member.doubted_step,
                    quorum.max_step,
                )
        if self._quorum_ids.pop(job, None) != quorum.quorum_id:
            log.info(
                "quorum changed job=%s id=%d step=%d groups=%d",
                job,
                quorum.quorum_id,
                quorum.max_step,
                len(quorum.participants),
            )
        self._quorum_ids[job] = quorum.quorum_id
        if len(self._quorum_ids) > self._max_jobs:  # of jobs that ended, forget the oldest
            del self._quorum_ids[next(iter(self._quorum_ids))]


def _bound_log(report: Report) -> logging.LoggerAdapter[logging.Logger]:
    """The log, whose lines of JSON have the job, the group and the step of ``report``."""
    fields = {name: getattr(report, name) for name in _FIELDS if getattr(report, name, None)}
    if "replica_id" in fields:
        fields["group"] = stable_name(fields["replica_id"])
    return logging.LoggerAdapter(_log, fields)


def _write_loss(log: logging.LoggerAdapter[logging.Logger], report: ReportLoss) -> None:
    whose = report.job, report.replica_id, report.reason
    if report.is_orderly:  # texts of their own: the limit of lines goes by the text
        log.info("group left job=%s replica=%s: %s", *whose)
    else:
        log.warning("group lost job=%s replica=%s: %s", *whose)


def _write_place(
    log: logging.LoggerAdapter[logging.Logger], report: ReportPlaceTaken | ReportPlaceReturned
) -> None:
    if isinstance(report, ReportPlaceTaken):
        log.info(
            "prepared spare takes a place job=%s replica=%s: one of %d was free",
            report.job,
            report.replica_id,
            report.num_places,
        )
    else:
        log.warning(
            "prepared spare stands by again job=%s replica=%s: all groups that trained are lost, "
            "and it has not got their state",
            report.job,
            report.replica_id,
        )


def _write_pace(log: logging.LoggerAdapter[logging.Logger], report: ReportPace) -> None:
    whose = report.job, report.replica_id, report.cause
    if report.evict:
        log.warning("slow group evicted job=%s replica=%s: %s", *whose)
    elif report.is_slow:
        log.warning("group slow job=%s replica=%s: %s", *whose)
    else:
        log.info("group no longer slow job=%s replica=%s: %s", *whose)


def _write_command(log: logging.LoggerAdapter[logging.Logger], report: ReportCommand) -> None:
    what, level = "drain", logging.INFO
    if isinstance(report.command, Kill):
        what, level = "kill", logging.WARNING
    whose = report.job, report.replica_id, report.command.reason
    log.log(level, "%s job=%s replica=%s: %s", what, *whose)
