"""What an operator may ask of a lighthouse: `lighthouse status`, `drain`, `kill`, `accept-loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from torchft_svc.core.types import DEFAULT_JOB, MAX_NAME_LENGTH
from torchft_svc.lighthouse_server.table import status_json, status_text
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.cli import Addresses, Text, option, security_options
from torchft_svc.rpc.codec_status import status_from_wire
from torchft_svc.rpc.commands import ask
from torchft_svc.rpc.security import Security

F = TypeVar("F", bound=Callable[..., Any])

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
_replica = option(
    "--replica",
    type=Text(MAX_NAME_LENGTH),
    required=True,
    help="The group: its name (REPLICA_GROUP_ID) or its replica id.",
)
_reason = option("--reason", type=Text(), default="", help="Told to the group, and logged.")


@click.command()
@_lighthouse
@option(
    "--job-id",
    type=_JOB,
    envvar="TORCHFT_JOB_ID",
    default="",
    show_default="all",
    help="The training run.",
)
@click.option("--all", "show_all", is_flag=True, help="Show all groups, however many.")
@click.option("--json", "as_json", is_flag=True, help="Show everything, as JSON.")
@security_options
def status(lighthouse: str, job_id: str, show_all: bool, as_json: bool, security: Security) -> None:
    """Show jobs, their groups, and why there is no quorum."""
    request = pb.LighthouseStatusRequest(job=job_id)
    answer = ask(
        "lighthouse", lighthouse, security, DEFAULT_JOB, request, pb.LighthouseStatusResponse
    )
    jobs = status_from_wire(answer)
    click.echo(status_json(jobs) if as_json else status_text(jobs, show_all=show_all))


@click.command()
@_lighthouse
@_job_id
@_replica
@_reason
@security_options
def drain(lighthouse: str, job_id: str, replica: str, reason: str, security: Security) -> None:
    """Let a group finish its step, leave, and end."""
    request = pb.LighthouseDrainRequest(replica_id=replica, reason=reason)
    ask("lighthouse", lighthouse, security, job_id, request, pb.LighthouseDrainResponse)
    click.echo(f"{replica} was told to finish its step and end")


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
    click.echo(f"{replica} was told to end at once")


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
    click.echo(f"job {job_id} goes on without its committed step {answer.committed_step}")


ORDERS = (status, drain, kill, accept_loss)
