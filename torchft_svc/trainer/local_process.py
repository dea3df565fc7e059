"""A worker's process on this machine: forked from one that has imported torch, on one socket.

As a program it is the fork server of a `LocalBackend`. The socket carries pickled messages between
two processes of one program, each behind its length.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from torchft_svc import env
from torchft_svc.client.process.forks import drop_after_fork
from torchft_svc.errors import ChannelClosed, CheckpointError
from torchft_svc.host.fork_server import serve
from torchft_svc.host.line_writer import flush_lines
from torchft_svc.trainer.messages import Answer, Command, Position, StateHandle

# The length of a message goes before it.
LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18
# A state that is not written completely has this ending; it is removed with its worker.
PART = ".part"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStart:
    """The first message to a worker's process: its job and its environment.

    Args:
        worker: its number.
        job: for the program.
        program: pickled; empty: `run_worker`.
        environment, folder, path: environment variables, working directory and ``sys.path``.
        scratch: directories for states; the first one with room is used.
        num_threads: of torch's operations.
    """

    worker: int
    job: bytes
    program: bytes
    environment: dict[str, str]
    folder: str
    path: list[str]
    scratch: tuple[str, ...]
    num_threads: int


class Frames:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, more: bytes) -> None:
        self._received += more

    def next(self) -> Any:
        """The next message; None: it has not arrived completely.

        Raises an exception of the user's classes if it cannot be read; the one behind it can be.
        """
        if len(self._received) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._received)
        end = LENGTH.size + size
        if len(self._received) < end:
            return None
        try:
            with memoryview(self._received) as received, received[LENGTH.size : end] as body:
                return pickle.loads(body)  # noqa: S301
        finally:
            del self._received[:end]


def frame(message: object) -> bytes:
    """Encode a message for the socket; the other end has another ``__main__``."""
    body: bytes = cloudpickle.dumps(message)
    return LENGTH.pack(len(body)) + body


class LocalLink:
    """The worker's end of the socket; see `Link`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._frames = Frames()
        self._scratch: tuple[str, ...] = ()
        self._worker = 0
        self._num_states = 0
        # A DataLoader's process must not keep it open when this one has ended.
        drop_after_fork(self)

    @property
    def host(self) -> str:
        return "127.0.0.1"

    def receive_start(self, timeout_s: float) -> LocalStart:
        """Receive the first message.

        Raises:
            ChannelClosed: it does not come.
        """
        start = self._next(timeout_s)
        if not isinstance(start, LocalStart):
            raise ChannelClosed("to the trainer", "it did not send what to run")
        self._scratch, self._worker = start.scratch, start.worker
        return start

    def send(self, answer: Answer) -> None:
        framed = frame(answer)
        try:
            with self._sending:
                self._socket.sendall(framed)
        except OSError as error:
            raise ChannelClosed("to the trainer", str(error)) from error

    def receive(self, timeout_s: float | None) -> Command | None:
        command: Command | None = self._next(timeout_s)
        return command

    def offer_state(self, position: Position, state: bytes) -> StateHandle:
        with self._sending:
            self._num_states += 1
            name = f"{self._worker}-{self._num_states}"
        return write_state(self._scratch, name, position, state)

    def read_state(self, state: StateHandle) -> bytes:
        return read_state(state)

    def drop_descriptors(self) -> None:
        self._socket.close()

    def _next(self, timeout_s: float | None) -> Any:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._receiving:
            while (message := self._frames.next()) is None:
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    if not select.select([self._socket], [], [], left_s)[0]:
                        return None
                    more = self._socket.recv(_READ_BYTES)
                except (OSError, ValueError) as error:
                    raise ChannelClosed("to the trainer", str(error)) from error
                if not more:
                    raise ChannelClosed("to the trainer", "it has ended")
                self._frames.feed(more)
            return message


def write_state(
    scratch: tuple[str, ...], name: str, position: Position, state: bytes
) -> StateHandle:
    """Store a state in the first directory that has room for it.

    Raises:
        CheckpointError: none has.
    """
    reason = "there is no directory for it"
    for folder in scratch:
        path = Path(folder) / name
        part = path.with_name(name + PART)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)  # it may have been deleted
            part.write_bytes(state)
            part.rename(path)
        except OSError as error:
            reason = str(error)
            with contextlib.suppress(OSError):
                part.unlink()
            continue
        return StateHandle(position=position, where=str(path))
    raise CheckpointError("a worker", f"it cannot be stored: {reason}")


def read_state(state: StateHandle) -> bytes:
    """Read a state that was stored.

    Raises:
        CheckpointError: it is not there any more.
    """
    try:
        return Path(state.where).read_bytes()
    except OSError as error:
        raise CheckpointError(str(state.where), str(error)) from error


# -- the process ---------------------------------------------------------------------------------

# The trainer sends the first message right after the fork.
_START_S = 60.0


def load_libraries() -> None:
    """Load what torch and we load at the first use, which takes half a second, without a thread."""
    import numpy.random  # noqa: F401
    import torch
    import torch.nn.parallel

    import torchft_svc.preload  # noqa: F401

    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()
    torch.manual_seed(0)


def main(descriptor: str, owner_pid: str, *scratch: str) -> None:
    """Import, and fork; in a fork, return when its worker has ended."""
    import torch

    run_worker = importlib.import_module("torchft_svc.trainer.worker").run_worker
    for name in ("per_step", "checkpoint_tensors"):  # so that no fork has to do it
        importlib.import_module(f"torchft_svc.trainer.{name}")
    load_libraries()
    fork = serve(int(descriptor), int(owner_pid))
    if fork is None:
        for folder in scratch:  # the trainer may have been killed
            shutil.rmtree(folder, ignore_errors=True)
        return
    fork.lead_session(signal.SIGTERM)
    (connection,) = fork.descriptors
    link = LocalLink(socket.socket(fileno=connection))
    start = link.receive_start(_START_S)
    env.replace(start.environment)
    os.chdir(start.folder)
    sys.path[:] = start.path
    sys.argv[:] = sys.argv[:1]
    torch.set_num_threads(start.num_threads)
    run = cloudpickle.loads(start.program) if start.program else run_worker
    run(link, start.worker, start.job)
    sys.stdout.flush()
    sys.stderr.flush()
    flush_lines()
    os._exit(0)  # without waiting for what torch or the program have left running


if __name__ == "__main__":
    # Messages are of the module's classes, not of this program's.
    from torchft_svc.trainer import local_process

    local_process.main(*sys.argv[1:])
