"""What an operator may ask: `status`, `drain`, `kill`, `accept-loss`, `top`, ..."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from torchft_svc.core.launch.launched_run import RunStatus
from torchft_svc.core.limits import MAX_ADDRESS_LENGTH, MAX_INT64, MAX_NAME_LENGTH
from torchft_svc.core.quorum.lighthouse.incidents import Goodput, Incident
from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.doctor.command import doctor
from torchft_svc.env import value_of
from torchft_svc.errors import RequestRefused
from torchft_svc.lighthouse_server.table import (
    incidents_json,
    incidents_text,
    status_json,
    status_text,
)
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.cli import Addresses, Text, in_ms, option, security_options, within_option
from torchft_svc.rpc.codec_status import incidents_from_wire, runs_from_wire, status_from_wire
from torchft_svc.rpc.commands import ask
from torchft_svc.rpc.security import Security

F = TypeVar("F", bound=Callable[..., Any])

# Exit statuses of `status`, beside 0, 1 (nobody answers) and 2 (wrong usage).
STALLED, NO_SUCH_JOB = 3, 4
# How often people want to see something new.
WATCH_S = 1.0
# To the upper left, and clear from there; click leaves it out where no terminal is.
_CLEAR = "\x1b[H\x1b[J"

_lighthouse = option(
    "--lighthouse",
    type=Addresses(),
    envvar=["TORCHFT_LIGHTHOUSE", "TORCH_LIGHTHOUSE"],
    default="localhost:29510",
    show_default=True,
    help="Address of the lighthouse; of several, the first that answers.",
)
_JOB = Text(MAX_NAME_LENGTH, is_name=True)
_job_id = option(
    "--job-id",
    type=_JOB,
    envvar="TORCHFT_JOB_ID",
    default=DEFAULT_JOB,
    show_default=True,
    help="The training run.",
)
_GROUP = "The group: its name (REPLICA_GROUP_ID) or its replica id."
_replica = option("--replica", type=Text(MAX_NAME_LENGTH), required=True, help=_GROUP)
_reason = option("--reason", type=Text(), default="", help="Sent to the group, and logged.")


@click.command()
@_lighthouse
@option(
    "--job-id",
    type=_JOB,
    envvar="TORCHFT_JOB_ID",
    default="",
    show_default="all",
    help="The training run; for a launched one, its --rdzv-id.",
)
@click.option("--all", "show_all", is_flag=True, help="Show all groups, however many.")
@click.option("--json", "as_json", is_flag=True, help="Show everything, as JSON.")
@click.option("--watch", is_flag=True, help="Refresh every second, until Ctrl-C.")
@option(
    "--stalled-after",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=None,
    show_default="off",
    help="Exit with status 3 if a job has not committed a step for so long, and has not finished.",
)
@security_options
def status(
    lighthouse: str,
    job_id: str,
    show_all: bool,
    as_json: bool,
    watch: bool,
    stalled_after: float | None,
    security: Security,
) -> None:
    """Show jobs, their groups, and why there is no quorum; launched runs, their nodes, and why
    there is no world.

    Exit status: 0 if the jobs train or have finished, 3 if one has stalled (--stalled-after), 4 if
    there is no such job or run, 1 if no lighthouse answers.
    """

    def show_status() -> list[JobStatus]:
        jobs, runs = _jobs_and_runs(lighthouse, security, job_id)
        shown = status_json(jobs, runs) if as_json else status_text(jobs, runs, show_all=show_all)
        click.echo(f"{_CLEAR}{shown}" if watch and not as_json else shown)
        return jobs

    if watch:
        _repeat(show_status)
    stalled = [
        job for job in show_status() if stalled_after is not None and _stalls(job, stalled_after)
    ]
    if stalled:
        click.get_current_context().exit(STALLED)


class _NoSuchJob(click.ClickException):
    exit_code = NO_SUCH_JOB


def _jobs_and_runs(
    lighthouse: str, security: Security, job_id: str
) -> tuple[list[JobStatus], list[RunStatus]]:
    def ask_status(job: str) -> tuple[list[JobStatus], list[RunStatus]]:
        request = pb.LighthouseStatusRequest(job=job)
        answer = pb.LighthouseStatusResponse
        status = ask("lighthouse", lighthouse, security, DEFAULT_JOB, request, answer)
        try:
            return status_from_wire(status), runs_from_wire(status)
        except RequestRefused as error:
            raise click.ClickException(f"the lighthouse is of a newer version: {error}") from None

    try:
        return ask_status(job_id)
    except click.ClickException as error:
        if job_id:
            ask_status("")  # raises what is wrong, if that is not the job
            raise _NoSuchJob(error.message) from None
        raise


def _stalls(job: JobStatus, limit_s: float) -> bool:
    return not job.finished and max(job.stalled_s, job.ended_s or 0.0) > limit_s


def _repeat(show_status: Callable[[], object]) -> NoReturn:
    """Repeat until Ctrl-C, also while the lighthouse is away."""
    try:
        while True:
            try:
                show_status()
            except click.ClickException as error:
                click.echo(f"{_CLEAR}Error: {error.format_message()}")
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        click.get_current_context().exit(0)


@click.command()
@_lighthouse
@option(
    "--job-id",
    type=_JOB,
    envvar="TORCHFT_JOB_ID",
    default="",
    show_default="all",
    help="The training run; for a launched one, its --rdzv-id.",
)
@option(
    "--every",
    type=click.FloatRange(min=0.1, max=3600),
    default=WATCH_S,
    metavar="SECONDS",
    show_default=True,
    help="How often the lighthouse is asked.",
)
@click.option("--once", is_flag=True, help="Print one frame and end, also without a terminal.")
@security_options
def top(lighthouse: str, job_id: str, every: float, once: bool, security: Security) -> None:
    """Show jobs and their groups live in a terminal, what needs somebody first.

    q or Ctrl-C ends it. A lighthouse that does not answer is asked again, and its last answer stays
    on the screen. Exit status: 0; with --once 4 if there is no such job or run, 1 if no lighthouse
    answers; 2 without a terminal.
    """
    if not once and not _is_terminal():
        raise click.UsageError(
            "top needs a terminal that can be redrawn: use --once, or `lighthouse status`"
        )
    try:  # only here: a lighthouse that starts needs none of this
        from torchft_svc.lighthouse_server.top.terminal import show_live, show_once
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        reason = "lighthouse top needs rich: pip install 'torchft-svc[top]'"
        raise click.ClickException(reason) from None
    from torchft_svc.lighthouse_server.top.feed import (
        Answer,
        RecentIncidents,
        StatusFeed,
        sort_jobs,
    )

    recent = RecentIncidents(
        lambda job, after: _incidents_and_goodput(lighthouse, security, job, after)[0]
    )

    def ask_all(chosen: str) -> Answer:
        jobs, runs = _jobs_and_runs(lighthouse, security, job_id)
        records = {}
        for job in sort_jobs(jobs):
            if job.job == chosen or not chosen:
                # An earlier version keeps none, and a job may end meanwhile.
                with contextlib.suppress(click.ClickException):
                    records[job.job] = recent.list_last(job.job)
                break
        return Answer(jobs=tuple(jobs), runs=tuple(runs), incidents=records)

    if once:
        show_once(ask_all(""), lighthouse)
    else:
        show_live(lambda wake: StatusFeed(ask_all, every, wake), lighthouse)


def _is_terminal() -> bool:
    return sys.stdout.isatty() and value_of("TERM", "dumb") not in ("", "dumb")


@click.command()
@_lighthouse
@option(
    "--job-id",
    type=_JOB,
    envvar="TORCHFT_JOB_ID",
    default=DEFAULT_JOB,
    show_default=True,
    help="The training run; for --node, the --rdzv-id of the launched run.",
)
@option("--replica", type=Text(MAX_NAME_LENGTH), default="", show_default="none", help=_GROUP)
@option(
    "--node",
    type=Text(MAX_ADDRESS_LENGTH),
    default="",
    show_default="none",
    help="Instead of a group: a node of a launched run, by its id or its host.",
)
@_reason
@within_option
@security_options
def drain(
    lighthouse: str,
    job_id: str,
    replica: str,
    node: str,
    reason: str,
    within: float | None,
    security: Security,
) -> None:
    """Let a group finish its step, leave, and end; or end a node of a launched run.

    The launcher of that node ends its workers by SIGTERM, and itself with status 0; the other nodes
    go on without it.
    """
    if bool(replica) == bool(node):
        raise click.UsageError("name a group (--replica) or a node (--node)")
    request = pb.LighthouseDrainRequest(
        replica_id=replica, node=node, reason=reason, within_ms=in_ms(within)
    )
    ask("lighthouse", lighthouse, security, job_id, request, pb.LighthouseDrainResponse)
    what = "end its workers, and itself" if node else "finish its step and end"
    click.echo(f"{node or replica} was asked to {what}")


@click.command()
@_lighthouse
@_job_id
@_replica
@_reason
@security_options
def kill(lighthouse: str, job_id: str, replica: str, reason: str, security: Security) -> None:
    """End a group's processes at once."""
    request = pb.LighthouseKillRequest(replica_id=replica, reason=reason)
    ask("lighthouse", lighthouse, security, job_id, request, pb.LighthouseKillResponse)
    click.echo(f"{replica} was asked to end at once")


@click.command(name="accept-loss")
@_lighthouse
@_job_id
@security_options
def accept_loss(lighthouse: str, job_id: str, security: Security) -> None:
    """Let a job go back to what its living groups have, once.

    Only a quorum that is held back because it would lose committed steps can be let through.
    """
    request = pb.AcceptLossRequest()
    answer = ask("lighthouse", lighthouse, security, job_id, request, pb.AcceptLossResponse)
    click.echo(f"job {job_id} continues without its committed step {answer.committed_step}")


@click.command()
@_lighthouse
@_job_id
@option(
    "--after",
    type=click.IntRange(0, MAX_INT64),
    default=0,
    metavar="NUMBER",
    show_default="all",
    help="Show only records with higher numbers.",
)
@click.option("--json", "as_json", is_flag=True, help="Show everything, as JSON.")
@security_options
def incidents(lighthouse: str, job_id: str, after: int, as_json: bool, security: Security) -> None:
    """Show what has happened to a job, what it has cost, and how much of the time ended in
    committed steps.

    Exit status: 4 if nothing is known of the job, 1 if no lighthouse answers.
    """
    try:
        records, goodput = _incidents_and_goodput(lighthouse, security, job_id, after)
    except click.ClickException as error:
        _jobs_and_runs(lighthouse, security, "")  # raises what is wrong, if that is not the job
        raise _NoSuchJob(error.message) from None
    show = incidents_json if as_json else incidents_text
    click.echo(show(job_id, records, goodput))


def _incidents_and_goodput(
    lighthouse: str, security: Security, job: str, after: int
) -> tuple[list[Incident], Goodput | None]:
    request = pb.LighthouseIncidentsRequest(after=after)
    answer = pb.LighthouseIncidentsResponse
    return incidents_from_wire(ask("lighthouse", lighthouse, security, job, request, answer))


OPERATOR_COMMANDS = (status, incidents, drain, kill, accept_loss, top, doctor)
