"""The process that carries the collectives of one process group; forked by the template.

One thread reads and starts operations, another meets and leaves members. It ends with the trainer:
when its socket closes, or, because forked children of the trainer hold that open, when the
trainer's process does.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup
from torchft_svc.client.process_groups.isolated.messages import (
    Abort,
    Configure,
    Done,
    Failed,
    Launch,
    Lose,
    Options,
    Place,
    Share,
    options_from_plain,
    replace_leaves,
)
from torchft_svc.client.process_groups.isolated.segments import Segment

log = logging.getLogger(__name__)


class Child:
    """Obeys the trainer's messages."""

    def __init__(self, connection: Connection, pg: DelegatingProcessGroup) -> None:
        self._connection = connection
        self._pg = pg
        self._segments: dict[int, Segment] = {}
        self._orders: queue.SimpleQueue[Configure | Abort] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def run(self, trainer_pid: int) -> None:
        """Until the trainer's end of the connection is closed."""
        owner = functools.partial(_end_with, trainer_pid)
        for work, name in ((self._obey, "orders"), (owner, "owner")):
            threading.Thread(target=work, name=f"torchft-{name}", daemon=True).start()
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                return
            if isinstance(message, Share):
                descriptor = recv_handle(self._connection)
                segment = Segment(message.segment, descriptor, message.num_bytes)
                segment.close()  # the mapping stays
                self._segments[message.segment] = segment
            elif isinstance(message, Lose):  # at once: a configure under way has to hear of it
                self._pg.lose_member(message.quorum_id, message.reason)
            elif isinstance(message, Launch):  # here: a hand-over to a thread takes its time
                self._launch(message)
            else:
                self._orders.put(message)

    def _obey(self) -> None:
        while True:
            message = self._orders.get()
            if isinstance(message, Abort):
                self._pg.abort()
            else:
                self._answer(message.number, functools.partial(self._configure, message))

    def _configure(self, message: Configure) -> None:
        self._pg.set_timeout(message.timeout)
        self._pg._configure(message.members)

    def _launch(self, message: Launch) -> None:
        try:
            args = replace_leaves(message.args, self._restore)
            kwargs = replace_leaves(message.kwargs, self._restore)
            work = self._pg._launch(message.name, args, kwargs)
        except Exception as error:
            log.debug("collective %d was refused", message.number, exc_info=True)
            self._tell(Failed(message.number, str(error)))
            return
        try:
            future = work.get_future()
        except RuntimeError:  # some of gloo's operations tell of their end only to who waits
            end = functools.partial(self._answer, message.number, work.wait)
            threading.Thread(target=end, name="torchft-work", daemon=True).start()
        else:
            future.add_done_callback(lambda over: self._answer(message.number, over.value))

    def _restore(self, value: Any) -> Any:
        if isinstance(value, Place):
            return self._segments[value.segment].tensor(value)
        return options_from_plain(value) if isinstance(value, Options) else value

    def _answer(self, number: int, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            log.debug("number %d failed", number, exc_info=True)
            self._tell(Failed(number, str(error)))
        else:
            self._tell(Done(number))

    def _tell(self, answer: Done | Failed) -> None:
        with self._sending:
            self._connection.send(answer)


def watch(pid: int) -> int | None:
    """A descriptor that is readable once process ``pid`` has ended; None: the system has none."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(0)
    except (AttributeError, OSError):
        return None


def _end_with(pid: int) -> None:
    """End this process when process ``pid`` has ended, whatever else it does."""
    descriptor = watch(pid)
    if descriptor is not None:
        select.select([descriptor], [], [])
        os._exit(0)
