"""What a lighthouse writes in its log about launched runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torchft_svc.core.launch.launched_run import (
    Report,
    ReportNode,
    ReportRunClosed,
    ReportRunMoved,
    ReportRunPaused,
    ReportWorld,
)

_log = logging.getLogger(__name__)

# In one line of the log.
MAX_NAMED_NODES = 5


def write_run_report(report: Report) -> None:
    """Write one line about a launched run."""
    fields = {name: getattr(report, name) for name in ("run", "node_id") if hasattr(report, name)}
    log = logging.LoggerAdapter(_log, fields)
    if isinstance(report, ReportWorld):
        world = report.world
        log.info(
            "world formed run=%s round=%d nodes=%d workers=%d: %s%s%s",
            report.run,
            world.round,
            len(world.nodes),
            world.world_size,
            report.cause.value,
            _named("joined", report.joined),
            _named("lost", report.lost),
        )
    elif isinstance(report, ReportNode):
        log.warning("node out run=%s node=%s: %s", report.run, report.node_id, report.reason)
    elif isinstance(report, ReportRunPaused):
        log.warning("no world run=%s: %s", report.run, report.reason)
    elif isinstance(report, ReportRunClosed):
        level, how = (logging.WARNING, "failed") if report.failed else (logging.INFO, "finished")
        log.log(level, "run closed run=%s, %s: %s", report.run, how, report.reason)
    elif isinstance(report, ReportRunMoved):
        log.info("run moves to an earlier lighthouse run=%s: %s", report.run, report.address)
    else:
        log.warning(
            "this process did not run for %.1f s, for which no node is blamed", report.for_s
        )


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A record of a launched run's change; not ``is_over``: the next world is part of it."""

    run: str
    cause: str
    nodes: tuple[str, ...] = ()
    is_over: bool = True


def describe_change(report: Report) -> RunRecord | None:
    """The change that a report is about (None: it is no change by itself)."""
    if isinstance(report, ReportWorld):
        named = _named("joined", report.joined) + _named("lost", report.lost)
        num, cause = len(report.world.nodes), report.cause.value
        cause = f"world of round {report.world.round} with {num} nodes: {cause}{named}"
        return RunRecord(report.run, cause, (*report.joined, *report.lost))
    if isinstance(report, ReportRunPaused):
        return RunRecord(report.run, f"no world: {report.reason}", is_over=False)
    if isinstance(report, ReportRunClosed):
        how = "failed" if report.failed else "finished"
        return RunRecord(report.run, f"the run has {how}: {report.reason}")
    if isinstance(report, ReportRunMoved):
        return RunRecord(report.run, f"the run moves to the earlier lighthouse {report.address}")
    return None


def _named(what: str, node_ids: tuple[str, ...]) -> str:
    more = ", ..." if len(node_ids) > MAX_NAMED_NODES else ""
    return f"; {what}: {', '.join(node_ids[:MAX_NAMED_NODES])}{more}" if node_ids else ""
