"""Notices at once that the parent, which started this process, has died, or ends it (rule M2)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from torchft_svc.host.process_end import POLL_S, ProcessEnd

# The signal by which a parent ends its manager: nobody else sends this one.
STOP_SIGNAL = signal.SIGUSR1
# How long a parent that is to be killed has to end by the news of it, and again after SIGTERM: it
# writes its flight record and its stacks first, for up to a second each. It may be unable to: no
# thread of it runs while a call into a library holds the interpreter's lock.
PARENT_GRACE_S = 2.5


@contextlib.contextmanager
def watch_parent(pid: int, on_death: Callable[[], None]) -> Iterator[None]:
    """Call ``on_death`` on the running event loop when process ``pid`` has ended.

    A pipe would not do: forked children of the parent, such as DataLoader workers, hold its other
    end open. A parent-death signal would not do either: it is bound to the thread that forked.
    """
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(contextlib.closing(ProcessEnd(pid)))
        if parent.descriptor is not None:
            loop, descriptor = asyncio.get_running_loop(), parent.descriptor

            def report_death() -> None:
                loop.remove_reader(descriptor)
                on_death()

            loop.add_reader(descriptor, report_death)
            stack.callback(loop.remove_reader, descriptor)
        elif parent.has_ended():
            on_death()
        else:
            poll = asyncio.get_running_loop().create_task(_poll(parent, on_death))
            stack.callback(poll.cancel)
        yield


async def end_parent(pid: int, ended: asyncio.Event) -> None:
    """Send SIGTERM, then SIGKILL, each unless ``ended`` is set soon after what came before."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), PARENT_GRACE_S)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def _poll(parent: ProcessEnd, on_death: Callable[[], None]) -> None:
    while True:
        if parent.has_ended():
            on_death()
            return
        await asyncio.sleep(POLL_S)
