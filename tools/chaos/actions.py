"""Injects faults: one small function for each kind; it also schedules what undoes the fault."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial

from tools.chaos.cluster import Cluster
from tools.chaos.faults import (
    HEARTBEAT_TIMEOUT_S,
    HOLD_S,
    JOIN_TIMEOUT_S,
    LIGHTHOUSE_AWAY_S,
    SETTLE_S,
    TRAIN_ON_S,
    Fault,
    Kind,
)

# Runs an action after so many seconds.
Later = Callable[[float, Callable[[], object]], None]
# Until the command `wake`.
_FOR_LONG_S = 30.0


def inject(fault: Fault, cluster: Cluster, later: Later) -> float:
    """Start the fault now; returns when it takes effect, which may be in the future."""
    return _ACTIONS[fault.kind](fault, cluster, later)


def _kill_worker(fault: Fault, cluster: Cluster, _: Later) -> float:
    return cluster.fleet_of(fault.group).kill(cluster.workers(fault.group)[fault.worker])


def _kill_group(fault: Fault, cluster: Cluster, _: Later) -> float:
    first, *others = cluster.workers(fault.group)
    for peer in others:
        cluster.fleet_of(fault.group).kill(peer)
    return cluster.fleet_of(fault.group).kill(first, with_manager=True)


def _kill_manager(fault: Fault, cluster: Cluster, _: Later) -> float:
    return cluster.workers(fault.group)[0].kill_manager()


def _freeze_group(fault: Fault, cluster: Cluster, later: Later) -> float:
    workers = cluster.workers(fault.group)
    instants = [worker.signal_all(signal.SIGSTOP) for worker in workers]
    later(fault.length_s, lambda: [worker.signal_all(signal.SIGCONT) for worker in workers])
    return instants[0]


def _freeze_worker(fault: Fault, cluster: Cluster, later: Later) -> float:
    worker = cluster.workers(fault.group)[fault.worker]
    later(fault.length_s, lambda: worker.signal(signal.SIGCONT))
    return worker.signal(signal.SIGSTOP)


def _hang(fault: Fault, cluster: Cluster, _: Later) -> float:
    at = time.monotonic()
    cluster.workers(fault.group)[fault.worker].command(f"hang {fault.length_s}")
    return at


def _hang_inside(fault: Fault, cluster: Cluster, _: Later) -> float:
    at = time.monotonic()
    cluster.workers(fault.group)[fault.worker].command(f"hang_inside {fault.length_s}")
    return at


def _fail_sum(fault: Fault, cluster: Cluster, _: Later) -> float:
    at = time.monotonic()
    cluster.workers(fault.group)[fault.worker].command("fail")
    return at


def _cut_off(fault: Fault, cluster: Cluster, later: Later) -> float:
    at = time.monotonic()
    cluster.cut(fault.group)
    later(fault.length_s, lambda: cluster.mend(fault.group))
    return at


def _cut_lines(fault: Fault, cluster: Cluster, later: Later) -> float:
    at = time.monotonic()
    for group in (fault.group, *cluster.peers(fault.group)):
        cluster.cut(group)
        later(fault.length_s, partial(cluster.mend, group))
    return at


def _drain(fault: Fault, cluster: Cluster, _: Later) -> float:
    workers = cluster.workers(fault.group)
    for worker in workers:  # one gets the signal, the whole group leaves
        worker.asked_to_end = True
    return workers[fault.worker].signal(signal.SIGTERM)


def _kill_lighthouse(fault: Fault, cluster: Cluster, later: Later) -> float:
    lighthouse, at = cluster.lighthouses[fault.worker], time.monotonic()
    lighthouse.kill()
    later(LIGHTHOUSE_AWAY_S, lambda: lighthouse.start(wait=False))
    return at


def _kill_lighthouses(fault: Fault, cluster: Cluster, later: Later) -> float:
    at = time.monotonic()
    for lighthouse in cluster.lighthouses:
        lighthouse.kill()
        later(fault.length_s, partial(lighthouse.start, wait=False))
    return at


def _freeze_store_host(fault: Fault, cluster: Cluster, later: Later) -> float:
    """Freeze it while it waits for a quorum; the quorum with a newcomer then meets at its store."""
    *others, newcomer = cluster.peers(fault.group)
    cluster.command(newcomer, f"hang {_FOR_LONG_S}")  # evicted, it rejoins as a newcomer
    left_out_s = JOIN_TIMEOUT_S + SETTLE_S
    frozen_s = left_out_s + SETTLE_S
    woken_s = frozen_s + SETTLE_S
    for other in others:
        later(left_out_s, partial(cluster.command, other, f"hang {_FOR_LONG_S}"))
        later(woken_s, partial(cluster.command, other, "wake"))
    later(frozen_s, partial(cluster.signal, fault.group, signal.SIGSTOP))
    later(frozen_s, partial(cluster.command, newcomer, "wake"))
    later(woken_s + fault.length_s, partial(cluster.signal, fault.group, signal.SIGCONT))
    return time.monotonic() + frozen_s


def _leave_stale_survivor(fault: Fault, cluster: Cluster, later: Later) -> float:
    """An operator accepts the loss late: until then the group must not train alone."""
    began_at = time.monotonic()  # so no commit comes after the operator's word, but before its time
    cluster.signal(fault.group, signal.SIGSTOP)
    gone_s = HEARTBEAT_TIMEOUT_S + TRAIN_ON_S
    accepted_s = gone_s + SETTLE_S + HOLD_S
    others = cluster.peers(fault.group)
    later(gone_s, partial(cluster.end_for_good, others))
    later(gone_s + SETTLE_S, partial(cluster.signal, fault.group, signal.SIGCONT))
    later(accepted_s, partial(cluster.accept_loss, cluster.job_of(fault.group)))
    later(accepted_s + TRAIN_ON_S, partial(cluster.bring_back, others))
    return began_at + accepted_s


_ACTIONS: dict[Kind, Callable[[Fault, Cluster, Later], float]] = {
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
    Kind.LIGHTHOUSES_AWAY: _kill_lighthouses,
    Kind.LINES_CUT: _cut_lines,
    Kind.STORE_HOST_FROZEN: _freeze_store_host,
    Kind.STALE_SURVIVOR: _leave_stale_survivor,
}
