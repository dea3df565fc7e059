"""What both services' command lines share: spelling of flags, logging, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click
import uvloop

from torchft_svc.core.types import MAX_DURATION_MS, MAX_DURATION_S, MAX_REASON_LENGTH, check_text
from torchft_svc.env import LOG_LEVELS, LOG_VARIABLE, Environment
from torchft_svc.errors import RequestRefused, UsageError
from torchft_svc.rpc.address import HostPort, parse_address, split_addresses
from torchft_svc.rpc.log_limit import LimitedLog, level_number, line_formatter
from torchft_svc.rpc.security import resolve_security
from torchft_svc.rpc.upkeep import UPKEEP

log = logging.getLogger(__name__)

# Three connections for each of ten thousand groups; at 30 KB each that is 1 GB at the most.
MAX_DESCRIPTORS = 32_768

F = TypeVar("F", bound=Callable[..., Any])


class _GivenOption(click.Option):
    """An empty value on the command line is an error: it comes from a shell variable that is not
    set, and the default is not what was meant."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        source = ctx.get_parameter_source(self.name) if self.name else None
        is_given = source is click.core.ParameterSource.COMMANDLINE
        if is_given and isinstance(value, str) and not value.strip():
            reason = f"{value!r} is empty: give it a value, or leave it out"
            raise click.BadParameter(reason, ctx=ctx, param=self)
        return super().process_value(ctx, value)


def option(name: str, **attrs: Any) -> Callable[[F], F]:
    """A click option; its help tells which environment variable counts where it is not given. On
    the command line it must not be empty."""
    return click.option(name, cls=_GivenOption, **{"show_envvar": True, **attrs})


def log_level_option(main: F) -> F:
    """The flag for what a service logs, handed to ``main`` as ``log_level``."""
    return option(
        "--log-level",
        type=click.Choice(LOG_LEVELS, case_sensitive=False),
        envvar=LOG_VARIABLE,
        default="info",
        help="What to log, to stderr.",
    )(main)


def security_options(main: Callable[..., None]) -> Callable[..., None]:
    """The flags for TLS and the token, handed to ``main`` as one argument, ``security``.

    The token itself has no flag: everybody on the machine can read a command line.
    """

    @option("--tls-cert", help="Certificate with its intermediates, PEM.  [env: TORCHFT_TLS_CERT]")
    @option("--tls-key", help="The certificate's private key, PEM.  [env: TORCHFT_TLS_KEY]")
    @option(
        "--tls-ca",
        help="CA that signs the others' certificates, PEM; a server then requires one from every "
        "caller (mutual TLS).  [env: TORCHFT_TLS_CA]",
    )
    @option(
        "--token-file",
        help="File with the token that every call must carry; the token itself is taken from "
        "TORCHFT_TOKEN only, because a command line is not secret.  [env: TORCHFT_TOKEN_FILE]",
    )
    @functools.wraps(main)
    def secured(
        *, tls_cert: str, tls_key: str, tls_ca: str, token_file: str, **others: Any
    ) -> None:
        files = {"cert_file": tls_cert, "key_file": tls_key, "ca_file": tls_ca}
        with telling_usage():
            security = resolve_security(Environment(), **files, token_file=token_file)
        main(security=security, **others)

    return secured


@contextlib.contextmanager
def telling_usage() -> Iterator[None]:
    """A setting that cannot work ends the command as click's own usage errors do."""
    try:
        yield
    except UsageError as error:
        raise click.UsageError(str(error)) from None


def in_seconds(settings: Mapping[str, float | None]) -> dict[str, Any]:
    """``settings`` with the names and units of a config: what ends in ``_ms``, in seconds."""
    config: dict[str, Any] = {}
    for name, value in settings.items():
        if name.endswith("_ms"):
            config[f"{name[:-3]}_s"] = None if value is None else value / 1000
        else:
            config[name] = value
    return config


class _Milliseconds(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since 8.4
    """A whole number; one below zero is refused where it is known what it means."""

    name = "ms"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = click.INT.convert(value, param, ctx)
        if number > MAX_DURATION_MS:
            days = MAX_DURATION_S / 86_400
            self.fail(f"use {MAX_DURATION_MS} ({days:g} days) at most", param, ctx)
        return max(number, -MAX_DURATION_MS)


MILLISECONDS = _Milliseconds()


class Text(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since 8.4
    """A line of text, as it travels in a request; ``is_name``: in the metadata of a call."""

    name = "text"

    def __init__(self, limit: int = MAX_REASON_LENGTH, *, is_name: bool = False) -> None:
        self._limit, self._is_name = limit, is_name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text: str = value
        try:
            check_text("it", text, self._limit)
        except RequestRefused as error:  # also for bytes that are no text here
            self.fail(str(error), param, ctx)
        if self._is_name and not text.isascii():
            self.fail(f"{text!r} is not ASCII", param, ctx)
        return text


class Addresses(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since 8.4
    """``host:port``, or several of them with commas between, as they were written."""

    name = "host:port[,host:port...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return ",".join(split_addresses(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Address(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since 8.4
    """``host:port``; with ``may_bind``, also ``:port`` and port 0."""

    name = "host:port"

    def __init__(self, *, may_bind: bool = False) -> None:
        self._may_bind = may_bind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> HostPort:
        if isinstance(value, HostPort):
            return value
        try:
            return parse_address(value, may_bind=self._may_bind)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def run(
    service: Callable[[asyncio.Event], Coroutine[Any, Any, int]],
    log_level: str,
    *,
    stop_signal: signal.Signals | None = None,
    who: str = "",
) -> None:
    """Run ``service`` until it returns its exit status; SIGTERM and SIGINT set its event.

    ``who``: how its lines in the log name it (default: by their modules).

    With ``stop_signal`` only that one does, and the others are ignored: terminals and init systems
    send them to a trainer's children too, and it is the trainer that decides when they stop.
    """
    _fill_closed_descriptors()
    handler = LimitedLog()
    handler.setFormatter(line_formatter(who))
    logging.basicConfig(level=level_number(log_level), handlers=[handler])
    UPKEEP.switch_on()
    _allow_descriptors()
    try:
        status = uvloop.run(_until_stopped(service, stop_signal))
    except UsageError as error:
        say(f"Error: {error}", err=True)
        status = 2
    sys.exit(status)


def say(text: str, *, err: bool = False) -> None:
    """Print what a service has to say; where nothing can be written it works without."""
    try:
        click.echo(text, err=err)
    except OSError as error:
        log.warning("%r could not be printed: %s", text, error.strerror)
        drop_output(sys.__stderr__ if err else sys.__stdout__)


def drop_output(stream: TextIO | None) -> None:
    """What is left in its buffers is lost, instead of failing once more when the process ends."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _fill_closed_descriptors() -> None:
    """Who starts a service with its output closed would else have it print into a connection, and
    the event loop end the process for that."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _allow_descriptors() -> None:
    """The usual 1024 are fewer than a thousand groups need, and a few idle connections would use
    them up and keep everybody else out."""
    used, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS
    if allowed != resource.RLIM_INFINITY:
        wanted = min(wanted, allowed)
    if used != resource.RLIM_INFINITY and used < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, allowed))


async def _until_stopped(
    service: Callable[[asyncio.Event], Coroutine[Any, Any, int]],
    stop_signal: signal.Signals | None,
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if stop_signal is None:
            loop.add_signal_handler(number, stop.set)
        else:
            signal.signal(number, signal.SIG_IGN)
    if stop_signal is not None:
        loop.add_signal_handler(stop_signal, stop.set)
    return await service(stop)
