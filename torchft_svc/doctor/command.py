"""The command `lighthouse doctor`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import click

from torchft_svc.core.limits import MAX_NAME_LENGTH
from torchft_svc.core.quorum.types import MAX_WORLD_SIZE
from torchft_svc.env import Environment
from torchft_svc.errors import UsageError
from torchft_svc.host.address import HostPort
from torchft_svc.host.quantities import parse_bytes, parse_rate
from torchft_svc.rpc.cli import Address, Addresses, Text, option, showing_usage
from torchft_svc.rpc.security import resolve_security

FOUND_PROBLEM = 1
# Where a doctor serves: beside the ports of the lighthouse and the manager.
DEFAULT_PORT = 29513
_DAY_S = 86_400.0


class Quantity(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since 8.4
    """A number with a unit, as ``parse`` reads it."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name, self._parse = name, parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@option(
    "--lighthouse",
    type=Addresses(),
    default=None,
    show_default="TORCHFT_LIGHTHOUSE, as a trainer",
    help="Check these lighthouses instead.",
)
@option(
    "--job-id",
    type=Text(MAX_NAME_LENGTH, is_name=True),
    default=None,
    show_default="TORCHFT_JOB_ID, as a trainer",
    help="Check this job instead.",
)
@option(
    "--step-time",
    type=click.FloatRange(min=0, max=_DAY_S, min_open=True),
    metavar="SECONDS",
    default=None,
    help="How long a step takes.",
)
@option(
    "--state-size",
    type=Quantity("size", parse_bytes),
    default=None,
    help="What one worker's state_dict holds, such as 14GB.",
)
@option(
    "--link-rate",
    type=Quantity("rate", parse_rate),
    default=None,
    show_default="measured with --peer, else the speed of the interface",
    help="What the link to other groups carries, such as 10Gbit/s or 1.2GB/s.",
)
@option(
    "--groups",
    type=click.IntRange(min=1, max=MAX_WORLD_SIZE),
    default=None,
    show_default="those of the job",
    help="How many groups train.",
)
@option(
    "--peer",
    type=Address(),
    default=None,
    show_default="none",
    help="A doctor that serves on the machine of another group: measure the link to it.",
)
@click.option("--serve", is_flag=True, help="Serve measurements of the link, until Ctrl-C.")
@option(
    "--bind",
    type=Address(may_bind=True),
    default=None,
    show_default=":29513",
    help="Where to serve.",
)
@click.option("--json", "as_json", is_flag=True, help="Show everything, as JSON.")
def doctor(
    *,
    lighthouse: str | None,
    job_id: str | None,
    step_time: float | None,
    state_size: float | None,
    link_rate: float | None,
    groups: int | None,
    peer: HostPort | None,
    serve: bool,
    bind: HostPort | None,
    as_json: bool,
) -> None:
    """Check the settings, the lighthouse, the network and the machine of a trainer, from the
    environment in which it would run.

    Given its step time, state size and number of groups, propose settings, and show what each kind
    of failure then costs. Exit status: 0 if there is no problem (warnings are none), 1 if there is
    one, 2 if an option is wrong.
    """
    if serve:
        given = {"--peer": peer, "--step-time": step_time, "--state-size": state_size}
        given |= {"--link-rate": link_rate, "--groups": groups, "--json": as_json or None}
        for flag, value in given.items():
            if value is not None:
                raise click.UsageError(f"--serve only serves: {flag} is for the other doctor")
        serve_links(bind or HostPort("", DEFAULT_PORT))
        return
    if bind is not None:
        raise click.UsageError("--bind is the address of --serve")
    # Only here: a lighthouse that starts needs none of this.
    from torchft_svc.doctor.examination import DoctorOptions, Examination
    from torchft_svc.doctor.findings import Level
    from torchft_svc.doctor.report import count_level, findings_json, findings_text
    from torchft_svc.doctor.settings import read_settings

    options = DoctorOptions(
        peer=peer,
        step_s=step_time,
        state_bytes=state_size,
        link_rate=link_rate,
        num_groups=groups,
    )
    examination = Examination(read_settings(Environment(), lighthouse, job_id), options)
    findings = examination.make()
    show = findings_json if as_json else findings_text
    click.echo(show(findings, examination.plan))
    if count_level(findings, Level.PROBLEM):
        click.get_current_context().exit(FOUND_PROBLEM)


def serve_links(bind: HostPort) -> None:
    """Serve measurements until SIGINT or SIGTERM."""
    from torchft_svc.doctor.link_rate import serving  # only here, see above

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.ExitStack() as stack:
        with showing_usage():
            security = resolve_security(Environment())
        try:
            server = stack.enter_context(serving(bind, security, click.echo))
        except UsageError as error:
            raise click.ClickException(str(error)) from None
        click.echo(f"doctor serves on {server.address}: lighthouse doctor --peer {server.address}")
        while not stop.wait(0.2):
            pass
