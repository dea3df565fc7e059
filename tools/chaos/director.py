"""Injects the faults one after another and measures what each of them costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tools.chaos.actions import inject
from tools.chaos.bounds import LIGHTHOUSE_BACK_S, allowance_s, change_of_members_s
from tools.chaos.cluster import Cluster
from tools.chaos.faults import (
    ALONE,
    BOUNDS_S,
    ENDING,
    EVERYBODY,
    FOR_ALL,
    LIGHTHOUSE_START_S,
    Fault,
    Kind,
)
from tools.chaos.stretches import Reading
from tools.chaos.track import Place, Track
from tools.demo.events import Event, Exited
from torchft_svc.errors import TorchFTError

_LOOK_S = 0.005
_PROGRESS_EVERY_S = 3.0
# The start of everything, and the way back from any fault, on a machine that is busy.
MAX_RECOVERY_S = 60.0
LEAVE_S = 15.0


class RunFailed(Exception):
    """The run cannot go on; the sentence says why."""


@dataclass(slots=True)
class Incident:
    """A fault that could be felt from ``at`` on, and what it cost, in seconds.

    ``began_at``: when its injection began, which may hit other groups before ``at``.
    ``stall_s``: until all that have to had committed an update begun after it; ``back_s``: until
    the whole job had, with everybody in the quorum. ``allowed_s``: the bound, and what the machine,
    as busy as it was then, may add. ``is_unseen``: it happened before the lighthouse was back from
    an earlier fault, and knew all groups again.
    """

    number: int
    fault: Fault
    job: str
    at: float
    allowed_s: float
    stall_s: float | None = None
    back_s: float | None = None
    is_unseen: bool = False
    began_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_at = self.at

    def name(self) -> str:
        where = f"group {self.fault.group}"
        if self.fault.kind is Kind.LIGHTHOUSE_KILLED:
            where = f"lighthouse {self.fault.worker + 1}"
        if self.fault.kind is Kind.LIGHTHOUSES_AWAY:
            where = "all jobs"
        if self.fault.kind is Kind.LINES_CUT:
            where = f"job {self.job}"
        length = f" for {self.fault.length_s:g} s" if self.fault.length_s else ""
        return f"fault {self.number}: {self.fault.kind.value} ({where}){length}"


@dataclass(slots=True)
class Director:
    """``run`` is called once, and ends with the ``faults`` or after ``seconds``; ``say`` takes a
    sentence and the seconds since the beginning."""

    cluster: Cluster
    faults: Iterator[Fault]
    seconds: float
    say: Callable[[float, str], None]
    incidents: list[Incident] = field(default_factory=list)
    history: list[tuple[str, Event]] = field(default_factory=list)
    #: The goodput of each job, after each fault and before all end, as far as it could be read.
    readings: list[Reading] = field(default_factory=list)
    began_at: float = 0.0
    _track: Track = field(default_factory=Track)
    _later: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    _progress_at: float = 0.0
    _winding_down: bool = False
    _lighthouse_was_away: bool = False  # and maybe still is

    def run(self) -> None:
        """Run from the first commit of all to the last worker's end.

        Raises:
            RunFailed: a group died by itself, never recovered, or did not end when asked to.
        """
        self.began_at = time.monotonic()
        self._wait(lambda: self._all_back(self.began_at), "the start")
        self._read_goodputs("the start")
        for fault in self.faults:
            if time.monotonic() - self.began_at >= self.seconds:
                break
            self._one(fault)
        self._read_goodputs("the end")
        self._winding_down = True
        self.cluster.drain()
        self._wait(self.cluster.is_empty, "SIGTERM for all", LEAVE_S)

    def _one(self, fault: Fault) -> None:
        self._pause(fault.pause_s)
        job = self.cluster.job_of(fault.group)
        allowed_s = BOUNDS_S[fault.kind] + allowance_s()
        allowed_s += change_of_members_s(self.cluster.process_group)
        if fault.kind is Kind.STALE_SURVIVOR and self._is_lighthouse_away():
            # The others have to train on without a group that the lighthouse knows.
            self._pause(LIGHTHOUSE_START_S + LIGHTHOUSE_BACK_S)
        is_unseen = self._is_lighthouse_away()
        if is_unseen:  # who needs the lighthouse now waits until it is back
            allowed_s += LIGHTHOUSE_START_S + LIGHTHOUSE_BACK_S
        number = len(self.incidents) + 1
        now = time.monotonic()
        incident = Incident(number, fault, job, now, allowed_s, is_unseen=is_unseen)
        self._lighthouse_was_away = is_unseen or fault.kind in FOR_ALL
        self.incidents.append(incident)
        incident.at = inject(fault, self.cluster, self._after)
        self._wait(lambda: self._has_gone_on(incident), incident.name())
        self._wait(lambda: self._is_over(incident), incident.name())
        stall = f"{incident.stall_s:.2f}" if incident.stall_s is not None else "-"
        late = "" if (incident.stall_s or 0.0) <= allowed_s else f", ALLOWED {allowed_s:.2f} s"
        summary = f"{incident.name()}: {stall} s{late}, all back after {incident.back_s:.2f} s"
        self.say(self._elapsed_s(), summary)
        self._read_goodputs(incident.name())

    def _read_goodputs(self, fault: str) -> None:
        for job in self.cluster.jobs:
            goodput = self.cluster.goodput(job)
            if goodput is not None:
                self.readings.append(Reading(job, time.monotonic(), fault, goodput))

    def _is_lighthouse_away(self) -> bool:
        """Whether the lighthouse is not back from an earlier fault, or does not know all groups."""
        return self._lighthouse_was_away and not self.cluster.lighthouse_knows_all()

    def _has_gone_on(self, incident: Incident) -> bool:
        """Whether all that have to have committed again, and if so, when the last had."""
        fault = incident.fault
        exempt = set() if fault.kind in EVERYBODY else {fault.group}
        if fault.kind in ALONE:
            exempt = set(self.cluster.peers(fault.group))
        jobs = self.cluster.jobs if fault.kind in FOR_ALL else [incident.job]
        places = [place for job in jobs for place in self._places(job) if place[0] not in exempt]
        first = [self._track.first_after(place, incident.at) for place in places]
        if any(at is None for at in first):
            return False
        incident.stall_s = max((at for at in first if at is not None), default=incident.at)
        incident.stall_s -= incident.at
        return True

    def _is_over(self, incident: Incident) -> bool:
        """Whether what lasted is over, and everybody trains with everybody again."""
        since = incident.at + incident.fault.length_s
        if self._later or not self._all_back(since):
            return False
        if incident.fault.kind in ENDING and self._lives_before(incident):
            return False
        incident.back_s = time.monotonic() - incident.at
        return True

    def _lives_before(self, incident: Incident) -> bool:
        """Whether a life that was to end goes on, or its end has not been seen yet."""
        workers = self.cluster.workers(incident.fault.group)
        return any(worker.began_at < incident.at for worker in workers)

    def _all_back(self, since: float) -> bool:
        """Whether all workers have begun and committed after ``since``, in whole quorums."""
        for job, groups in self.cluster.jobs.items():
            for place in self._places(job):
                commit = self._track.fresh(place, since)
                if commit is None or commit.event.num_participants < len(groups):
                    return False
        return True

    def _places(self, job: str) -> list[Place]:
        sizes = self.cluster.sizes
        return [(group, rank) for group in self.cluster.jobs[job] for rank in range(sizes[group])]

    # -- time ------------------------------------------------------------------------------------

    def _after(self, delay_s: float, action: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + delay_s, action))

    def _pause(self, length_s: float) -> None:
        until = time.monotonic() + length_s
        while time.monotonic() < until:
            self._tick()

    def _wait(
        self, is_over: Callable[[], bool], what: str, within_s: float = MAX_RECOVERY_S
    ) -> None:
        deadline = time.monotonic() + within_s
        while not is_over():
            if time.monotonic() > deadline:
                what_is_missing = "had ended" if self._winding_down else "was back"
                raise RunFailed(f"not all workers {what_is_missing} {within_s:g} s after {what}")
            self._tick()

    def _tick(self) -> None:
        self._read_events()
        now = time.monotonic()
        due = [each for each in self._later if each[0] <= now]
        self._later = [each for each in self._later if each[0] > now]
        for _, action in due:
            try:
                action()
            except TorchFTError as error:
                raise RunFailed(f"an operator had nothing to do: {error}") from error
        if now - self._progress_at > _PROGRESS_EVERY_S:
            self._progress_at = now
            steps = (
                f"job {job} at step {self._track.top_step(groups)}"
                for job, groups in self.cluster.jobs.items()
            )
            self.say(self._elapsed_s(), f"{', '.join(steps)}, {len(self.incidents)} faults")
        time.sleep(_LOOK_S)

    def _read_events(self) -> None:
        new = list(self.cluster.events())
        self.history += new
        self._track.add(event for _, event in new)
        for _, event in new:
            if isinstance(event, Exited) and not self._winding_down:
                self._restart(event)

    def _restart(self, event: Exited) -> None:
        """A group without one of its workers is ended and started again, as a launcher would."""
        workers = self.cluster.workers(event.group)
        is_over = workers[0].options.incarnation != event.incarnation
        if is_over or event.group in self.cluster.gone:
            return
        if not event.expected and not any(worker.asked_to_end for worker in workers):
            said = workers[event.worker].output().strip()[-2000:]
            raise RunFailed(f"group {event.group} died, status {event.status}: {said}")
        fleet = self.cluster.fleet_of(event.group)
        if event.status == 0 and any(worker.is_running for worker in workers):
            return  # it was drained: the others end by themselves
        for worker in workers:
            if worker.is_running:
                fleet.kill(worker, with_manager=True)
        self.cluster.start(event.group)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.began_at
