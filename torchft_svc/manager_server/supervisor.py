"""Supervises a trainer's manager: one that dies or stops responding is replaced (rule M3)."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable

from torchft_svc.core.quorum.types import Resumed
from torchft_svc.errors import GivenUp, TorchFTError
from torchft_svc.host.clean_start import ended_how
from torchft_svc.manager_server.child import STOP_TIMEOUT_S, ManagerProcess
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.early import WaitingManager

log = logging.getLogger(__name__)

# How many managers are started within how long: one that dies more often does not die by accident,
# and another would not help.
MAX_STARTS = 5
STARTS_WINDOW_S = 60.0
TOO_MANY_STARTS = (
    f"{MAX_STARTS} others were started within {STARTS_WINDOW_S:g} s and have ended: no further one "
    "is started; see their output on stderr"
)
# How long to wait between two attempts in a row; the first one is made at once.
FIRST_PAUSE_S = 0.1
# How long a process that has done its imports may need to serve: if it runs at all, it needs some
# hundredths of a second.
PREPARED_TIMEOUT_S = 2.0


class ManagerSupervisor:
    """A child process that is started again when it ends, or gives no sign of life; leaves nothing
    behind once closed.

    The first one is started at once, and supervised from `await_ready` on. ``on_move`` receives the
    address of each further one, and ``on_over`` why there will be no other, both on the
    supervisor's thread, before `find` returns or raises it.

    In a term, a group of several workers needs its manager in each step, and is given up by the
    others sooner than a process does its imports: so the next one has done them before (rule M3).
    """

    def __init__(
        self,
        config: ManagerConfig,
        timeout_s: float,
        on_move: Callable[[str], None],
        on_over: Callable[[str], None],
    ) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._on_move = on_move
        self._on_over = on_over
        self._resumed: Callable[[], Resumed | None] = lambda: None
        self._next = WaitingManager()
        self._next_at = -math.inf  # before then no other process is started to wait
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._child = ManagerProcess(config)
        self._address = ""
        self._why_over = ""
        self._thread = threading.Thread(target=self._supervise, name="torchft-manager", daemon=True)

    def await_ready(self) -> str:
        """Wait until the first one serves; its address.

        Raises:
            Unreachable, DeadlineExceeded: it does not start.
        """
        self._child.await_ready(self._timeout_s)
        self._address = self._child.address
        self._thread.start()
        return self._address

    def find(self) -> str:
        """The address of the manager, or of the last one (empty: there is none yet).

        Raises:
            GivenUp: there will be no other.
        """
        if self._why_over:
            raise GivenUp("manager", self._address, self._why_over)
        return self._address

    @property
    def pid(self) -> int:
        """The process id of the present manager."""
        return self._child.pid

    def resume_with(self, resumed: Callable[[], Resumed | None]) -> None:
        """Let the next manager continue the incarnation that ``resumed`` returns; it is called on
        the supervisor's thread."""
        self._resumed = resumed

    def close(self) -> None:
        """Stop the manager and start no other; may be called twice."""
        with self._lock:
            self._closing.set()
        if self._thread.ident is None:
            self._child.close()
            return
        self._child.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)
        self._next.kill_process()

    def _supervise(self) -> None:
        ends: collections.deque[float] = collections.deque(maxlen=MAX_STARTS)
        while True:
            status = self._child.wait(self._prepare_next)
            ended_at = time.monotonic()
            self._child.close()
            if self._closing.is_set():
                return
            end = ended_how(status)
            log.error("the manager, process %d, %s", self._child.pid, end)
            config = dataclasses.replace(
                self._config, predecessor_end=end, predecessor_ended_at=ended_at
            )
            if not self._start_another(config, ends):
                log.error("the manager: %s", TOO_MANY_STARTS)
                self._on_over(TOO_MANY_STARTS)
                self._why_over = TOO_MANY_STARTS
                return

    def _start_another(self, config: ManagerConfig, ends: collections.deque[float]) -> bool:
        """Start another manager with ``config``; returns False if too many were started."""
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            now = time.monotonic()
            if len(ends) == MAX_STARTS and now - ends[0] < STARTS_WINDOW_S:
                return False
            ends.append(now)
            try:
                config = dataclasses.replace(config, resumed=self._resumed())
                limit_s = PREPARED_TIMEOUT_S if self._next.is_there else self._timeout_s
                child = ManagerProcess.start(config, min(limit_s, self._timeout_s), self._next)
                self._next_at = now
            except (TorchFTError, OSError) as error:
                log.error("no other manager: %s", error)
                pause_s = max(FIRST_PAUSE_S, 2 * pause_s)
                continue
            self._replace_child(child)
            return True
        return True

    def _prepare_next(self) -> None:
        """Start a process that waits for its settings, once the group is in a term."""
        is_needed = self._config.group_world_size > 1 and not self._closing.is_set()
        now = time.monotonic()
        if not is_needed or now < self._next_at or self._resumed() is None or self._next.is_there:
            return
        self._next_at = now + STARTS_WINDOW_S / MAX_STARTS
        try:
            self._next.start(self._config.security)
        except OSError as error:
            log.info("another manager would have to do its imports first: %s", error)

    def _replace_child(self, child: ManagerProcess) -> None:
        with self._lock:
            self._child = child
            is_late = self._closing.is_set()
        if is_late:
            child.close()
            return
        self._on_move(child.address)
        self._address = child.address
        log.warning("another manager at %s, process %d", child.address, child.pid)
