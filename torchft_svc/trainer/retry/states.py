"""What a trainer's run, and each of its workers, may be doing: the literal table of phases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from torchft_svc.trainer.retry.orders import RetryRules


class RunPhase(Enum):
    """What a trainer is doing."""

    IDLE = "no command is carried out; workers may live"
    WAITING = "resources are looked for"
    FORMING = "workers start and join"
    TRAINING = "the command is carried out"
    ENDING = "all workers are ended"


class RunChange(Enum):
    """What may happen to a run."""

    BEGAN_NEW = "a command, and there are no workers"
    BEGAN_WHOLE = "a command for workers that are ready"
    BEGAN_BROKEN = "a command, and workers were lost meanwhile, or can be added"
    ENOUGH = "there are resources for enough workers"
    FORMED = "all workers have joined"
    BROKE = "a worker is lost, and the others cannot go on"
    GROWS = "resources for missing workers are there"
    ALL_ENDED = "all workers have ended"
    GAVE_UP = "the command cannot be carried out"
    DONE = "the command is carried out"


# What may happen when, and where it leads; nothing else can happen.
RUN_TRANSITIONS: dict[tuple[RunPhase, RunChange], RunPhase] = {
    (RunPhase.IDLE, RunChange.BEGAN_NEW): RunPhase.WAITING,
    (RunPhase.IDLE, RunChange.BEGAN_WHOLE): RunPhase.TRAINING,
    (RunPhase.IDLE, RunChange.BEGAN_BROKEN): RunPhase.ENDING,
    (RunPhase.WAITING, RunChange.ENOUGH): RunPhase.FORMING,
    (RunPhase.WAITING, RunChange.GAVE_UP): RunPhase.IDLE,
    (RunPhase.FORMING, RunChange.FORMED): RunPhase.TRAINING,
    (RunPhase.FORMING, RunChange.BROKE): RunPhase.ENDING,
    (RunPhase.TRAINING, RunChange.BROKE): RunPhase.ENDING,
    (RunPhase.TRAINING, RunChange.GROWS): RunPhase.ENDING,
    (RunPhase.TRAINING, RunChange.DONE): RunPhase.IDLE,
    (RunPhase.ENDING, RunChange.ALL_ENDED): RunPhase.WAITING,
    (RunPhase.ENDING, RunChange.GAVE_UP): RunPhase.IDLE,
}


class WorkerStage(Enum):
    """How far a worker is."""

    STARTING = auto()
    STARTED = auto()
    JOINING = auto()
    JOINED = auto()  # it has the state of its world, or gets it in its first step
    FAILED = auto()  # its program raised an error; it may still offer a state
    LEAVING = auto()  # told to end
    KILLED = auto()


_COUNT = (WorkerStage.STARTING, WorkerStage.STARTED, WorkerStage.JOINING, WorkerStage.JOINED)


@dataclass(slots=True)
class KnownWorker:
    """A worker, as the trainer knows it.

    Args:
        from_step: at which the others were when it joined them.
        has_state: it has the state of the last step; without, it gets it in its first one.
        has_command, is_done: it was told the present command, and has carried it out.
        behind_since: when another one had finished with a later step, which it cannot reach alone.
    """

    rank: int
    stage: WorkerStage
    heard_at: float
    stage_at: float
    step: int = 0
    from_step: int = 0
    has_state: bool = False
    has_command: bool = False
    is_done: bool = False
    has_offered: bool = False
    behind_since: float = math.inf

    @property
    def counts(self) -> bool:
        """Whether it trains, or is about to."""
        return self.stage in _COUNT

    def move(self, stage: WorkerStage, at: float) -> None:
        self.stage, self.stage_at = stage, at

    def silence(self, rules: RetryRules, at: float) -> str:
        """What `silent_at` means."""
        if self.stage is WorkerStage.STARTING:
            return f"worker {self.rank} did not start in {rules.start_timeout_s:.3g} s"
        if at >= self.behind_since + rules.heartbeat_timeout_s:
            return f"worker {self.rank} is at step {self.step}, and others have finished later ones"
        if at < self.heard_at + rules.heartbeat_timeout_s:
            return f"worker {self.rank} did not join the others in {rules.start_timeout_s:.3g} s"
        return f"worker {self.rank} was silent for {rules.heartbeat_timeout_s:.3g} s"

    def silent_at(self, rules: RetryRules) -> float:
        """When it has said nothing for too long."""
        if self.stage is WorkerStage.KILLED:
            return self.stage_at + rules.kill_timeout_s
        if self.stage is WorkerStage.STARTING:
            return self.stage_at + rules.start_timeout_s
        silent_at = min(self.heard_at, self.behind_since) + rules.heartbeat_timeout_s
        longest_s = rules.start_timeout_s if self.stage is WorkerStage.JOINING else math.inf
        return min(silent_at, self.stage_at + longest_s)
