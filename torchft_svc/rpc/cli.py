"""What both services' command lines share: the spelling and the checks of their flags."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click

from torchft_svc.core.limits import MAX_DURATION_MS, MAX_DURATION_S, MAX_REASON_LENGTH, check_text
from torchft_svc.env import LOG_FORMAT_VARIABLE, LOG_LEVELS, LOG_VARIABLE, Environment
from torchft_svc.errors import RequestRefused, UsageError
from torchft_svc.host.address import HostPort, parse_address, split_addresses
from torchft_svc.rpc.security import resolve_security

F = TypeVar("F", bound=Callable[..., Any])


class _GivenOption(click.Option):
    """An empty value on the command line is an error: it comes from a shell variable that is not
    set, and the default is not what was meant."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        source = ctx.get_parameter_source(self.name) if self.name else None
        is_given = source is click.core.ParameterSource.COMMANDLINE
        values = value if isinstance(value, list | tuple) else (value,)
        for each in values if is_given else ():
            if isinstance(each, str) and not each.strip():
                reason = f"{each!r} is empty: give it a value, or leave it out"
                raise click.BadParameter(reason, ctx=ctx, param=self)
        return super().process_value(ctx, value)


def option(name: str, **attrs: Any) -> Callable[[F], F]:
    """A click option whose help names the environment variable that replaces it.

    On the command line it must not be empty.
    """
    return click.option(name, cls=_GivenOption, **{"show_envvar": True, **attrs})


def log_level_option(main: Callable[..., None]) -> Callable[..., None]:
    """The flag for what a service logs, handed to ``main`` as ``log_level``."""

    @option(
        "--log-level",
        type=click.Choice(LOG_LEVELS, case_sensitive=False),
        envvar=LOG_VARIABLE,
        default="info",
        help=f"What to log, to stderr; {LOG_FORMAT_VARIABLE}=json writes JSON lines.",
    )
    @functools.wraps(main)
    def logging_main(**settings: Any) -> None:
        with showing_usage():
            _ = Environment().log_format  # `run` reads it; here a bad value is a usage error
        main(**settings)

    return logging_main


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
        with showing_usage():
            security = resolve_security(Environment(), **files, token_file=token_file)
        main(security=security, **others)

    return secured


@contextlib.contextmanager
def showing_usage() -> Iterator[None]:
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


class _Seconds(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since 8.4
    """A finite time above 0."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = click.FLOAT.convert(value, param, ctx)
        if not 0.001 <= number <= MAX_DURATION_S:
            self.fail(f"use 0.001 to {MAX_DURATION_S:.0f} seconds", param, ctx)
        return number


within_option = option(
    "--within",
    type=_Seconds(),
    default=None,
    show_default="not known",
    help="In how many seconds the processes will be killed: programs see it.",
)


def in_ms(seconds: float | None) -> int | None:
    """A duration as it is sent; None: absent."""
    return None if seconds is None else round(seconds * 1000)


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
