"""The command of operators for a manager: `torchft-manager drain`."""

from __future__ import annotations

import click

from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.host.address import HostPort
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.cli import Address, Text, in_ms, option, security_options, within_option
from torchft_svc.rpc.commands import ask
from torchft_svc.rpc.security import Security


@click.command()
@option(
    "--manager",
    type=Address(),
    envvar="TORCHFT_MANAGER_ADDR",
    required=True,
    help="Address of the group's manager (`lighthouse status` shows it).",
)
@option("--reason", type=Text(), default="", help="Sent to the group, and logged.")
@within_option
@security_options
def drain(manager: HostPort, reason: str, within: float | None, security: Security) -> None:
    """Let the group finish its step, leave, and end."""
    request = pb.DrainRequest(reason=reason, within_ms=in_ms(within))
    ask("manager", str(manager), security, DEFAULT_JOB, request, pb.DrainResponse)
    click.echo("the group has the order to finish its step and end")


OPERATOR_COMMANDS = (drain,)
