"""Runs a service as a process: its descriptors, its log, its signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TextIO

import uvloop

from torchft_svc.env import Environment
from torchft_svc.errors import UsageError
from torchft_svc.host.line_writer import unblocked_output
from torchft_svc.host.log_format import Speaker, make_formatter
from torchft_svc.host.log_limit import LimitedLog, level_number
from torchft_svc.rpc.descriptors import SERVICE_DESCRIPTORS, require_descriptors
from torchft_svc.rpc.upkeep import UPKEEP

log = logging.getLogger(__name__)

# Three connections for each of ten thousand groups; at 30 KB each that is 1 GB at the most.
MAX_DESCRIPTORS = 32_768
_UNNAMED = Speaker()


def run(
    service: Callable[[asyncio.Event], Coroutine[Any, Any, int]],
    log_level: str,
    *,
    stop_signal: signal.Signals | None = None,
    speaker: Speaker = _UNNAMED,
) -> None:
    """Run ``service`` until it returns its exit status; SIGTERM and SIGINT set its event.

    ``speaker``: how its lines in the log name it (default: by their modules).

    With ``stop_signal`` only that one does, and the others are ignored: terminals and init systems
    send them to a trainer's children too, and it is the trainer that decides when they stop.
    """
    _fill_closed_descriptors()
    with unblocked_output(_log_unprinted) as errors:
        handler = LimitedLog(errors)
        handler.setFormatter(make_formatter(Environment().log_format, speaker))
        logging.basicConfig(level=level_number(log_level), handlers=[handler])
        UPKEEP.switch_on()
        _allow_descriptors()
        try:
            require_descriptors(SERVICE_DESCRIPTORS, "this service")
            status = uvloop.run(_until_stopped(service, stop_signal))
        except UsageError as error:
            print(f"Error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from error
        finally:
            handler.close()
    sys.exit(status)


def _log_unprinted(line: str, error: OSError) -> None:
    log.warning("%r could not be printed: %s", line.rstrip(), error.strerror)


def drop_output(stream: TextIO | None) -> None:
    """Drop what the buffers of ``stream`` hold, so that it does not fail once more at exit."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _fill_closed_descriptors() -> None:
    """Open closed standard descriptors.

    A service that was started with its output closed would else print into a connection, and the
    event loop end the process for that.
    """
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
