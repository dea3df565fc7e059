"""The command `torchft-manager`."""

from __future__ import annotations

from typing import Any

import click

from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.env import MANAGER_BIND_VARIABLE, Environment
from torchft_svc.host.address import HostPort
from torchft_svc.host.interfaces import chosen_host
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.operator_commands import OPERATOR_COMMANDS
from torchft_svc.manager_server.process import run_as_process
from torchft_svc.rpc.cli import (
    MILLISECONDS,
    Address,
    Addresses,
    in_seconds,
    log_level_option,
    option,
    security_options,
    showing_usage,
)
from torchft_svc.rpc.commands import ServiceCommand
from torchft_svc.rpc.security import Security


@click.command(
    cls=ServiceCommand, operator_commands=OPERATOR_COMMANDS, context_settings={"show_default": True}
)
@option(
    "--lighthouse",
    type=Addresses(),
    envvar=["TORCHFT_LIGHTHOUSE", "TORCH_LIGHTHOUSE"],
    required=True,
    help="Address of the lighthouse; of several, the first that answers.",
)
@option(
    "--replica-name",
    envvar="REPLICA_GROUP_ID",
    required=True,
    help="The group's name; it survives restarts and no other group may have it.",
)
@option("--group-world-size", type=int, default=1, help="Workers in the group.")
@option(
    "--store-address",
    type=Address(),
    required=True,
    help="Address of the group's TCPStore, as other groups reach it.",
)
@option(
    "--bind",
    type=Address(may_bind=True),
    envvar=MANAGER_BIND_VARIABLE,
    default=":29512",
    help="Address to listen on.",
)
@option(
    "--advertise-host",
    default=None,
    show_default="the address of the interface in TORCHFT_INTERFACE, else the local address of "
    "the route to the lighthouse",
    help="Host under which other groups reach this manager.",
)
@option(
    "--heartbeat-interval-ms", type=MILLISECONDS, default=100, help="Time between signs of life."
)
@option(
    "--connect-timeout-ms",
    type=MILLISECONDS,
    default=10_000,
    help="How long the lighthouse may be unreachable before waiting workers get an error.",
)
@option(
    "--quorum-retries",
    type=int,
    default=0,
    help="How many times to retry a failed quorum before workers get an error.",
)
@option("--job-id", envvar="TORCHFT_JOB_ID", default=DEFAULT_JOB, help="The training run.")
@option(
    "--min-replicas",
    type=int,
    envvar="TORCHFT_MIN_REPLICAS",
    default=0,
    show_default="the lighthouse's setting",
    help="Smallest number of groups that the job trains with; the largest of its groups' values "
    "counts.",
)
@option(
    "--owner-pid",
    type=int,
    default=None,
    help="End with this process; a Kill request ends it, too.",
)
@option(
    "--metrics-bind",
    type=Address(may_bind=True),
    default=None,
    show_default="off",
    help="Address at which metrics for Prometheus are served; needs torchft-svc[metrics].",
)
@log_level_option
@security_options
def main(
    *,
    lighthouse: str,
    replica_name: str,
    store_address: HostPort,
    bind: HostPort,
    advertise_host: str | None,
    owner_pid: int | None,
    metrics_bind: HostPort | None,
    log_level: str,
    security: Security,
    **settings: Any,
) -> None:
    """Speak for one replica group: forward its quorum requests, collect its votes."""
    with showing_usage():
        config = ManagerConfig(
            lighthouse_address=lighthouse,
            replica_name=replica_name,
            store_address=str(store_address),
            bind=str(bind),
            advertise_host=advertise_host or chosen_host(Environment()),
            owner_pid=owner_pid,
            metrics_bind=None if metrics_bind is None else str(metrics_bind),
            security=security,
            **in_seconds(settings),
        )
    run_as_process(config, log_level)
