"""Checks what holders keep, and which copies workers begin from (rules B1 to B6)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.sim.invariants import SLACK_S, must
from tools.sim.offers import Fetched
from tools.sim.world import Process, VirtualWorld
from torchft_svc.core.quorum.lighthouse.copies import ALL_REPORTED_S, SILENT_S, HeldCopy
from torchft_svc.core.quorum.lighthouse.holder_plan import BEHIND_S

# By then all lighthouses know what a holder holds, and again after it was in trouble.
KNOWN_S, SETTLED_S = ALL_REPORTED_S + SLACK_S, 2 * SILENT_S
# A copy that takes little time is fetched within this time after its step, and then reported. The
# workers of a group of several wait for a step that they all copy.
FETCHED_S, ALL_FETCHED_S = 5.0, 30.0
# Longer than any step: a job that has committed since then goes on.
GOES_ON_S = 3.0
MAX_REMEMBERED = 4096
MAX_COPIES_PER_WORKER = 2

Origin = tuple[int, int]  # step of a copy, and the quorum in which it was committed


@dataclass(slots=True)
class _Held:
    """What one life of a holder holds, and since when."""

    process: Process
    copies: dict[HeldCopy, float] = field(default_factory=dict)


@dataclass(slots=True)
class CopyChecks:
    """Keeps its own record of commits and copies over one run.

    ``copy_every``: so many steps are copied; ``group_world_size``: the workers of each group;
    ``is_quick``: copies take little time.
    """

    world: VirtualWorld
    copy_every: int
    group_world_size: int
    is_quick: bool = True
    num_begun: int = 0  # workers that began from a copy
    _held: dict[str, dict[str, _Held]] = field(default_factory=dict)  # by job and holder
    _troubled_until: dict[str, float] = field(default_factory=dict)  # by holder
    _lighthouse_until: float = -math.inf
    _stopped_until: float = -math.inf  # a lighthouse that stands still
    _first_trouble_at: float = math.inf
    _states: dict[tuple[str, int, int], set[int]] = field(default_factory=dict)
    _steps: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # commits of a job
    _due: dict[str, int] = field(default_factory=dict)  # the step that a copy has at least
    _best: dict[str, int] = field(default_factory=dict)  # by job, the newest step that was whole
    _origins: dict[str, tuple[str, Origin]] = field(default_factory=dict)  # by group, of one life
    _outdated_since: dict[str, float] = field(default_factory=dict)  # by holder

    # -- what happens ----------------------------------------------------------------------------

    def holds(self, job: str, holder: Process, copies: Iterable[HeldCopy]) -> None:
        """Record what a holder holds from now on."""
        held = self._held.setdefault(job, {}).setdefault(holder.name, _Held(holder))
        held.copies = {each: held.copies.get(each, self.world.now) for each in copies}
        most = max(Counter(each.group_rank for each in held.copies).values(), default=0)
        is_bounded = most <= MAX_COPIES_PER_WORKER
        must(is_bounded, "B4", f"{holder.name} holds {most} copies of one worker")

    def committed(self, job: str, state: Fetched) -> None:
        """A worker has committed a step, after which it has ``state``."""
        step = state.state.step
        states = self._states.setdefault((job, step, state.quorum_id), set())
        states.add(state.state.weights)
        if len(self._states) > MAX_REMEMBERED:
            del self._states[next(iter(self._states))]
        steps = self._steps.setdefault(job, [])
        if not steps or steps[-1][1] != step:
            if steps and step < steps[-1][1]:
                self._best.pop(job, None)  # the job has been taken back, and its copies are freed
            steps.append((self.world.now, step))

    def trouble(self, holder: str, seconds: float) -> None:
        """Something happens to a holder."""
        until = max(self._troubled_until.get(holder, -math.inf), self.world.now + seconds)
        self._troubled_until[holder] = until
        self._best.clear()

    def trouble_lighthouse(self, seconds: float, *, is_stopped: bool) -> None:
        """Something happens to a lighthouse, which may stand still meanwhile."""
        until = self.world.now + seconds
        self._lighthouse_until = max(self._lighthouse_until, until)
        if is_stopped:
            self._stopped_until = max(self._stopped_until, until)

    def record_fault(self, *, loses_all: bool) -> None:
        """A fault happens: if it is the first one, and all groups are lost by it, copies of the
        steps before are there, where these take little time."""
        is_first = self._first_trouble_at == math.inf
        self._first_trouble_at = min(self._first_trouble_at, self.world.now)
        self._due.clear()
        if is_first and loses_all and self.is_quick:
            fetched_s = FETCHED_S if self.group_world_size == 1 else ALL_FETCHED_S
            for job, steps in self._steps.items():
                before = [step for at, step in steps if at < self.world.now - fetched_s]
                copied = [step for step in before if step % self.copy_every == 0]
                since_s = self.world.now - steps[0][0]
                if copied and since_s > SETTLED_S:
                    self._due[job] = copied[-1]

    # -- what must hold --------------------------------------------------------------------------

    def begins(
        self, job: str, group: str, worker: Process, state: Fetched, living: Iterable[str]
    ) -> None:
        """A worker begins from a copy; ``living`` groups have a state, and were well lately."""
        self.num_begun += 1
        step = state.state.step
        known = self._states.get((job, step, state.quorum_id), set())
        must(state.state.weights in known, "B3", f"{group} begins from a state that nobody had")
        must(step % self.copy_every == 0, "B3", f"{group} begins from a copy of step {step}")
        others = sorted(living)
        must(not others, "B5", f"{group} begins from a copy, and {others} have a state")
        is_calm = self._lighthouse_until + SETTLED_S < self.world.now
        newest = self._newest_whole(job, self.world.now) if is_calm else 0
        must(step >= newest, "B5", f"{group} begins at step {step}, and a copy of {newest} is held")
        best = self._best.get(job, 0) if is_calm else 0
        must(step >= best, "B4", f"{group} begins at step {step}, and {best} was whole before")
        due = self._due.get(job, 0)
        must(step >= due, "B5", f"{group} begins at step {step}, and {due} should have been copied")
        if is_calm:
            self._check_origin(job, group, worker, (step, state.quorum_id))

    def _check_origin(self, job: str, group: str, worker: Process, origin: Origin) -> None:
        """The workers of a group that start together begin from one state, if nothing happens to
        holders meanwhile."""
        life, last_at = worker.name.rpartition(".")[2], self._steps[job][-1][0]
        known_life, other = self._origins.get(group, ("", origin))
        is_settled = all(self._is_well(each.process) for each in self._held[job].values())
        is_settled &= last_at < self.world.now - KNOWN_S
        is_one = known_life != life or other == origin or not is_settled
        must(is_one, "B4", f"{group} begins from copies of {origin} and {other}")
        if is_settled:
            self._origins[group] = life, origin

    def begins_anew(self, job: str, group: str, began_at: float) -> None:
        """A group has committed the first step of a job, which has begun then (rule B5)."""
        if self._stopped_until + SETTLED_S < began_at:
            newest = self._newest_whole(job, began_at)
            must(not newest, "B5", f"{group} begins anew, and a copy of {newest} is held")

    def _newest_whole(self, job: str, now: float) -> int:
        """The newest step of which there are copies of all workers, in holders that were well."""
        ranks: dict[tuple[int, int, int], set[int]] = {}
        for held in self._held.get(job, {}).values():
            if self._is_well(held.process):
                for copy, since in held.copies.items():
                    if since < now - KNOWN_S:
                        ranks.setdefault(copy.state_key, set()).add(copy.group_rank)
        return max(
            (place[0] for place, found in ranks.items() if len(found) == place[2]), default=0
        )

    def check(self) -> None:
        """Copies of a history that the job has left are freed (rule B6)."""
        now = self.world.now
        for job, holders in self._held.items():
            at, step = (self._steps.get(job) or [(-math.inf, 0)])[-1]
            newest = self._newest_whole(job, now)
            if newest <= step:
                self._best[job] = max(newest, self._best.get(job, 0))
            goes_on = now - at < GOES_ON_S and self._lighthouse_until + SETTLED_S < now
            for name, held in holders.items():
                newest = max((each.step for each in held.copies), default=0)
                if not (goes_on and newest > step + 1 and self._is_well(held.process)):
                    self._outdated_since.pop(name, None)
                    continue
                since = self._outdated_since.setdefault(name, now)
                what = f"{name} holds a copy of step {newest}, and {job} goes on from {step}"
                must(now - since < BEHIND_S + KNOWN_S, "B6", what)

    def check_freed(self, job: str) -> None:
        """The job has finished a while ago."""
        for name, held in self._held.get(job, {}).items():
            is_free = not held.copies or not self._is_well(held.process)
            must(is_free, "B6", f"{name} holds copies of {job}, which has finished")

    def _is_well(self, holder: Process) -> bool:
        until = self._troubled_until.get(holder.name.partition(".")[0], -math.inf)
        return not (holder.is_dead or holder.is_frozen) and until + SETTLED_S < self.world.now
