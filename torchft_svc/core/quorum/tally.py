"""What only workers and managers know about a job's time and faults, as the lighthouse receives it.

A `Tally` travels with reports that exist anyway. A `GroupEvent` is rare; who reports it repeats its
last ones when a stream is opened again, and numbers them, so that the lighthouse counts each once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from torchft_svc.core.limits import MAX_NAME_LENGTH, MAX_REASON_LENGTH, check_name, check_text
from torchft_svc.core.quorum.types import check_count, check_quorum_id, check_step
from torchft_svc.errors import RequestRefused

# How many events who reports them keeps to repeat, and how many a heartbeat holds.
MAX_EVENTS_KEPT, MAX_EVENTS_SENT = 8, 32
# Names in one event.
MAX_LOST_NAMED = 16
# A hundred years: their sums are still numbers, which JSON can hold.
MAX_SECONDS = 3e9
# Of a group among a million, of which one may be dealt nearly all.
LEAST_LOAD, MOST_LOAD = 1e-6, 1e6


def _check_seconds(field: str, value: float) -> None:
    if not 0 <= value <= MAX_SECONDS:
        raise RequestRefused(f"{field} is {value}, must be from 0 to {MAX_SECONDS:.0f} seconds")


#: The phases of a step's own work, in their order.
STEP_PHASES = ("training", "updating", "between")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that a worker's own work takes in a step: means over the last seconds.

    ``training_s``: from the beginning of a step to its vote; ``updating_s``: from there to the end
    of the update; ``between_s``: until the next step begins. None of them contains ``waiting_s``,
    in which the worker waits for others: for the quorum, for sums and for votes. ``num_steps``: how
    many steps of its process have gone into this. ``group_rank``: of the worker. ``load``: samples
    of a step that its group was dealt, relative to an even share (0: not known).
    """

    training_s: float
    updating_s: float
    between_s: float
    waiting_s: float
    num_steps: int
    group_rank: int = 0
    load: float = 0.0

    @property
    def own_s(self) -> float:
        """The worker's own work in a step."""
        return self.training_s + self.updating_s + self.between_s

    def at_load(self, load: float) -> StepTimes:
        """These times if the group had been dealt ``load``, of which training is a multiple; the
        same ones if one of both loads is not known."""
        if not (self.load and load) or load == self.load:
            return self
        return replace(self, training_s=self.training_s * (load / self.load), load=load)

    @property
    def step_s(self) -> float:
        """A whole step."""
        return self.own_s + self.waiting_s

    def of_phase(self, phase: str) -> float:
        """The seconds of one of `STEP_PHASES`."""
        seconds: float = getattr(self, f"{phase}_s")
        return seconds

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        for field in ("training_s", "updating_s", "between_s", "waiting_s"):
            _check_seconds(field, getattr(self, field))
        check_count("num_steps", self.num_steps)
        check_count("group_rank", self.group_rank)
        if self.load and not LEAST_LOAD <= self.load <= MOST_LOAD:
            raise RequestRefused(
                f"load is {self.load}, must be 0 or from {LEAST_LOAD:g} to {MOST_LOAD:g}"
            )


@dataclass(frozen=True, slots=True)
class Tally:
    """Seconds of a worker's training thread since its first question, up to the end of its last
    step, ``ago_s`` before this is sent.

    ``committed_s`` and ``discarded_s``: of steps with that outcome, without what the thread stood
    still for: ``waiting_s`` for the quorum, or for a group that was lost; ``reconfiguring_s`` while
    the process group was rebuilt; ``healing_s`` while a state was fetched. ``away_s``: of the wait,
    how long no lighthouse could be reached, as the manager knows. ``step_times``: of this worker;
    a manager sends those of its slowest worker (None: not known).
    """

    committed_s: float = 0.0
    discarded_s: float = 0.0
    waiting_s: float = 0.0
    reconfiguring_s: float = 0.0
    healing_s: float = 0.0
    away_s: float = 0.0
    num_committed: int = 0
    num_discarded: int = 0
    ago_s: float = 0.0
    step_times: StepTimes | None = None

    @property
    def total_s(self) -> float:
        """The time that this accounts for."""
        return (
            self.committed_s
            + self.discarded_s
            + self.waiting_s
            + self.reconfiguring_s
            + self.healing_s
        )

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        fields = ("committed_s", "discarded_s", "waiting_s", "reconfiguring_s", "healing_s")
        seconds = [getattr(self, field) for field in (*fields, "away_s", "ago_s")]
        if not (min(seconds) >= 0 and sum(seconds) <= MAX_SECONDS):  # checked with each beat
            for field, value in zip((*fields, "away_s", "ago_s"), seconds, strict=True):
                _check_seconds(field, value)
        check_count("num_committed", self.num_committed)
        check_count("num_discarded", self.num_discarded)


NO_TALLY = Tally()


class EventKind(enum.Enum):
    """What a group reports of itself."""

    DISCARDED = "it has discarded a step"
    HEAL_FAILED = "it has discarded a step in which it was to heal"
    RECOVERED = "it has committed its first step in another quorum"
    MANAGER_DIED = "its manager has died, and was started again"
    LIGHTHOUSE_AWAY = "it could reach no lighthouse, and can again"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent:
    """An event of a group, ``ago_s`` before this is sent.

    ``source`` is who reports it, new at every start of a process; its events have growing numbers.
    ``quorum_id`` and ``step``: in which it happened. ``cause``: a sentence; ``is_own``: the group
    itself is the cause, and not another one; ``lost``: the members of the quorum that were gone.
    ``lasts_s``: of the discarded step, or the absence. ``paused_s``, ``reconfigured_s``,
    ``healed_s`` and ``healed_bytes``: see `Incident`, of this group's way to the commit.
    """

    kind: EventKind
    source: str = ""
    number: int = 0
    ago_s: float = 0.0
    quorum_id: int = 0
    step: int = 0
    cause: str = ""
    is_own: bool = False
    lost: tuple[str, ...] = ()
    lasts_s: float = 0.0
    paused_s: float | None = None
    reconfigured_s: float | None = None
    healed_s: float | None = None
    healed_bytes: int | None = None

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        check_name("source", self.source)
        check_count("number", self.number)
        check_quorum_id("quorum_id", self.quorum_id)
        check_step(self.step)
        check_text("cause", self.cause, MAX_REASON_LENGTH)
        for replica_id in self.lost[:MAX_LOST_NAMED]:
            check_text("lost", replica_id, MAX_NAME_LENGTH)
        _check_seconds("ago_s", self.ago_s)
        _check_seconds("lasts_s", self.lasts_s)
        for field in ("paused_s", "reconfigured_s", "healed_s"):
            _check_seconds(field, getattr(self, field) or 0.0)
        check_count("healed_bytes", self.healed_bytes or 0)
