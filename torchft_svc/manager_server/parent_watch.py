"""Notices at once that the parent, which started this process, has died, or ends it (rule M2)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

# By which a parent ends its manager: nobody else sends this one.
STOP_SIGNAL = signal.SIGUSR1
# Where the system has no process descriptors (Linux before 5.3, macOS), ask this often.
POLL_S = 0.2
# A parent that is to be killed has so long to end by the news of it, and as long after SIGTERM: it
# writes its flight record and its stacks first, for up to a second each. It may be unable to: no
# thread of it runs while a call into a library holds the interpreter's lock.
PARENT_GRACE_S = 2.5


@contextlib.contextmanager
def watch_parent(pid: int, on_death: Callable[[], None]) -> Iterator[None]:
    """Call ``on_death`` on the running event loop when process ``pid`` has ended.

    A pipe would not do: forked children of the parent, such as DataLoader workers, hold its other
    end open. A parent-death signal would not do either: it is bound to the thread that forked.
    """
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        on_death()
        yield
        return
    except (AttributeError, OSError):
        poll = loop.create_task(_poll(pid, on_death))
        try:
            yield
        finally:
            poll.cancel()
        return

    def died() -> None:
        loop.remove_reader(descriptor)
        on_death()

    loop.add_reader(descriptor, died)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def end_parent(pid: int, ended: asyncio.Event) -> None:
    """SIGTERM, then SIGKILL, each unless ``ended`` is set soon after what came before."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), PARENT_GRACE_S)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def _poll(pid: int, on_death: Callable[[], None]) -> None:
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            on_death()
            return
        except PermissionError:
            pass  # it lives, as somebody else
        await asyncio.sleep(POLL_S)
