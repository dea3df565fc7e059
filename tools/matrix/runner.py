"""Runs a program with real processes: starts its groups, brings back who is killed, ends them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tools.chaos.bounds import allowance_s
from tools.chaos.cluster import Lighthouse
from tools.chaos.fleet import Fleet
from tools.chaos.fork_server import worker_server
from tools.demo.events import Committed, Discarded, Event, Exited, Healed, Killed
from tools.matrix.program import Moment, Program
from tools.matrix.verdicts import Run

# Longer than any of it takes; far less than a trainer's timeouts, which nothing should wait for.
_JOIN_TIMEOUT_S = 3.0
_HEARTBEAT_TIMEOUT_S = 3.0
_STEP_S = 0.03
_LOOK_S = 0.05
# From the start to the last kill, from there until all train, from there to the last end.
_PART_S = 40.0
# So many steps all groups do together after everybody is back, and so many more to the end.
_TOGETHER = 4
_AHEAD = 15
# Commits that were just written, or are just being made, are read by then.
_SURELY_LOST_S = 3.0
# How often all events are gone through for a job that cannot go on.
_STUCK_LOOK_S = 0.5
# Steps that a worker discards without a commit in between; each takes a few hundredths of a second.
_TOO_MANY = 100


class ProgramRunner:
    """A lighthouse and a fork server for many programs, each a job; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._stack = ExitStack()

    def __enter__(self) -> ProgramRunner:
        with ExitStack() as stack:
            self._fork_server = stack.enter_context(worker_server("tools.matrix.trainer"))
            self._lighthouse = Lighthouse(
                self._folder,
                "lighthouse",
                f"--heartbeat-timeout-ms={_HEARTBEAT_TIMEOUT_S * 1000:.0f}",
                f"--join-timeout-ms={_JOIN_TIMEOUT_S * 1000:.0f}",
            )
            stack.callback(self._lighthouse.kill)
            self._lighthouse.start(wait=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, program: Program) -> Run:
        """The whole life of a program, to the end of its last process."""
        job = f"program-{program.seed}-{next(self._numbers)}"
        folder = self._folder / job
        folder.mkdir()
        settings = {
            "job": job,
            "seed": program.seed,
            "step_s": _STEP_S,
            "num_workers": program.num_workers,
            "program": program.encode(),
        }
        fleet = Fleet(self._fork_server, folder, self._lighthouse.address, settings)
        execution = _Execution(program, fleet)
        try:
            missed = execution.run()
            events = sorted(fleet.events, key=lambda event: event.at)
        finally:
            fleet.end()
        return Run(
            program=program,
            events=events,
            missed=missed,
            is_lost=execution.is_lost,
            words={worker.options.life: worker.output() for worker in fleet.lives},
        )


@dataclass(slots=True)
class _Execution:
    """One run of a program; `run` returns what did not happen in time, or nothing.

    ``is_lost``: the kills took all groups that had committed the newest step.
    """

    program: Program
    fleet: Fleet
    is_lost: bool = False
    _look_at: float = 0.0
    _lost_since: float | None = None
    _dead: set[int] = field(default_factory=set)  # groups that ended by themselves, with an error

    def run(self) -> str:
        groups = range(self.program.num_groups)
        for group in groups:
            self.fleet.start(group)
        for is_over, what in self._parts():
            if not self._wait(is_over):
                return what
            if self._dead or self.is_lost:
                return ""  # which says it all
        return ""

    def _parts(self) -> Iterator[tuple[Callable[[], bool], str]]:
        if self.program.is_refused:
            yield self._all_have_ended, "not all groups were refused"
            return
        if self.program.ends_with_heals:  # all have to begin with the weights of one of them
            yield self._all_but_one_have_ended, "not all groups that heal were refused"
            return
        yield self._kills_are_done, "the worker to be killed did not get so far"
        back_at = time.monotonic()
        yield lambda: self._all_commit(since=back_at), "not all groups trained together"
        last = max(each.step for each in self.fleet.events if isinstance(each, Committed)) + _AHEAD
        for worker in self.fleet.lives:
            if worker.is_running:
                worker.command(f"last {last}")
        yield self._all_have_ended, f"not all groups had ended after step {last}"

    def _wait(self, is_over: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + _PART_S + 10 * allowance_s()
        while not is_over() and not self._dead and not self.is_lost:
            if time.monotonic() > deadline:
                return False
            for event in self.fleet.read():
                if isinstance(event, Exited):
                    self._handle_end(event)
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _STUCK_LOOK_S
                if self._discards_for_ever():
                    return False
                self._look_for_loss()
            time.sleep(_LOOK_S)
        return True

    def _look_for_loss(self) -> None:
        """Whether no group that lives has the newest step: the job waits for an operator then."""
        commits = [each for each in self.fleet.events if isinstance(each, Committed)]
        newest = max((each.step for each in commits), default=0)
        holders = {
            each.life
            for each in self.fleet.events
            if isinstance(each, (Committed, Healed)) and each.step >= newest
        }
        living = {
            (worker.options.group, worker.options.incarnation)
            for worker in self.fleet.lives
            if worker.is_running
        }
        if not newest or holders & living:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = time.monotonic()
        elif living and time.monotonic() - self._lost_since > _SURELY_LOST_S:
            self.is_lost = True

    def _handle_end(self, end: Exited) -> None:
        """Start a group that lost one of its workers anew as a whole, as a launcher does."""
        workers = self.fleet.lives_of(end.group)
        if workers[0].options.incarnation != end.incarnation or end.status == 0:
            return
        kills = [each for each in self.fleet.of(end.group, Killed) if each.life == end.life]
        has_end = self.program.is_refused or self.program.ends_with_heals
        if not kills and not has_end:
            self._dead.add(end.group)
            return
        for worker in workers:
            if worker.is_running:
                self.fleet.kill(worker, with_manager=True)
        if not has_end:
            self.fleet.start(end.group)

    def _discards_for_ever(self) -> bool:
        """Whether errors had a worker discard its last so many steps: it will never commit any."""
        in_a_row: Counter[tuple[int, int, int]] = Counter()
        for event in self.fleet.events:
            life = (*event.life, event.worker)
            if isinstance(event, Discarded):
                in_a_row[life] += bool(event.reason)  # without one, others are waited for
            elif isinstance(event, (Committed, Exited)):
                in_a_row.pop(life, None)
        return any(number > _TOO_MANY for number in in_a_row.values())

    # -- what is waited for ----------------------------------------------------------------------

    def _kills_are_done(self) -> bool:
        """All but those of groups that serve a state, which another one may do."""
        killed = {(each.group, each.incarnation) for each in self.fleet.events if _is_kill(each)}
        sure = [kill for kill in self.program.kills if kill.moment is not Moment.SERVE]
        return all((kill.group, kill.life) in killed for kill in sure)

    def _all_commit(self, since: float) -> bool:
        """Whether every worker has committed some steps together with all others."""
        num_groups = self.program.num_groups
        for group in range(num_groups):
            for worker in self.fleet.lives_of(group):
                mine = [
                    each
                    for each in self.fleet.of(group, Committed, since=since)
                    if each.life == (group, worker.options.incarnation)
                    and each.worker == worker.options.worker
                    and len(each.members.split()) == num_groups
                ]
                if len(mine) < _TOGETHER:
                    return False
        return True

    def _all_but_one_have_ended(self) -> bool:
        return len({each.options.group for each in self.fleet.lives if each.is_running}) <= 1

    def _all_have_ended(self) -> bool:
        return not any(worker.is_running for worker in self.fleet.lives)


def _is_kill(event: Event) -> bool:
    return isinstance(event, Killed)
