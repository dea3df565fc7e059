"""Drives an agent's decisions: workers, channels, stores and the lighthouse on one thread.

`AgentMachine` decides. This executes its orders, and passes on what happens: the end of a process
(its descriptor), a worker's message (its channel), news of the lighthouse (another thread, which
wakes this one), a signal, and the time.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from torchft_svc import env
from torchft_svc.core.launch.agent import (
    AgentMachine,
    Broadcast,
    End,
    OrderQueue,
    Outcome,
    ReplaceWorkers,
    StartWorkers,
    StopWorkers,
)
from torchft_svc.core.launch.agent_link import LinkNews, LinkTrouble
from torchft_svc.core.launch.stopped_workers import StoppedWorkers
from torchft_svc.core.launch.worker_events import WorkerState
from torchft_svc.core.launch.world import (
    AgentLeave,
    AgentState,
    AgentWelcome,
    RunMove,
    WarmUp,
    World,
    WorldNews,
    WorldReached,
)
from torchft_svc.elastic.health import NodeHealth
from torchft_svc.elastic.local_group import LocalGroup
from torchft_svc.elastic.messages import WorkerAck, WorkerMessage, WorkerStarted
from torchft_svc.elastic.progress import WorkerProgress, usable_s
from torchft_svc.elastic.rendezvous.handler import RunGivenUp
from torchft_svc.elastic.rendezvous.polled import MeetingFailed, PolledNews, WorldOver
from torchft_svc.errors import ConfigError, HealthCheckFailed, Unauthorized
from torchft_svc.host.address import LOOPBACK

log = logging.getLogger(__name__)

# A broken process group is mostly a lost node, which the lighthouse reports sooner. If it does not,
# only a new world helps the workers that have left.
LEFT_GRACE_S = 1.0
# Stores of worlds that workers may still use, and the one for the next world.
NUM_STORES = 3
_DEATH_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

News = LinkNews | PolledNews


class Meeting(Protocol):
    """The meeting place of agents: `RendezvousLink`, or `PolledMeeting`."""

    def send_state(self, state: AgentState) -> None:
        """Send ``state``, which replaces the one before; returns at once."""

    def send_leave(self, leave: AgentLeave) -> None:
        """Send that this node is gone for good; never raises."""

    def close(self) -> None:
        """End the news."""


class AgentDriver:
    """One run of an agent; to be used once, on one thread.

    Args:
        machine: decides.
        group: the local workers.
        meet: connects to the other agents; calls its argument with news, on any thread.
        grace_s: how long workers may take to end after the signal, before SIGKILL.
        progress: what the workers record.
        health: checks the machine before failed workers are started again.
        connect_timeout_s: how long there may be no connection to the others in the beginning.
        stopped_timeout_s: how long a worker may be stopped (0: for ever).
    """

    def __init__(
        self,
        machine: AgentMachine,
        group: LocalGroup,
        meet: Callable[[Callable[[News], None]], Meeting],
        grace_s: float,
        progress: WorkerProgress,
        health: NodeHealth,
        connect_timeout_s: float,
        stopped_timeout_s: float,
    ) -> None:
        self._machine = machine
        self._group = group
        self._meet = meet
        self._grace_s = grace_s
        self._signal_grace_s = env.Environment().grace_s
        self._progress = progress
        self._health = health
        self._connect_timeout_s = connect_timeout_s
        self._stopped = StoppedWorkers(stopped_timeout_s, time.monotonic())
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._stores: deque[TCPStore] = deque(maxlen=NUM_STORES)
        self._queue = OrderQueue(self)
        self._is_welcome = False
        self._trouble = "nobody answers"
        self._began_at = 0.0
        #: Round of the world that workers have left, and when to ask for another one.
        self._left: tuple[int, float] | None = None
        self._death: signal.Signals | None = None
        self._is_hurried = False  # a second signal has come
        self._error: Exception | None = None  # to be raised instead of a result
        self._end: End | None = None

    def run(self, signals: str = _DEATH_SIGNALS) -> End:
        """Run until the workers have ended, and return how.

        Raises:
            SignalException: one of the ``signals`` has come, and the workers were ended.
            RendezvousError: there is no world for this node.
            RendezvousGracefulExitError: an operator wants it to end, and its workers have.
        """
        self._began_at = time.monotonic()
        with contextlib.ExitStack() as open_things:
            open_things.callback(self._close_pipe)
            open_things.enter_context(self._handling(signals))
            open_things.callback(self._group.close)
            self._meeting = self._meet(self.receive_news)
            open_things.callback(self._meeting.close)
            self._queue.execute(self._machine.started(time.monotonic()))
            while self._end is None:
                self._wait()
                self._handle_events()
        return self._outcome(self._end)

    def receive_news(self, news: News) -> None:
        """Queue ``news`` for the thread of `run`; may be called on any thread."""
        self._news.put(news)
        self._wake_up()

    # -- what happens ------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for an event or a deadline."""
        deadlines = (
            self._machine.next_deadline(),
            self._group.deadline,
            self._stopped.look_at if self._group.processes.pids else None,
            None if self._left is None else self._left[1],
            None if self._is_welcome else self._began_at + self._connect_timeout_s,
        )
        now = time.monotonic()
        waits_s = [max(0.0, each - now) for each in deadlines if each is not None]
        if self._group.poll_s is not None:
            waits_s.append(self._group.poll_s)
        watched = [self._wakes, *self._group.descriptors]
        multiprocessing.connection.wait(watched, min(waits_s, default=None))

    def _handle_events(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if multiprocessing.connection.wait([self._wakes], 0):
                os.read(self._wakes, 4096)
        if self._death is not None and self._error is None:
            text = f"Process {os.getpid()} got signal: {self._death}"
            self._end_with_error(
                SignalException(text, self._death), f"it received {self._death.name}"
            )
        if self._is_hurried:
            self._group.stop_at_once()
        while not self._news.empty():
            self._accept_news(self._news.get())
        self._handle_workers()
        now = time.monotonic()
        self._replace_left_world(now)
        self._kill_stopped_workers(now)
        if not self._is_welcome and now - self._began_at > self._connect_timeout_s:
            text = f"no lighthouse within {self._connect_timeout_s:g} s: {self._trouble}"
            self._end_with_error(RendezvousConnectionError(text), text)
        deadline = self._machine.next_deadline()
        if deadline is not None and now >= deadline:
            self._queue.execute(self._machine.tick(now))

    def _accept_news(self, news: News) -> None:
        now = time.monotonic()
        if isinstance(news, LinkTrouble):
            self._trouble = str(news.error)
            if news.is_final:
                text = f"the lighthouse refuses this node: {news.error}"
                unknown = isinstance(news.error, Unauthorized)
                kind = RendezvousConnectionError if unknown else RendezvousStateError
                self._end_with_error(kind(text), text)
        elif isinstance(news, MeetingFailed):
            self._end_with_error(news.error, str(news.error))
        elif isinstance(news, WorldOver):
            self._queue.execute(self._machine.world_over(now))
        else:
            self._is_welcome = True
            _log_news(news)
            self._queue.execute(self._machine.news_received(news, now))

    def _handle_workers(self) -> None:
        messages = list(self._group.receive())
        for rank, message in messages:
            self._record_message(rank, message)
        if messages:
            self._report_progress()
        self._check_channels()
        was_stopping = self._group.is_stopping
        ends = self._group.reap()
        now = time.monotonic()
        if was_stopping:
            if not self._group.is_stopping:
                self._queue.execute(self._machine.workers_stopped(now))
            return
        failed = [end for end in ends if end.failure is not None]
        if failed:
            shown = ", ".join(f"{end.local_rank} (exit code {end.exit_code})" for end in failed)
            self._health.record_failure()
            self._queue.execute(
                self._machine.workers_failed(
                    f"worker {shown} failed",
                    [end.local_rank for end in failed],
                    now,
                    self._progress.step,
                    is_final=any(end.exit_code == self._progress.final_code for end in failed),
                )
            )
        elif ends and self._group.has_finished:
            self._queue.execute(self._machine.workers_succeeded(now))
        elif ends:  # the others may have been waiting for them
            self._report_progress()

    def _record_message(self, rank: int, message: WorkerMessage) -> None:
        if isinstance(message, WorkerStarted):
            self._group.note_started(rank)
        elif isinstance(message, WorkerAck):
            if message.worker_state is WorkerState.HEALTHY:
                self._group.note_reached(rank, message.round)
        elif self._left is None or self._left[0] < message.round:
            self._left = message.round, time.monotonic() + LEFT_GRACE_S

    def _report_progress(self) -> None:
        now = time.monotonic()
        if self._group.have_started:
            self._queue.execute(self._machine.workers_ready(now))
        if self._group.reached_round:
            self._queue.execute(self._machine.workers_reached(self._group.reached_round, now))

    def _replace_left_world(self, now: float) -> None:
        """Ask for another world if workers have left the present one, and no loss explains it."""
        if self._left is None or now < self._left[1]:
            return
        round_, _ = self._left
        self._left = None
        world = self._machine.world
        if world is not None and world.round == round_:
            orders = self._machine.world_over(now)
            if orders:  # else a failure of a worker leads to another world already
                log.info("workers have left the world of round %d, ask for another one", round_)
            self._queue.execute(orders)

    def _kill_stopped_workers(self, now: float) -> None:
        """Kill workers that do not run: the others of their world would wait for them."""
        if now < self._stopped.look_at or self._group.is_stopping:
            return
        stopped = self._group.processes.stopped()
        overdue = self._stopped.overdue(stopped.values(), now)
        for rank, pid in stopped.items():
            if pid in overdue:
                log.error(
                    "worker %d (process %d) has been stopped for %g s, as by SIGSTOP: killing it "
                    "(--stopped-worker-timeout)",
                    *(rank, pid, self._stopped.timeout_s),
                )
                self._group.processes.kill(rank)

    def _end_with_error(self, error: Exception, reason: str) -> None:
        if self._error is None:
            self._error = error
            self._queue.execute(self._machine.stop_requested(reason, time.monotonic()))

    # -- orders ------------------------------------------------------------------------------------

    def send_state(self, state: AgentState) -> None:
        self._meeting.send_state(state)

    def send_leave(self, leave: AgentLeave) -> None:
        self._meeting.send_leave(leave)

    def open_store(self) -> None:
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        self._queue.execute(self._machine.store_opened(store.port, time.monotonic()))

    def start_workers(self, order: StartWorkers) -> None:
        state = WorkerState.PAUSED if order.is_expected else WorkerState.HEALTHY
        self._start(order, state, None)

    def replace_workers(self, order: ReplaceWorkers) -> None:
        self._start(order, WorkerState.PAUSED, order.local_ranks)

    def stop_workers(self, order: StopWorkers) -> None:
        log.info("ending the workers: %s", order.reason)
        number = self._death or signal.SIGTERM
        within_s = order.within_s
        if within_s is None and self._death is not None:
            within_s = self._signal_grace_s
        grace_s = self._grace_s if within_s is None else usable_s(within_s)
        self._progress.record_end(grace_s)
        self._group.begin_stop(number, grace_s, order.reason)
        self._wake_up()  # there may be none left to end

    def broadcast(self, order: Broadcast) -> None:
        self._group.broadcast(order.state, order.world, order.change)
        self._check_channels()

    def finish(self, end: End) -> None:
        self._end = end

    def _check_channels(self) -> None:
        if cut_off := self._group.cut_off:
            ranks = ", ".join(map(str, cut_off))
            reason = f"worker {ranks} cannot answer, or receive a world: its channel is gone"
            self._queue.execute(self._machine.workers_cut_off(reason, time.monotonic()))

    def _start(
        self,
        order: StartWorkers | ReplaceWorkers,
        state: WorkerState,
        local_ranks: tuple[int, ...] | None,
    ) -> None:
        try:
            self._health.check(lambda: self._death is not None)
        except (HealthCheckFailed, ConfigError) as error:
            self._end_with_error(error, str(error))
            return
        try:
            self._group.start(order.world, state, order.num_restarts, local_ranks)
        except OSError as error:
            log.exception("the workers could not be started")
            running = self._group.processes.pids
            chosen = range(self._group.num_workers) if local_ranks is None else local_ranks
            ranks = [rank for rank in chosen if rank not in running]
            reason = f"the workers could not be started: {error}"
            self._queue.execute(self._machine.workers_failed(reason, ranks, time.monotonic()))

    # -- the end -----------------------------------------------------------------------------------

    def _outcome(self, end: End) -> End:
        if self._error is not None:
            raise self._error
        if end.outcome is Outcome.RENDEZVOUS_FAILED:
            raise RendezvousTimeoutError(end.reason)
        if end.outcome is Outcome.RUN_CLOSED:
            kind = RunGivenUp if end.final else RendezvousClosedError
            raise kind(f"the run is over: {end.reason}")
        if end.outcome is Outcome.DRAINED:
            raise RendezvousGracefulExitError(end.reason)
        if end.outcome is Outcome.STOPPED:
            raise RendezvousError(end.reason)
        return end

    @contextlib.contextmanager
    def _handling(self, signals: str) -> Iterator[None]:
        """Record signals, which are handled between two inputs."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals are handled on the main thread only, and this is another one")
            yield
            return
        before = {}
        for name in filter(None, (each.strip() for each in signals.split(","))):
            number = getattr(signal, name, None)
            if not isinstance(number, signal.Signals):
                log.warning("there is no signal %s", name)
                continue
            before[number] = signal.signal(number, self._record_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _record_signal(self, number: int, _: object) -> None:
        self._is_hurried = self._death is not None
        self._death = signal.Signals(number)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake, b"!")

    def _close_pipe(self) -> None:
        for descriptor in (self._wakes, self._wake):
            os.close(descriptor)


def _log_news(news: WorldNews) -> None:
    if isinstance(news, World):
        where = f"{news.master_addr}:{news.master_port}"
        size = f"{len(news.nodes)} nodes, {news.world_size} workers"
        log.info("round %d: %s, rank 0 at %s", news.round, size, where)
    elif isinstance(news, WarmUp):
        log.info("a place is free: starting the workers for it")
    elif not isinstance(news, AgentWelcome | WorldReached | RunMove):
        log.info("%s", news.reason)
