"""What an agent does when the world changes or its workers fail: the literal table of policies."""

from __future__ import annotations

from enum import Enum


class RestartPolicy(Enum):
    """How a run goes on after a change.

    HARD: all workers are started anew, as torchrun does. SOFT: workers that live go on in process.
    SOFT_NO_REPLACE: the same, and a node whose worker fails leaves. SOFT_REPLACE: the same, and a
    node starts only its failed workers anew.
    """

    HARD = "hard"
    SOFT = "soft"
    SOFT_NO_REPLACE = "soft-no-replace"
    SOFT_REPLACE = "soft-replace"

    @property
    def is_soft(self) -> bool:
        return self is not RestartPolicy.HARD


class RunEvent(Enum):
    """What may happen to an agent and its workers."""

    SCALE_UP = "a node joins"
    SCALE_DOWN = "a node is lost"
    WORKER_FAILURE = "a local worker has failed"
    REPEATED_FAILURE = "local workers fail again and again, or one does not answer"
    NO_RESTART_LEFT = "a local worker has failed, and no restart is left"
    FINAL_FAILURE = "a local worker has failed, and a restart cannot mend that"
    NO_PROGRESS = "a local worker has failed, and restarts do not get beyond a step"


class Reaction(Enum):
    """A step of what an agent does; it waits for its end before the next one."""

    PAUSE = "broadcast PAUSE"
    USE_RESTART = "use up a restart"
    LEAVE_WORLD = "leave the world, which is a scale down for the others"
    STOP_WORKERS = "terminate the local workers"
    START_WORKERS = "start the local workers"
    REPLACE_WORKERS = "start the failed workers anew"
    RENDEZVOUS = "wait for the next world"
    RESUME = "broadcast WORK"
    LEAVE_RUN = "leave the run with an error"
    CLOSE_RUN = "end the run with an error"


_UP, _DOWN = RunEvent.SCALE_UP, RunEvent.SCALE_DOWN
_FAILURE, _AGAIN = RunEvent.WORKER_FAILURE, RunEvent.REPEATED_FAILURE
_END, _FINAL = RunEvent.NO_RESTART_LEFT, RunEvent.FINAL_FAILURE
_STUCK = RunEvent.NO_PROGRESS
_R = Reaction

_TERMINATE = (_R.STOP_WORKERS, _R.RENDEZVOUS, _R.START_WORKERS)
_REINITIALIZE = (_R.PAUSE, _R.RENDEZVOUS, _R.RESUME)
_REJOIN = (
    *(_R.USE_RESTART, _R.LEAVE_WORLD, _R.STOP_WORKERS, _R.START_WORKERS),
    *(_R.RENDEZVOUS, _R.RESUME),
)
_LEAVE = (_R.LEAVE_RUN, _R.STOP_WORKERS)
_CLOSE = (_R.CLOSE_RUN, _R.STOP_WORKERS)

REACTIONS: dict[RestartPolicy, dict[RunEvent, tuple[Reaction, ...]]] = {
    RestartPolicy.HARD: {
        _UP: _TERMINATE,
        _DOWN: _TERMINATE,
        _FAILURE: (_R.USE_RESTART, *_TERMINATE),
        _AGAIN: (_R.USE_RESTART, *_TERMINATE),
        _END: _CLOSE,
        _FINAL: _CLOSE,
        _STUCK: _CLOSE,
    },
    RestartPolicy.SOFT: {
        _UP: _REINITIALIZE,
        _DOWN: _REINITIALIZE,
        _FAILURE: _REJOIN,
        _AGAIN: _REJOIN,
        _END: _LEAVE,
        _FINAL: _LEAVE,
        _STUCK: _CLOSE,
    },
    RestartPolicy.SOFT_NO_REPLACE: {
        _UP: _REINITIALIZE,
        _DOWN: _REINITIALIZE,
        _FAILURE: _LEAVE,
        _AGAIN: _LEAVE,
        _END: _LEAVE,
        _FINAL: _LEAVE,
        _STUCK: _CLOSE,
    },
    RestartPolicy.SOFT_REPLACE: {
        _UP: _REINITIALIZE,
        _DOWN: _REINITIALIZE,
        _FAILURE: (
            *(_R.USE_RESTART, _R.LEAVE_WORLD, _R.PAUSE, _R.REPLACE_WORKERS),
            *(_R.RENDEZVOUS, _R.RESUME),
        ),
        _AGAIN: _REJOIN,
        _END: _LEAVE,
        _FINAL: _LEAVE,
        _STUCK: _CLOSE,
    },
}


def event_of_failure(
    policy: RestartPolicy, num_restarts_left: int, num_soft_failures: int, max_soft_failures: int
) -> RunEvent:
    """What a failure is for the table.

    ``num_soft_failures``: of late, this one among them. ``soft-no-replace`` counts no restarts.
    """
    if num_restarts_left <= 0 and policy is not RestartPolicy.SOFT_NO_REPLACE:
        return RunEvent.NO_RESTART_LEFT
    if num_soft_failures > max_soft_failures:
        return RunEvent.REPEATED_FAILURE
    return RunEvent.WORKER_FAILURE
