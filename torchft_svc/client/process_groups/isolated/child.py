"""The process that carries the collectives of one process group; forked by the fork server.

Run as a program, this module is that server. It never uses a device, so the forks may.

One thread receives and starts operations, another connects and leaves members. The process exits
with the trainer: when its socket closes, or, because forked children of the trainer keep that open,
when the trainer's process exits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup
from torchft_svc.client.process_groups.gloo import ProcessGroupGloo
from torchft_svc.client.process_groups.isolated.device_segments import DeviceWindow
from torchft_svc.client.process_groups.isolated.messages import (
    Abort,
    Backend,
    ChildFailed,
    Configure,
    Forget,
    Launch,
    Lose,
    Options,
    Place,
    Reply,
    Share,
    ShareDevice,
    options_from_plain,
    replace_leaves,
)
from torchft_svc.client.process_groups.isolated.segments import HostSegment
from torchft_svc.client.process_groups.nccl import ProcessGroupNCCL
from torchft_svc.host.clean_start import last_line
from torchft_svc.host.fork_server import serve
from torchft_svc.host.line_writer import unblocked_output
from torchft_svc.host.process_end import ProcessEnd

# By its own name also where it runs as a program.
log = logging.getLogger(f"{__package__}.child")

# For an operation that has ended; without a timeout, only the stream would wait.
_OVER = timedelta(seconds=1)
# Interval at which operations on devices are polled. An operation between hosts takes longer.
POLL_S = 0.0002

# The process groups that run the collectives, by `Backend.kind`.
_GROUPS: Mapping[str, Callable[[Backend], DelegatingProcessGroup]] = {
    "gloo": lambda _: ProcessGroupGloo(),
    "nccl": lambda backend: ProcessGroupNCCL(
        device=torch.device(backend.device), high_priority=backend.high_priority
    ),
}


class Child:
    """Carries out the trainer's commands. The first one names the backend."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pg: DelegatingProcessGroup | None = None
        self._segments: dict[int, HostSegment | DeviceWindow] = {}
        self._commands: queue.SimpleQueue[tuple[DelegatingProcessGroup, Configure | Abort]]
        self._commands = queue.SimpleQueue()
        self._sending = threading.Lock()

    @functools.cached_property
    def _poller(self) -> CompletionPoller:
        poller = CompletionPoller()
        threading.Thread(target=poller.run, name="torchft-works", daemon=True).start()
        return poller

    def run(self, trainer_pid: int) -> None:
        """Serve until the trainer closes its end of the connection."""
        watch_trainer = functools.partial(_end_with, trainer_pid)
        for work, name in ((self._run_commands, "commands"), (watch_trainer, "owner")):
            threading.Thread(target=work, name=f"torchft-{name}", daemon=True).start()
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                return
            if isinstance(message, Share):
                self._segments[message.segment] = self._map(message)
            elif isinstance(message, ShareDevice):
                self._segments[message.segment] = DeviceWindow(message)
            elif isinstance(message, Forget):
                del self._segments[message.segment]
                if self._pg is not None:
                    self._pg.forget_completed()
            elif isinstance(message, Launch):  # not on the other thread: a hand-over takes time
                self._launch(message)
            else:
                self._accept(message)

    def _map(self, message: Share) -> HostSegment:
        descriptor = recv_handle(self._connection)
        segment = HostSegment(message.segment, descriptor, message.num_bytes)
        segment.close()  # the mapping stays
        return segment

    def _accept(self, message: Configure | Abort | Lose) -> None:
        if isinstance(message, Configure) and self._pg is None:
            self._pg = _GROUPS[message.backend.kind](message.backend)
        if self._pg is None:
            return  # there is nothing to leave or to lose
        if isinstance(message, Lose):  # at once: it has to end a configure under way
            self._pg.lose_member(message.quorum_id, message.reason)
        else:
            self._commands.put((self._pg, message))

    def _run_commands(self) -> None:
        while True:
            pg, message = self._commands.get()
            if isinstance(message, Abort):
                pg.abort()
            else:
                self._answer(message.number, functools.partial(_configure, pg, message))

    def _launch(self, message: Launch) -> None:
        pg, segment = self._pg, self._segments[message.segment]
        assert pg is not None, "only a member launches operations"
        try:
            args = replace_leaves(message.args, self._restore)
            kwargs = replace_leaves(message.kwargs, self._restore)
            work = segment.run(lambda: pg._launch(message.name, args, kwargs))
        except Exception as error:
            log.debug("collective %d was refused", message.number, exc_info=True)
            self._reply(Reply(message.number, str(error)))
            return
        answer = functools.partial(self._answer, message.number)
        if isinstance(segment, DeviceWindow):
            self._poll_work(work, segment, answer)
            return
        try:
            future = work.get_future()
        except RuntimeError:  # gloo reports the end of some operations only in wait()
            threading.Thread(
                target=answer, args=(work.wait,), name="torchft-work", daemon=True
            ).start()
        else:
            future.add_done_callback(lambda over: answer(over.value))

    def _poll_work(self, work: Any, window: DeviceWindow, answer: Callable[[Any], None]) -> None:
        # The event is set when an aborted operation ends; the work reports other errors.
        self._poller.add(
            lambda: window.is_over() or work.is_completed(),
            lambda: answer(functools.partial(work.wait, _OVER)),
        )

    def _restore(self, value: Any) -> Any:
        if isinstance(value, Place):
            return self._segments[value.segment].tensor(value)
        return options_from_plain(value) if isinstance(value, Options) else value

    def _answer(self, number: int, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            log.debug("number %d failed", number, exc_info=True)
            self._reply(Reply(number, str(error)))
        else:
            self._reply(Reply(number))

    def _reply(self, answer: Reply) -> None:
        with self._sending:
            self._connection.send(answer)


class CompletionPoller:
    """Polls all operations on devices in turn, since no device reports an end by itself.

    A hanging operation does not delay the report of another one.
    """

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[Callable[[], bool], Callable[[], object]]]
        self._new = queue.SimpleQueue()

    def add(self, is_over: Callable[[], bool], on_end: Callable[[], object]) -> None:
        """Call ``on_end`` once ``is_over`` returns True, or fails: ``on_end`` reports why."""
        self._new.put((is_over, on_end))

    def run(self) -> None:
        """Poll until the process exits; needs its own thread."""
        pending: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        while True:
            if not pending or not self._new.empty():
                pending.append(self._new.get())
                continue
            over = [entry for entry in pending if _is_over(entry[0])]
            pending = [entry for entry in pending if entry not in over]
            for _, on_end in over:
                on_end()
            if not over:
                time.sleep(POLL_S)


def _is_over(check: Callable[[], bool]) -> bool:
    """Whether an operation has ended; a device that has failed ends all of them."""
    try:
        return check()
    except RuntimeError:
        return True


def _configure(pg: DelegatingProcessGroup, message: Configure) -> None:
    pg.set_timeout(message.timeout)
    pg._configure(message.members)


def _end_with(pid: int) -> None:
    """End this process when process ``pid`` has ended, whatever else it does."""
    ProcessEnd(pid).wait()
    os._exit(0)


def main() -> None:
    """``child DESCRIPTOR PID``: the socket to the trainer, and its process id. Each request carries
    the socket to the fork."""
    descriptor, trainer_pid = map(int, sys.argv[1:])
    fork = serve(descriptor, trainer_pid)
    if fork is None:
        return
    status = 1
    try:
        connection = Connection(fork.descriptors[0])
        Child(connection).run(trainer_pid)
        status = 0
    except Exception as error:  # noqa: BLE001 - the process exits and prints why
        with contextlib.suppress(OSError):
            connection.send(ChildFailed(last_line(error)))
        with unblocked_output():
            traceback.print_exc()
    finally:
        os._exit(status)  # a hanging operation would block an ordinary exit


if __name__ == "__main__":
    main()
