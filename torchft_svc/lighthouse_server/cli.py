"""The command `lighthouse`."""

# ruff: noqa: E402
from __future__ import annotations

from torchft_svc.env import keep_grpc_in_one_thread

keep_grpc_in_one_thread()  # it counts only before the first import of gRPC

# isort: split
import asyncio
import functools
import sys
from collections.abc import Callable
from typing import Any

import click

from torchft_svc.core.quorum.types import DEFAULT_QUORUM_BYTES, QuorumConfig
from torchft_svc.env import LIGHTHOUSE_BIND_VARIABLE, Environment
from torchft_svc.host.address import HostPort, reachable_host
from torchft_svc.lighthouse_server.app import Listening, run_lighthouse
from torchft_svc.lighthouse_server.election import Election
from torchft_svc.lighthouse_server.etcd_access import resolve_etcd_access
from torchft_svc.lighthouse_server.http.settings import EXTRA, HttpSettings
from torchft_svc.lighthouse_server.operator_commands import OPERATOR_COMMANDS
from torchft_svc.rpc.cli import (
    MILLISECONDS,
    Address,
    Text,
    in_seconds,
    log_level_option,
    option,
    security_options,
    showing_usage,
)
from torchft_svc.rpc.commands import ServiceCommand
from torchft_svc.rpc.running import run
from torchft_svc.rpc.security import Security
from torchft_svc.telemetry.exporting import exporting


def _election_options(main: Callable[..., None]) -> Callable[..., None]:
    """The flags of the election, handed to ``main`` as one argument, ``election`` (None: no flag).

    The password itself has no flag: everybody on the machine can read a command line.
    """

    @option(
        "--leader-election",
        default=None,
        help="Of several lighthouses only the elected one answers: "
        "etcd://host:2379[,host:2379][/prefix], or etcds://... with TLS.",
    )
    @option(
        "--lease-ttl-s", type=int, default=5, help="A dead leader is replaced within this time."
    )
    @option(
        "--advertise",
        default=None,
        metavar="HOST:PORT",
        show_default="the bound one",
        help="Address under which managers reach this lighthouse, if it leads.",
    )
    @option("--etcd-ca", help="CA that signs etcd's certificates, PEM.  [env: TORCHFT_ETCD_CA]")
    @option("--etcd-cert", help="Certificate to show to etcd, PEM.  [env: TORCHFT_ETCD_CERT]")
    @option("--etcd-key", help="That certificate's private key, PEM.  [env: TORCHFT_ETCD_KEY]")
    @option("--etcd-user", type=Text(), help="The user at etcd.  [env: TORCHFT_ETCD_USER]")
    @option(
        "--etcd-password-file",
        help="File with that user's password; the password itself is taken from "
        "TORCHFT_ETCD_PASSWORD only, because a command line is not secret.  "
        "[env: TORCHFT_ETCD_PASSWORD_FILE]",
    )
    @functools.wraps(main)
    def elected(
        *,
        leader_election: str | None,
        lease_ttl_s: int,
        advertise: str | None,
        **others: Any,
    ) -> None:
        etcd = {flag: others.pop(f"etcd_{flag}") for flag in ("user", "password_file")}
        etcd |= {f"{flag}_file": others.pop(f"etcd_{flag}") for flag in ("ca", "cert", "key")}
        election = None
        with showing_usage():
            if leader_election is not None:
                access = resolve_etcd_access(Environment(), leader_election, **etcd)
                election = Election(etcd=access, lease_ttl_s=lease_ttl_s, advertise=advertise)
        main(election=election, **others)

    return elected


@click.command(
    cls=ServiceCommand, operator_commands=OPERATOR_COMMANDS, context_settings={"show_default": True}
)
@option(
    "--bind",
    type=Address(may_bind=True),
    envvar=LIGHTHOUSE_BIND_VARIABLE,
    default=":29510",
    help="Address to listen on.",
)
@option(
    "--min-replicas",
    type=int,
    envvar="TORCHFT_MIN_REPLICAS",
    default=1,
    help="Smallest number of groups that make a quorum.",
)
@option(
    "--join-timeout-ms",
    type=MILLISECONDS,
    default=60_000,
    help="How long the groups that ask wait for living groups that have not asked yet.",
)
@option(
    "--heal-timeout-ms",
    type=MILLISECONDS,
    default=None,
    show_default="the join timeout",
    help="The same, for a living group that downloads the state.",
)
@option(
    "--startup-timeout-ms",
    type=MILLISECONDS,
    default=None,
    show_default="the join timeout",
    help="The same, for groups that are new to the job, in a cold start.",
)
@option(
    "--startup-wait-ms",
    type=MILLISECONDS,
    default=1_000,
    help="How long a cold start waits after the first request for groups that are not here yet.",
)
@option(
    "--heartbeat-timeout-ms",
    type=MILLISECONDS,
    default=5_000,
    help="A group, or a launcher's agent, that is silent for this time is dead.",
)
@option(
    "--on-step-regression",
    type=click.Choice(["auto", "hold", "warn"]),
    default="auto",
    help="A quorum that would lose committed steps: hold it back, or warn and continue; "
    "auto holds it back while any group of the job is left.",
)
@option(
    "--on-step-jump",
    type=click.Choice(["heal", "follow"]),
    default="heal",
    help="A group that is more than one step ahead of the running job, such as one restored from "
    "another run's checkpoint: it has to heal from the job, or the job follows it.",
)
@option(
    "--hang-timeout-ms",
    type=MILLISECONDS,
    default=None,
    show_default="off",
    help="A group whose step stands still for so long, while it trains or votes, has hung.",
)
@option(
    "--on-hang",
    type=click.Choice(["report", "kill", "evict"]),
    default="report",
    help="What to do with a group that has hung: only report it, end its processes, or "
    "continue without it until it moves again.",
)
@option(
    "--slow-factor",
    type=click.FloatRange(min=1, min_open=True),
    metavar="NUMBER",
    default=1.5,
    help="A group is slow if its own work in a step takes so many times that of the best group.",
)
@option(
    "--slow-after-ms",
    type=MILLISECONDS,
    default=60_000,
    help="How long that must have lasted, and for 10 steps at least.",
)
@option(
    "--on-slow",
    type=click.Choice(["report", "evict"]),
    default="report",
    help="What to do with a slow group: only report it, or drain it if at least --min-replicas "
    "remain, one at a time.",
)
@option(
    "--max-jobs",
    type=int,
    default=1000,
    help="Largest number of jobs, and of launched runs, that are served at a time.",
)
@option(
    "--max-members-per-job",
    type=int,
    default=20_000,
    help="Largest number of groups of a job, or nodes of a run.",
)
@option(
    "--max-quorum-bytes",
    type=int,
    default=DEFAULT_QUORUM_BYTES,
    help="Most bytes that a job's quorum may have; each of its groups gets them all.",
)
@option(
    "--http-bind",
    type=Address(may_bind=True),
    default=None,
    show_default="off",
    help=f"Address of the dashboard, the HTTP API and /metrics; needs {EXTRA}.",
)
@option(
    "--http-host",
    type=Text(),
    multiple=True,
    metavar="NAME",
    show_default="none",
    help="A name under which browsers reach the dashboard, beside the addresses and the name of "
    "this machine; *.example for all below one. May be given several times.",
)
@option(
    "--event-log",
    type=Text(),
    metavar="FILE",
    default=None,
    show_default="off",
    help="File to which what happens to jobs is appended as JSON lines; it is rotated at 10 MB, "
    "and 4 old ones are kept.",
)
@option("--quorum-tick-ms", type=int, default=None, hidden=True)
@log_level_option
@_election_options
@security_options
def main(
    *,
    bind: HostPort,
    quorum_tick_ms: int | None,
    log_level: str,
    security: Security,
    election: Election | None,
    http_bind: HostPort | None,
    http_host: tuple[str, ...],
    event_log: str | None,
    **settings: Any,
) -> None:
    """Decide for every step which replica groups train together."""
    with showing_usage():
        config = QuorumConfig(**in_seconds(settings))
        http = None if http_bind is None else HttpSettings(bind=http_bind, hosts=http_host)

    async def serve(stop: asyncio.Event) -> int:
        if quorum_tick_ms is not None:
            note = "note: --quorum-tick-ms is ignored: quorums form without polling"
            print(note, file=sys.stderr, flush=True)
        with exporting("lighthouse", {}) as telemetry:
            async with run_lighthouse(
                config,
                bind,
                security,
                election,
                http=http,
                event_log=event_log,
                telemetry=telemetry,
            ) as listening:
                print(f"lighthouse listening on {listening.grpc}", flush=True)
                print(_dashboard_line(listening, security), flush=True)
                await stop.wait()
        return 0

    run(serve, log_level)


def _dashboard_line(listening: Listening, security: Security) -> str:
    if listening.http is None:
        return "dashboard off: --http-bind 127.0.0.1:29580 shows the jobs in a browser"
    address = HostPort(reachable_host(listening.http), listening.http.port)
    return f"dashboard on {'https' if security.serves_tls else 'http'}://{address}"
