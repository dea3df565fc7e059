"""Carries a fault out: one small function for each kind, and what has to be undone later."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial

from chaos.faults import (
    HEARTBEAT_TIMEOUT_S,
    HOLD_S,
    JOIN_TIMEOUT_S,
    LIGHTHOUSE_AWAY_S,
    SETTLE_S,
    TRAIN_ON_S,
    Fault,
    Kind,
)
from chaos.stage import Stage

# Has an action done after so many seconds.
Later = Callable[[float, Callable[[], object]], None]
# Until it is woken.
_FOR_LONG_S = 30.0


def carry_out(fault: Fault, stage: Stage, later: Later) -> float:
    """Begin now; the instant from which on it can be felt, which may be yet to come."""
    return _DEEDS[fault.kind](fault, stage, later)


def _kill_worker(fault: Fault, stage: Stage, _: Later) -> float:
    return stage.crew_of(fault.group).kill(stage.workers(fault.group)[fault.worker])


def _kill_group(fault: Fault, stage: Stage, _: Later) -> float:
    first, *others = stage.workers(fault.group)
    for fellow in others:
        stage.crew_of(fault.group).kill(fellow)
    return stage.crew_of(fault.group).kill(first, with_manager=True)


def _kill_manager(fault: Fault, stage: Stage, _: Later) -> float:
    return stage.workers(fault.group)[0].kill_manager()


def _freeze_group(fault: Fault, stage: Stage, later: Later) -> float:
    workers = stage.workers(fault.group)
    instants = [worker.signal_all(signal.SIGSTOP) for worker in workers]
    later(fault.length_s, lambda: [worker.signal_all(signal.SIGCONT) for worker in workers])
    return instants[0]


def _freeze_worker(fault: Fault, stage: Stage, later: Later) -> float:
    worker = stage.workers(fault.group)[fault.worker]
    later(fault.length_s, lambda: worker.signal(signal.SIGCONT))
    return worker.signal(signal.SIGSTOP)


def _hang(fault: Fault, stage: Stage, _: Later) -> float:
    at = time.monotonic()
    stage.workers(fault.group)[fault.worker].order(f"hang {fault.length_s}")
    return at


def _hang_inside(fault: Fault, stage: Stage, _: Later) -> float:
    at = time.monotonic()
    stage.workers(fault.group)[fault.worker].order(f"hang_inside {fault.length_s}")
    return at


def _fail_sum(fault: Fault, stage: Stage, _: Later) -> float:
    at = time.monotonic()
    stage.workers(fault.group)[fault.worker].order("fail")
    return at


def _cut_off(fault: Fault, stage: Stage, later: Later) -> float:
    at = time.monotonic()
    stage.cut(fault.group)
    later(fault.length_s, lambda: stage.mend(fault.group))
    return at


def _drain(fault: Fault, stage: Stage, _: Later) -> float:
    workers = stage.workers(fault.group)
    for worker in workers:  # one is told, and all of them go
        worker.told_to_go = True
    return workers[fault.worker].signal(signal.SIGTERM)


def _kill_lighthouse(fault: Fault, stage: Stage, later: Later) -> float:
    lighthouse, at = stage.lighthouses[fault.worker], time.monotonic()
    lighthouse.kill()
    later(LIGHTHOUSE_AWAY_S, lambda: lighthouse.start(wait=False))
    return at


def _freeze_store_host(fault: Fault, stage: Stage, later: Later) -> float:
    """It has asked, and waits for others; the quorum with a newcomer then meets at its store."""
    *others, newcomer = stage.fellows(fault.group)
    stage.order(newcomer, f"hang {_FOR_LONG_S}")  # it is left out, and comes back as a newcomer
    left_out_s = JOIN_TIMEOUT_S + SETTLE_S
    frozen_s = left_out_s + SETTLE_S
    woken_s = frozen_s + SETTLE_S
    for other in others:
        later(left_out_s, partial(stage.order, other, f"hang {_FOR_LONG_S}"))
        later(woken_s, partial(stage.order, other, "wake"))
    later(frozen_s, partial(stage.signal, fault.group, signal.SIGSTOP))
    later(frozen_s, partial(stage.order, newcomer, "wake"))
    later(woken_s + fault.length_s, partial(stage.signal, fault.group, signal.SIGCONT))
    return time.monotonic() + frozen_s


def _leave_stale_survivor(fault: Fault, stage: Stage, later: Later) -> float:
    """An operator lets it go back, who comes late: it must not have done so by itself."""
    stage.signal(fault.group, signal.SIGSTOP)
    gone_s = HEARTBEAT_TIMEOUT_S + TRAIN_ON_S
    accepted_s = gone_s + SETTLE_S + HOLD_S
    others = stage.fellows(fault.group)
    later(gone_s, partial(stage.end_for_good, others))
    later(gone_s + SETTLE_S, partial(stage.signal, fault.group, signal.SIGCONT))
    later(accepted_s, partial(stage.accept_loss, stage.job_of(fault.group)))
    later(accepted_s + TRAIN_ON_S, partial(stage.bring_back, others))
    return time.monotonic() + accepted_s


_DEEDS: dict[Kind, Callable[[Fault, Stage, Later], float]] = {
    Kind.WORKER_KILLED: _kill_worker,
    Kind.GROUP_KILLED: _kill_group,
    Kind.MANAGER_KILLED: _kill_manager,
    Kind.GROUP_FROZEN: _freeze_group,
    Kind.WORKER_FROZEN: _freeze_worker,
    Kind.WORKER_HANGS: _hang,
    Kind.STEP_HANGS: _hang_inside,
    Kind.SUM_FAILS: _fail_sum,
    Kind.CUT_OFF: _cut_off,
    Kind.DRAINED: _drain,
    Kind.LIGHTHOUSE_KILLED: _kill_lighthouse,
    Kind.STORE_HOST_FROZEN: _freeze_store_host,
    Kind.STALE_SURVIVOR: _leave_stale_survivor,
}
