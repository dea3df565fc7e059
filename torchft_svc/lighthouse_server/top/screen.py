"""Draws a view of a lighthouse in so many columns and lines; what needs somebody comes first."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchft_svc.core.launch.launched_run import RunStatus
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.incidents import Incident
from torchft_svc.core.quorum.lighthouse.overview import GoneGroup, GroupStatus, JobStatus
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.host.log_format import escaped
from torchft_svc.lighthouse_server.table import (
    GROUP_HEAD,
    copies_line,
    goodput_line,
    pace_cells,
    phase_cell,
    spares_line,
)
from torchft_svc.lighthouse_server.top.feed import View, sort_jobs

KEYS = "q quit   tab next job   up/down, page up/down groups"
# Beside the groups, which get the rest of the screen.
MAX_JOB_ROWS, MAX_INCIDENT_ROWS, MAX_RUN_ROWS = 5, 5, 3
_LEAST_GROUP_ROWS = 3
_SENTENCE_LINES = 3
# Silence, and a step that stands still, are shown as unusual after so long.
_SILENT_S, _STALLED_S = 2.0, 30.0
# Of an incarnation; the name in front of it is what people know.
_INCARNATION_SHOWN = 8


@dataclass(slots=True)
class Selection:
    """What the keys have chosen: a job (until then the first of the list), and the first group
    shown.

    ``job``: how many jobs to go on from that which was drawn last, ``job_name`` (empty: none).
    """

    job: int = 0
    job_name: str = ""
    has_chosen: bool = False
    first_group: int = 0

    def choose_next_job(self) -> None:
        """Go to the next job, and to its first groups."""
        self.job, self.first_group, self.has_chosen = self.job + 1, 0, True

    def find_job(self, names: Sequence[str]) -> int:
        """Return the place of the job to draw, which may have moved since it was drawn last."""
        stays = self.has_chosen and self.job_name in names
        place = (self.job + (names.index(self.job_name) if stays else 0)) % len(names)
        self.job, self.job_name = 0, names[place]
        return place

    def scroll_groups(self, rows: int) -> None:
        """Move the part of the groups that is shown; the screen keeps it within them."""
        self.first_group = max(0, self.first_group + rows)


def draw_screen(
    view: View, selection: Selection, where: str, width: int, height: int, *, keys: bool = True
) -> RenderableType:
    """Draw ``view`` of the lighthouse at ``where``; corrects ``selection`` to what is there."""
    head = list(_head(view, where, width))
    foot = [Text(KEYS, style="dim", no_wrap=True, overflow="ellipsis")] if keys else []
    left = height - len(head) - len(foot)
    body = list(_body(view, selection, width, left))
    rows = [*head, *body]
    if keys:
        rows += [Text("")] * max(0, height - len(foot) - _count_lines(rows))
    return Group(*rows, *foot)


def _count_lines(rows: Sequence[RenderableType]) -> int:
    return sum(
        row.row_count + bool(row.show_header) if isinstance(row, Table) else 1 for row in rows
    )


def _line(text: str, style: str = "") -> Text:
    return Text(escaped(text), style=style, no_wrap=True, overflow="ellipsis")


def _sentence(text: str, style: str, width: int) -> list[Text]:
    """A reason, which is worth some lines: its end often says what to do."""
    lines = textwrap.wrap(escaped(text), max(1, width), max_lines=_SENTENCE_LINES, placeholder="…")
    return [Text(line, style=style, no_wrap=True, overflow="ellipsis") for line in lines]


def _head(view: View, where: str, width: int) -> Iterator[Text]:
    clock = time.strftime("%H:%M:%S")
    if view.failing_since is not None:
        away_s = time.monotonic() - view.failing_since
        yield _line(f"lighthouse {where}  {clock}  NO ANSWER for {away_s:.0f} s", "bold red")
        yield from _sentence(f"asking again; {view.error}", "red", width)
    elif view.answered_at is None:
        yield _line(f"lighthouse {where}  {clock}  waiting for its answer", "bold")
    else:
        age_s = time.monotonic() - view.answered_at
        yield _line(f"lighthouse {where}  {clock}  updated {age_s:.0f} s ago", "bold")


def _body(view: View, selection: Selection, width: int, height: int) -> Iterator[RenderableType]:
    jobs, runs = sort_jobs(view.answer.jobs), view.answer.runs
    if not jobs and not runs:
        if view.answered_at is not None:
            yield _line("no job has a living group")
        return
    shown_runs = runs[:MAX_RUN_ROWS]
    height -= len(shown_runs) + (len(runs) > len(shown_runs))
    if jobs:
        chosen = selection.find_job([job.job for job in jobs])
        if len(jobs) > 1:
            table = _job_table(jobs, view, chosen)
            yield table
            height -= table.row_count + 1
            if len(jobs) > MAX_JOB_ROWS:
                yield _line(f"  and {len(jobs) - MAX_JOB_ROWS} more jobs", "dim")
                height -= 1
        yield from _job(jobs[chosen], view, selection, width, height)
    for run in shown_runs:
        yield _run(run)
    if len(runs) > len(shown_runs):
        yield _line(f"and {len(runs) - len(shown_runs)} more runs", "dim")


def _job_table(jobs: Sequence[JobStatus], view: View, chosen: int) -> Table:
    """Return a table of at most `MAX_JOB_ROWS` jobs around the chosen one."""
    table = _table("JOB", "GROUPS", "STEP", "STEPS/S", "GOODPUT", "WAITS FOR")
    first = max(0, min(chosen - MAX_JOB_ROWS // 2, len(jobs) - MAX_JOB_ROWS))
    for number, job in list(enumerate(jobs))[first : first + MAX_JOB_ROWS]:
        goodput = job.goodput
        ended = "finished" if job.finished else "ended"
        table.add_row(
            _line(job.job),
            f"{sum(group.in_quorum for group in job.groups)}/{job.num_expected}",
            str(job.committed_step),
            f"{view.steps_per_s.get(job.job, 0.0):.1f}",
            "-" if goodput is None else f"{100 * goodput.ratio:.1f} %",
            _line(job.waiting_for if job.ended_s is None else f"{ended} {job.ended_s:.0f} s ago"),
            style="reverse" if number == chosen else "",
        )
    return table


def _job(
    job: JobStatus, view: View, selection: Selection, width: int, height: int
) -> Iterator[RenderableType]:
    lines = list(_job_lines(job, view, width))
    yield from lines
    height -= len(lines)
    last = list(_incident_lines(view.answer.incidents.get(job.job, ()), job))
    last = last[: max(0, min(MAX_INCIDENT_ROWS, height - _LEAST_GROUP_ROWS - 2))]
    yield from _groups(job, selection, width, height - len(last))
    yield from last


def _job_lines(job: JobStatus, view: View, width: int) -> Iterator[Text]:
    if job.ended_s is not None:
        how = "finished" if job.finished else "ended unfinished"
        yield _line(f"job {job.job}: {how} {job.ended_s:.0f} s ago", "bold")
        yield from _goodput(job)
        yield from _copies(job, width)
        return
    in_quorum = sum(group.in_quorum for group in job.groups)
    hung = sum(group.hung for group in job.groups)
    yield _line(
        f"job {job.job}: step {job.committed_step}, {view.steps_per_s.get(job.job, 0.0):.1f} "
        f"steps/s; {in_quorum} of {len(job.groups)} groups in quorum {job.quorum_id}, "
        f"{job.num_expected} expected, {hung} hung",
        "bold",
    )
    yield from _goodput(job)
    yield from _copies(job, width)
    if job.prepared_spares:
        yield _line(spares_line(job))
    if job.waiting_for:
        yield from _sentence(f"no quorum now: {job.waiting_for}", "yellow", width)
    if job.stalled_s > _STALLED_S:
        yield _line(f"its step last rose {job.stalled_s:.0f} s ago", "red")
    if job.num_differences:
        yield from _sentence(f"states differed: {job.last_difference}", "red", width)


def _goodput(job: JobStatus) -> Iterator[Text]:
    if job.goodput is not None:
        yield _line(goodput_line(job.goodput))


def _copies(job: JobStatus, width: int) -> Iterator[Text]:
    line = copies_line(job)
    if line:
        yield from _sentence(line, "" if job.copy_step else "yellow", width)


def _groups(
    job: JobStatus, selection: Selection, width: int, height: int
) -> Iterator[RenderableType]:
    groups = sorted(job.groups, key=_group_urgency)
    rows = max(1, height - 1)
    if len(groups) > rows:
        rows = max(1, rows - 1)  # one line counts the others
    selection.first_group = max(0, min(selection.first_group, len(groups) - rows))
    shown = groups[selection.first_group : selection.first_group + rows]
    if shown:
        table = _table(*GROUP_HEAD)
        wide = width >= 100
        for group in shown:
            table.add_row(*_group_row(group, is_wide=wide), style=_group_style(group))
        yield table
    hidden = [*groups[: selection.first_group], *groups[selection.first_group + rows :]]
    if hidden:
        well = sum(_group_style(group) == "" for group in hidden)
        yield _line(f"  and {len(hidden)} more, {well} of them as usual", "dim")


def _group_urgency(group: GroupStatus) -> tuple[bool, bool, bool, bool, bool, bool, str]:
    """Hung groups first, then those outside, slow ones, those that heal, and silent ones."""
    return (
        not group.hung,
        not group.left_out,
        not group.slow,
        group.in_quorum,
        group.phase is not Phase.HEALING,
        group.silent_s < _SILENT_S,
        group.replica_id,
    )


def _group_style(group: GroupStatus) -> str:
    if group.hung or group.left_out:
        return "bold red"
    if group.phase is Phase.HEALING:
        return "cyan"
    if group.slow or not group.in_quorum or group.silent_s >= _SILENT_S:
        return "yellow"
    return ""


def _group_row(group: GroupStatus, *, is_wide: bool) -> tuple[str | Text, ...]:
    states = {
        "HUNG": group.hung,
        "left out": group.left_out,
        "SLOW": group.slow,
        "heals": group.phase is Phase.HEALING,
        "in quorum": group.in_quorum,
        "asking": group.asking,
    }
    return (
        _line(group.replica_id if is_wide else shorten_id(group.replica_id)),
        str(group.step),
        ", ".join(name for name, holds in states.items() if holds) or "outside",
        phase_cell(group),
        f"{group.phase_s:.1f} s" if group.phase else "-",
        f"{group.silent_s:.1f} s",
        *pace_cells(group),
        _line(group.address or "-"),
    )


def shorten_id(replica_id: str) -> str:
    """Return a replica id with the beginning of its incarnation only."""
    name = stable_name(replica_id)
    return f"{name}{replica_id[len(name) :][: 1 + _INCARNATION_SHOWN]}"


def _incident_lines(incidents: Sequence[Incident], job: JobStatus) -> Iterator[Text]:
    """The newest first; without any, as from a lighthouse that keeps none, the groups that ended
    last."""
    if not incidents:
        living = {stable_name(group.replica_id) for group in job.groups}
        for gone in job.gone:
            if stable_name(gone.replica_id) not in living:
                yield _gone(gone)
        return
    for incident in reversed(incidents):
        names = ", ".join(stable_name(each) for each in incident.groups[:3])
        more = f" and {len(incident.groups) - 3} more" if len(incident.groups) > 3 else ""
        costs = {
            "paused": incident.paused_s,
            "healed in": incident.healed_s,
            "commit after": incident.first_commit_after_s,
        }
        cost = "".join(f", {name} {value:.2f} s" for name, value in costs.items() if value)
        discarded = f", {incident.steps_discarded} discarded" if incident.steps_discarded else ""
        at = time.strftime("%H:%M:%S", time.localtime(incident.at))
        under_way = "*" if incident.is_open else " "
        yield _line(
            f"{at}{under_way}{incident.kind.value} {names}{more}: {incident.cause}{cost}"
            f"{discarded}",
            "magenta" if incident.is_open else "",
        )


def _gone(gone: GoneGroup) -> Text:
    how = "left" if gone.orderly else "lost"
    reason = f": {gone.reason}" if gone.reason else ""
    return _line(f"{how} {gone.gone_s:.0f} s ago: {shorten_id(gone.replica_id)}{reason}", "dim")


def _run(run: RunStatus) -> Text:
    members = sum(node.node_rank is not None for node in run.nodes)
    why = f"; {run.why}" if run.why else ""
    return _line(
        f"run {run.run}: {run.phase}, round {run.round}, {members} of {len(run.nodes)} nodes in "
        f"the world{why}"
    )


def _table(*head: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in head:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    return table
