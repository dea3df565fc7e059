"""The command `torchft-buddy`."""

from __future__ import annotations

import asyncio

import click

from torchft_svc.buddy.holder import CopyHolder, HolderConfig
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.env import Environment
from torchft_svc.host.address import advertised_host, parse_address, split_addresses
from torchft_svc.host.log_format import Speaker
from torchft_svc.rpc.cli import Addresses, log_level_option, option, security_options, showing_usage
from torchft_svc.rpc.running import run
from torchft_svc.rpc.security import Security


@click.command(context_settings={"show_default": True})
@option(
    "--lighthouse",
    type=Addresses(),
    envvar=["TORCHFT_LIGHTHOUSE", "TORCH_LIGHTHOUSE"],
    required=True,
    help="Address of the lighthouse, or a list of them.",
)
@option("--job-id", envvar="TORCHFT_JOB_ID", default=DEFAULT_JOB, help="The training run.")
@option(
    "--beside",
    default="",
    show_default="none",
    help="Name of the group that this process is placed beside: it copies the group after it.",
)
@option("--group-world-size", type=int, default=1, help="Workers in a group.")
@option(
    "--group-rank",
    type=int,
    multiple=True,
    show_default="all",
    help="Worker whose state is copied; may be repeated.",
)
@option(
    "--advertise-host",
    default=None,
    show_default="the local address of the route to the lighthouse",
    help="Host under which trainers reach this process.",
)
@log_level_option
@security_options
def main(
    *,
    lighthouse: str,
    job_id: str,
    beside: str,
    group_world_size: int,
    group_rank: tuple[int, ...],
    advertise_host: str | None,
    log_level: str,
    security: Security,
) -> None:
    """Hold copies of a job's newest states, so that it outlives the end of all its groups."""
    with showing_usage():
        config = HolderConfig(
            lighthouse=lighthouse,
            job_id=job_id,
            beside=beside,
            group_world_size=group_world_size,
            ranks=group_rank or tuple(range(group_world_size)),
            host=advertise_host or _host(lighthouse),
            security=security,
        )

    async def serve(stop: asyncio.Event) -> int:
        holder = CopyHolder(config)
        holder.start()
        print(f"holding copies of job {job_id}", flush=True)
        try:
            await stop.wait()
        finally:
            await asyncio.to_thread(holder.close)
        return 0

    run(serve, log_level, speaker=Speaker("buddy", {"job": job_id}))


def _host(lighthouse: str) -> str:
    host = Environment().checkpoint_host
    return host or advertised_host(*map(parse_address, split_addresses(lighthouse)))
