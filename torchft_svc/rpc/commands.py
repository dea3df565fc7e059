"""What the commands for operators share: how they are called, and how they ask a service."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import click
import grpc
from google.protobuf.message import Message

from torchft_svc.core.route import Route
from torchft_svc.env import Environment
from torchft_svc.errors import (
    ConfigError,
    DeadlineExceeded,
    NotLeader,
    TorchFTError,
    Unreachable,
)
from torchft_svc.host.address import split_addresses
from torchft_svc.rpc.channel import open_channel
from torchft_svc.rpc.codec import JOB_KEY
from torchft_svc.rpc.running import drop_output
from torchft_svc.rpc.security import Security
from torchft_svc.rpc.status import to_error
from torchft_svc.version import VERSION

# An operator waits for so long for each address.
ASK_TIMEOUT_S = 5.0

# What a full disk, or one that is broken, says when something is printed to it.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

Answer = TypeVar("Answer", bound=Message)


class ServiceCommand(click.Command):
    """A command that runs a service; an operator command as the first word asks a running one.

    A click group would want the service's own required options before each of them. Options may be
    written with underscores, too, as in the public release's scripts.
    """

    def __init__(
        self, *args: Any, operator_commands: Sequence[click.Command], **attrs: Any
    ) -> None:
        super().__init__(*args, **attrs)
        self._operator_commands = {command.name: command for command in operator_commands}
        self.params.append(_version_option())

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        extra.setdefault("token_normalize_func", _with_dashes)
        command = self._operator_commands.get(args[0]) if args else None
        if command is None:
            return super().make_context(info_name, args, parent, **extra)
        return command.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Run the command as click does; a failure to print (a full disk) is one sentence, too."""
        try:
            return super().main(args, *more, **extra)
        except SystemExit as end:
            words = sys.argv[1:] if args is None else args
            is_service = not words or words[0] not in self._operator_commands
            if is_service and end.code == click.UsageError.exit_code:
                sys.exit(_verdict() or end.code)
            raise
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            drop_output(sys.__stdout__)
            with contextlib.suppress(OSError):
                click.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
            sys.exit(1)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands for a running service, instead of the options"):
            formatter.write_dl(
                [
                    (str(name), command.get_short_help_str(60))
                    for name, command in self._operator_commands.items()
                ]
            )


def _verdict() -> int | None:
    """Return the status of a service whose settings cannot work, if its scheduler asked for one."""
    try:
        return Environment().do_not_requeue_exit_code
    except ConfigError:
        return None


def _version_option() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given and not ctx.resilient_parsing:
            click.echo(f"{ctx.info_name} {VERSION}")
            ctx.exit()

    return click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the version and exit.",
    )


def _with_dashes(word: str) -> str:
    return word.replace("_", "-")


def ask(
    peer: str, addresses: str, security: Security, job: str, request: Message, answer: type[Answer]
) -> Answer:
    """What the first of ``addresses`` that answers says; of lighthouses, what the leader says.

    Raises:
        click.ClickException: in one sentence, why there is no answer (exit status 1).
    """
    route = Route(split_addresses(addresses))
    failures: list[str] = []
    goes_on = True
    while goes_on:
        try:
            return ask_one(peer, route.current, security, job, request, answer)
        except NotLeader as error:
            failures.append(f"{route.current}: {error}")
            goes_on = route.choose_next(error.leader)
        except (Unreachable, DeadlineExceeded) as error:
            failures.append(str(error))
            goes_on = route.choose_next()
        except TorchFTError as error:
            raise click.ClickException(str(error)) from None
    raise click.ClickException("; ".join(dict.fromkeys(failures)))


def ask_one(
    peer: str,
    address: str,
    security: Security,
    job: str,
    request: Message,
    answer: type[Answer],
    timeout_s: float = ASK_TIMEOUT_S,
) -> Answer:
    """Return the answer of the service at ``address``.

    Raises:
        TorchFTError: why there is none.
    """
    method = type(request).__name__.removeprefix("Lighthouse").removesuffix("Request")
    metadata = ((JOB_KEY, job), *security.metadata)
    # Nobody would try again: a peer that is busy may take all that time to greet.
    connecting_ms = int(timeout_s * 1000)
    with open_channel(address, security, connecting_ms=connecting_ms) as channel:
        call = channel.unary_unary(
            f"/torchft.{peer.capitalize()}Service/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            reply: Answer = call(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise to_error(
                error,
                peer=peer,
                address=address,
                action=f"{peer}'s {method}",
                timeout_s=timeout_s,
            ) from None
    return reply
