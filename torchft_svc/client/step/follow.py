"""Follows the state of a job at a distance while a prepared spare waits for a place (rule G3)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from torchft_svc.errors import RequestRefused, TorchFTError

log = logging.getLogger(__name__)

# A fetch ends as soon as its connections are cut; a source that accepts one just then may need
# longer, and is not waited for.
_END_WITHIN_S = 2.0
_INTERRUPT_EACH_S = 0.02
# Where nothing could be fetched: there is no member yet, or none that can be reached.
_LOOK_AGAIN_S = 1.0
_OVER = "a place is free"


@contextlib.contextmanager
def following(
    fetch: Callable[[Callable[[], None]], bool],
    interrupt: Callable[[str], None],
    refresh_s: float,
) -> Iterator[None]:
    """Call ``fetch`` now, and again ``refresh_s`` after each end, while the block runs.

    ``fetch`` receives a function that raises when it is to end, and returns whether it has fetched
    anything; ``interrupt`` cuts what it reads from. Neither may raise anything in the block: a
    spare without a state at hand heals as any other group.
    """
    stop = threading.Event()
    thread = threading.Thread(
        target=_follow_state, args=(fetch, stop, refresh_s), name="torchft-follow", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        deadline = time.monotonic() + _END_WITHIN_S
        while thread.is_alive() and time.monotonic() < deadline:
            interrupt(_OVER)
            thread.join(_INTERRUPT_EACH_S)


def _follow_state(
    fetch: Callable[[Callable[[], None]], bool], stop: threading.Event, refresh_s: float
) -> None:
    def check() -> None:
        if stop.is_set():
            raise RequestRefused(_OVER)

    reported = ""
    while not stop.is_set():
        pause_s = min(refresh_s, _LOOK_AGAIN_S)
        try:
            if fetch(check):
                pause_s = refresh_s
        except TorchFTError as error:
            if not stop.is_set() and str(error) != reported:
                reported = str(error)
                log.info("the state of the job cannot be followed: %s", reported)
        except Exception:
            log.exception("the state of the job is not followed any more; a heal fetches all of it")
            return
        stop.wait(pause_s)
