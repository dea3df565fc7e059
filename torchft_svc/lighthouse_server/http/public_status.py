"""``/status`` as at the public release's lighthouse: the jobs as HTML, without a script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from torchft_svc.core.quorum.lighthouse.overview import GroupStatus, JobStatus
from torchft_svc.lighthouse_server.http.documents import group_state

_HEAD = ("replica id", "state", "step", "manager", "last sign")


def status_html(jobs: Iterable[JobStatus]) -> str:
    """Return a page for people and for programs that read it; it loads nothing."""
    return "".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8><title>lighthouse status</title>",
            "<h1>Lighthouse status</h1>",
            *(line for job in jobs for line in _job(job)),
        ]
    )


def _job(job: JobStatus) -> Iterator[str]:
    num_in_quorum = sum(group.in_quorum for group in job.groups)
    yield f"<h2>Job {html.escape(job.job)}</h2><ul>"
    yield f"<li>Current quorum id: {job.quorum_id}"
    yield f"<li>Num participants: {num_in_quorum}"
    yield f"<li>Max step: {job.committed_step}"
    yield f"<li>Next quorum status: {html.escape(job.waiting_for or 'nobody waits')}</ul>"
    yield f"<table><tr>{''.join(f'<th>{name}' for name in _HEAD)}"
    for group in job.groups:
        yield f"<tr>{''.join(f'<td>{html.escape(cell)}' for cell in _cells(group))}"
    yield "</table>"


def _cells(group: GroupStatus) -> tuple[str, ...]:
    return (
        group.replica_id,
        group_state(group),
        str(group.step),
        group.address or "-",
        f"{group.silent_s:.1f} s ago",
    )
