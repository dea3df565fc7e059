"""Runs the demo: starts the groups, has them killed, restarts them, and knows when it is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tools.demo.board import Board
from tools.demo.chaos import draw_kills
from tools.demo.cluster import Cluster, ClusterError
from tools.demo.events import Event, Exited
from tools.demo.killer import Killer
from tools.demo.promises import Run
from tools.demo.screen import Screen

_LOOK_EVERY_S = 0.02
# While a kill is armed: a phase may take a few milliseconds only.
_LOOK_CLOSELY_EVERY_S = 0.001
# So long may pass without any commit, the start of all processes included, before the run fails.
_MAX_SILENCE_S = 120.0
# On a machine that is busy with other work; who does not leave is reported.
_LEAVE_GRACE_S = 30.0
# After Ctrl-C everything is gone within two seconds.
_AT_ONCE_GRACE_S = 1.2
# A kill in the last seconds could not heal before the run is to end.
_LAST_HEAL_S = 10.0
# All groups train for so long before the run may end.
_CALM_END_S = 2.0


class RunFailed(Exception):
    """The run cannot go on; the sentence says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What is to happen: the run ends after ``seconds``, or at ``steps`` commits, and all kills.

    Of its ``num_kills`` those above ``min_kills`` are left out if a slow machine has no time left.
    """

    num_groups: int
    seconds: float | None
    steps: int | None
    num_kills: int
    min_kills: int
    kill_interval_s: float
    seed: int
    max_stall_s: float


@dataclass(slots=True)
class Director:
    """Carries a script out on a cluster; ``run`` is called once."""

    script: Script
    cluster: Cluster
    screen: Screen
    _board: Board = field(init=False)
    _killer: Killer = field(init=False)
    _history: list[Event] = field(default_factory=list)
    _began_at: float = 0.0
    _last_restart_at: float = 0.0
    _well_since: float | None = None

    def __post_init__(self) -> None:
        script = self.script
        self._board = Board(script.num_groups)
        orders = draw_kills(script.seed, script.num_groups, script.kill_interval_s)
        self._killer = Killer(orders, script.num_kills)

    def run(self) -> Run:
        """Everything from the first process to the last; failures are in the result."""
        self._began_at = time.monotonic()
        failure, interrupted = "", False
        with _sigterm_as_interrupt(), self.screen:
            try:
                self._start()
                while not self._is_over():
                    self._tick()
            except KeyboardInterrupt:
                interrupted = True
            except (ClusterError, RunFailed) as error:
                failure = str(error)
            leftovers = self._wind_down(at_once=interrupted or bool(failure))
        return Run(
            num_groups=self.script.num_groups,
            events=sorted(self._history, key=lambda event: event.at),
            num_kills_planned=self.script.min_kills,
            max_stall_s=self.script.max_stall_s,
            leftovers=leftovers,
            interrupted=interrupted,
            failure=failure,
        )

    def _start(self) -> None:
        address = self.cluster.start_lighthouse()
        self.screen.show_event(self._elapsed_s(), f"lighthouse listens on {address}")
        for group in range(self.script.num_groups):
            self.cluster.start_group(group)

    def _tick(self) -> None:
        self._take_events()
        seconds = self.script.seconds
        if seconds is not None and self._elapsed_s() > seconds - _LAST_HEAL_S:
            self._killer.stop_after(self.script.min_kills)
        order = self._killer.order_due(time.monotonic(), self._board)
        if order is not None:
            self.cluster.kill(order.group, whole_group=order.whole_group)
            self._take_events()  # the board must know before anyone asks whether all are well
        self.screen.show(self._elapsed_s(), self._board)
        time.sleep(_LOOK_CLOSELY_EVERY_S if self._killer.armed else _LOOK_EVERY_S)

    def _take_events(self, *, restart: bool = True) -> None:
        for event in self.cluster.read_events():
            self._history.append(event)
            sentence = self._board.apply(event)
            if sentence:
                self.screen.show_event(self._elapsed_s(), f"group {event.group} {sentence}")
            if isinstance(event, Exited) and restart:
                self._restart(event)

    def _restart(self, event: Exited) -> None:
        if self._board.groups[event.group].state != "killed":
            words = self.cluster.last_words_of(event)
            raise RunFailed(
                f"group {event.group} ended by itself with status {event.status}: {words}"
            )
        self.cluster.start_group(event.group)
        self._last_restart_at = time.monotonic()

    def _is_over(self) -> bool:
        now = time.monotonic()
        if now - max(self._began_at, self._board.last_commit_at) > _MAX_SILENCE_S:
            raise RunFailed(f"no group committed anything for {_MAX_SILENCE_S:.0f} s")
        if now - max(self._began_at, self._last_restart_at) > _MAX_SILENCE_S:
            self._require_all_training()
        script = self.script
        time_is_up = script.seconds is not None and now - self._began_at >= script.seconds
        steps_are_done = script.steps is not None and self._board.top_step >= script.steps
        calm = self._is_calm(now)  # asked every time, because it measures since when
        return (time_is_up or steps_are_done) and self._killer.done and calm

    def _is_calm(self, now: float) -> bool:
        """Whether all groups have trained for a while."""
        if not self._board.all_training:
            self._well_since = None
        elif self._well_since is None:
            self._well_since = now
        return self._well_since is not None and now - self._well_since >= _CALM_END_S

    def _require_all_training(self) -> None:
        for status in self._board.groups:
            if status.state != "training":
                raise RunFailed(
                    f"group {status.group} is still {status.state} after {_MAX_SILENCE_S:.0f} s"
                )

    def _wind_down(self, *, at_once: bool) -> list[str]:
        """Let all leave, and name what was left over, and who did not leave when there was time.

        ``at_once`` breaks their step off: a group that is still on its way in would otherwise begin
        to train, alone and from nothing, as the others leave.
        """
        with _deaf_to_interrupts():
            self.cluster.ask_to_leave(at_once=at_once)
            deadline = time.monotonic() + (_AT_ONCE_GRACE_S if at_once else _LEAVE_GRACE_S)
            while self.cluster.num_running and time.monotonic() < deadline:
                self._take_events(restart=False)
                self.screen.show(self._elapsed_s(), self._board)
                time.sleep(_LOOK_EVERY_S)
            forced = self.cluster.stop(grace_s=0.0)
            left = self.cluster.end_leftovers()
            self._take_events(restart=False)
        late = [] if at_once else [f"{name} did not end when asked to" for name in forced]
        return late + left

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_at


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does, report included."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """The way out is short and has deadlines; a second Ctrl-C must not leave processes behind."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
